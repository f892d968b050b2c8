"""The scripts behind the README's numbers: statistics by hand, the sampler that is compared with, the variants.

    python -m pytest -q tests/test_benchmarks.py
"""
import json
import sys
from pathlib import Path

import pytest

import config
import dreamgym
import small_run
from buffer import read_transitions
from envs import open_world

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import dream                                                                        # noqa: E402
import seeds                                                                        # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run.make(tmp_path_factory.mktemp("runs") / "run", 0, "mexp_model.max_new_tokens=24")


def found(seed, success, constant, turns, **changes):
    """A finished run with one policy."""
    cfg = config.Config()
    cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"seed": seed})} | changes)
    one = {"success": success, "tasks": 50}
    metrics = [{"stage": "dream", "constant_groups": c, "turns": turns} for c in constant]
    results = {"policies": {"dream": dict.fromkeys(seeds.COLUMNS, one)}, "tasks": 50, "rules": {}}
    return seeds.Found(Path("runs"), cfg, results, {}, metrics, {"commit": "0123456789abcdef", "cpus": 2})


# ------------------------------------------------------------------------------------------------ seeds.py
def test_intervals_over_seeds():
    mean, half = seeds.interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.302653 / 3 ** 0.5)                 # t with two degrees of freedom
    assert seeds.interval([5.0]) == (5.0, None)
    assert seeds.cell([5.0]) == "5.0 (5.0)" and seeds.cell([1, 3]) == "2.0 ± 12.7 (1.0, 3.0)" and seeds.cell([]) == "-"


def test_two_sets_are_paired_by_seed(capsys):
    plain = config.Config().curriculum.model_copy(update={"enabled": False})
    first = [found(0, 0.8, [0.5, 0.3], 100), found(1, 0.6, [0.2, 0.2], 300), found(7, 0.1, [0.0], 10)]
    second = [found(1, 0.5, [0.4, 0.4], 100, curriculum=plain), found(0, 0.6, [0.6, 0.6], 100, curriculum=plain)]
    seeds.against(first, second)
    text = capsys.readouterr().out
    assert "curriculum.enabled: true -> false" in text.lower() and "2 pairs" in text and "run.seed" not in text
    assert "| RL in the dream, greedy: real success, % | 70.0 ± 127.1 (80.0, 60.0) | 55.0 ± 63.5 (60.0, 50.0) | " \
           "15.0 ± 63.5 (20.0, 10.0) |" in text
    assert "groups with a signal, % | 70.0 ± 127.1 (60.0, 80.0) | 50.0 ± 127.1 (40.0, 60.0) | 20.0 ± 0.0" in text
    assert "transitions | 400 ± 2,541 (200, 600) | 200 ± 0 (200, 200) |" in text
    assert "behaviour cloning" not in text                     # no run holds it
    with pytest.raises(config.UserError, match="no seed"):
        seeds.against(first[2:], second)


def test_runs_of_different_methods_and_unfinished_ones(run, tmp_path, capsys):
    one = seeds.Found.read(run)
    other = seeds.Found(run, one.cfg, {"policies": {}, "tasks": 3, "rules": {}}, {}, [], one.start)
    seeds.overview([one, other])
    text = capsys.readouterr().out
    assert "| RL in the dream | 50.0 (50.0) | 50.0 (50.0) | 50.0 (50.0) |" in text and "false success | 2.0" in text
    with pytest.raises(config.UserError, match="no finished run"):
        seeds.Found.read(tmp_path)


# ------------------------------------------------------------------------------------------------ dream.py
def test_both_samplers_write_the_same_texts(run):
    cfg = config.load(run / "config.yaml")[0]
    model = dream.commands.dream_world(cfg, run, open_world(cfg.env)).model
    steps = dream.distinct_steps(model, read_transitions(run / "offline.jsonl"), 12, 0)
    prompts = [model.codec.prompt(q, d) for q, d in zip(steps, model.codec.retrieve(steps))]
    assert len(set(prompts)) == 12
    ours = model._write(prompts, 0.0)
    for rows in (12, 5, 1):
        theirs = dream.Stock(model, rows)._write(prompts, 0.0)
        same = sum(a == b for a, b in zip(ours, theirs))
        assert same >= 11                                      # low precision may turn one near-tie


def test_dreamed_turns_are_asked_as_in_training(run):
    first, *rest = dream.dreamed_turns(run / "dream.jsonl")
    dreams = read_transitions(run / "dream.jsonl")
    assert len(rest) == 2 and sum(map(len, first)) == sum(t.episode.startswith("dream-0-") for t in dreams)
    assert [len(q.history) for q in first[1]] == [1, 1] and first[1][0].past == [first[0][0].state]


def test_a_variant_is_trained_once_on_the_same_data(run, monkeypatch, capsys):
    trained = []

    def train(cfg, role, folder, *_):
        trained.append(folder.name)
        assert (folder / "offline.jsonl").read_bytes() == (run / "offline.jsonl").read_bytes()
        assert cfg.run.seed == 0 and role == "mexp"

    def measure(cfg, one):
        share = {"value": 0.5 if cfg.retrieval.k else 0.25, "low": 0.1, "high": 0.9, "n": 40}
        names = ("exact", "done", "false_success", "false_failure", "unparsed")
        one.path("fidelity.json").write_text(
            json.dumps(dict.fromkeys(names, share) | {"by_action": {"home: search ..": share}}))
        one.mark_done("fidelity")

    monkeypatch.setattr(dreamgym, "train_backbone", train)
    monkeypatch.setattr(dreamgym, "measure_fidelity", measure)
    monkeypatch.setattr(dream.parallel, "side_by_side", lambda jobs, threads, at_once, stopping=bool: [
        fn(*args, stopping) for fn, args in jobs])
    monkeypatch.setattr(sys, "argv", ["dream.py", "ablate", str(run), "retrieval.k=0"])
    for _ in range(2):
        assert dream.main() == 0
    assert sorted(trained) == ["as it is", "retrieval.k=0"]    # the second time nothing is left to do
    text = capsys.readouterr().out
    assert "| retrieval.k=0 | 25.0 [10.0, 90.0] |" in text and "| home: search .. | 40 | 50.0 [10.0, 90.0] | 25.0" in text
    assert list((run / "variants" / "as it is" / "checkpoints" / "mexp").iterdir())
