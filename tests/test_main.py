"""The whole program: a tiny run from end to end, and the same run killed and interrupted again and again.

DREAMGYM_KILLS (default 2) says how often: DREAMGYM_KILLS=20 python -m pytest tests/test_main.py
"""
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import dreamgym
import runs
from launch import ROOT, launch

KILLS = int(os.environ.get("DREAMGYM_KILLS", 2))
TINY = ["--config", "configs/webshop.yaml", "--profile", "smoke", *(word for setting in (
    "policy.steps=8", "mexp.steps=8", "policy.batch_tokens=544", "mexp.batch_tokens=704", "eval.tasks=4",
    "eval.validation_tasks=4", "env.max_steps=4", "mexp_model.max_new_tokens=24", "policy_model.max_new_tokens=8",
    "collect.noisy=30", "s2r.transitions=48", "rl.tasks_per_step=2", "rl.eval_every=1", "rl.minibatches=1",
    "rl.algorithm=ppo", "rl.value_warmup=0", "rl.entropy_coef=0.1")     # nothing is won here, yet every step moves
    for word in ("--set", setting))]


def start(out: Path, *more: str, die=None, processes: int = 1):
    return launch(out.with_suffix(".log"), *TINY, "--set", f"run.processes={processes}", "--set", f"run.out={out}", *more,
                  die=die)


def printed(out: Path) -> str:
    return out.with_suffix(".log").read_text()


def finish(out: Path, *more: str, processes: int = 1) -> str:
    process = start(out, *more, processes=processes)
    process.join(600)
    assert process.exitcode == 0, printed(out)
    return printed(out)


def outcome(out: Path) -> tuple:
    """All that a run leaves and that may not depend on how often it was stopped."""
    models = sorted((out / "models").glob("*/*.safetensors"))
    return ((out / "metrics.jsonl").read_bytes(), json.loads((out / "results.json").read_text()),
            (out / "dream.jsonl").read_bytes(), (out / "real.jsonl").read_bytes(), [path.read_bytes() for path in models])


def wait_for(condition, process, out: Path, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.is_alive() and time.monotonic() < end, printed(out)
        time.sleep(0.02)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(run folder, what it printed, seconds it took)."""
    out, began = tmp_path_factory.mktemp("main") / "run", time.time()
    return out, finish(out), time.time() - began


def test_all_stages_end_in_a_table_of_real_success(finished):
    out, shown, _ = finished
    results = json.loads((out / "results.json").read_text())
    assert set(results["policies"]) == {"cloned", "dream", "s2r"}
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(line["steps"] > 0 and line["grad_norm"] > 0 for line in metrics if line["stage"] in ("dream", "s2r"))
    assert results["real"]["transitions"]["rl"] == 0                          # the dream used nothing real
    played = results["real"]["episodes"]
    assert 0 < played["s2r"] <= results["real"]["transitions"]["s2r"] <= min(48, 4 * played["s2r"])
    assert played["s2r"] % 4 == 0 and (played["rl"], played["offline"]) == (0, 42)            # groups of 4
    assert "real success on 4 held-out test tasks" in shown and "RL in the dream" in shown
    assert re.search(r"dream: 2/2  success \S+  reward \S+  kl \S+  real_greedy \S+  real_sampled", shown)
    assert "\r" not in out.with_suffix(".log").read_bytes().decode() and "it/s" not in shown       # no bars in a log
    lines = [json.loads(line) for line in (out / "real.jsonl").read_text().splitlines()]
    assert {line["episode"].split("/")[0] for line in lines} == {"eval-cloned", "eval-dream", "eval-s2r"}
    times = [json.loads(line) for line in (out / "times.jsonl").read_text().splitlines()]
    assert [(t["stage"], t["step"]) for t in times[:2]] == [("dream", 1), ("dream", 2)] and times[0]["seconds"] > 0


def test_the_memory_of_the_dream_is_kept(finished, capsys):
    """What the policy was trained in can be played and measured later; a damaged copy says what it lost."""
    out, *_ = finished
    cfg, _ = dreamgym.report.run_config(out)
    world, offline = dreamgym.open_world(cfg.env), dreamgym.read_transitions(out / "offline.jsonl")
    grammar = dreamgym.training_grammar(world, offline)
    first, last = dreamgym.new_buffer(cfg, grammar, world, offline), dreamgym.last_buffer(cfg, out, grammar, world, offline)
    assert last.stats()["real"] == first.stats()["real"] == len(first) and capsys.readouterr().err == ""
    dreamed = [line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if line["stage"] == "dream"]
    assert last.stats()["dream"] == dreamed[-1]["buffer_dream"] and last.counts["added"] >= len(first)
    (out / "buffer-dream").rename(out / "aside")
    try:
        assert dreamgym.last_buffer(cfg, out, grammar, world, offline).rows() == first.rows()
        shutil.copytree(out / "aside", out / "buffer-dream")
        (out / "buffer-dream/buffer.jsonl").write_bytes((out / "aside/buffer.jsonl").read_bytes()[:-40])
        assert len(dreamgym.last_buffer(cfg, out, grammar, world, offline)) == len(last) - 1
        assert "1 of" in capsys.readouterr().err
    finally:
        shutil.rmtree(out / "buffer-dream", ignore_errors=True)
        (out / "aside").rename(out / "buffer-dream")


@pytest.mark.parametrize("found, limit, said", [
    ({"value": 0.02, "n": 50}, 0.05, None), ({"value": 0.2, "n": 50}, 0.05, "20.0% is above"), ({"value": 1.0, "n": 9}, 1.0, None),
    ({"value": None, "n": 0}, 0.05, "unknown"), ({"value": None, "n": 0}, 1.0, None)])
def test_the_gate_wants_evidence(tmp_path, found, limit, said):
    share = {"low": 0.0, "high": 1.0} | found
    (tmp_path / "fidelity.json").write_text(json.dumps({"false_success": share, "false_failure": share}))
    cfg = dreamgym.Config.model_validate({"mexp": {"gate_false_success": limit, "gate_false_failure": limit}})
    run = types.SimpleNamespace(path=lambda name: tmp_path / name)
    if said:
        with pytest.raises(dreamgym.UserError, match=said):
            dreamgym.gate(cfg, run)
    else:
        dreamgym.gate(cfg, run)


def test_a_sampled_dream_repeats_itself(monkeypatch):
    """Second attempts and a temperature draw from the seed, the iteration and the process, never from torch's own state."""
    job = dreamgym.RLJob.__new__(dreamgym.RLJob)
    job.cfg, job.stage = dreamgym.Config(), "dream"
    job.mexp = types.SimpleNamespace(generator=torch.Generator(), forget=lambda: None)
    job.batch, job.words, job.policy = types.SimpleNamespace(begin=lambda prefix: None, source="dream"), [], None
    job.grammar = job.format = types.SimpleNamespace(admissible=None)
    job.policy = types.SimpleNamespace(device="cpu")
    monkeypatch.setattr(dreamgym.rollouts, "rollout", lambda *args, **options: job.mexp.generator.initial_seed())
    seeds = [job.play([], iteration) for iteration in (0, 1, 0)]
    assert seeds[0] == seeds[2] != seeds[1]


def test_real_episodes_of_all_processes_are_counted(monkeypatch):
    """Two processes, each with half of the groups, are in the ledger what one is that plays them all."""
    def enriched(stage, used, episodes):
        job = dreamgym.RLJob.__new__(dreamgym.RLJob)
        job.stage, job.dreaming, job.used, job.real = stage, False, used, 0
        job.run = types.SimpleNamespace(ledger=runs.Ledger())
        job.enrich(episodes)
        return job.run.ledger.state(), job.real, job.used

    alone = enriched("s2r", 18, 8), enriched("real", 30, 16)
    monkeypatch.setattr(dreamgym.parallel, "gather", lambda items: items + items)
    assert alone == (enriched("s2r", 9, 4), enriched("real", 15, 8))
    assert alone[1][0]["episodes"]["rl"] == 16 and alone[0][0]["episodes"]["s2r"] == 8


def test_sim_to_real_goes_on_where_the_dream_ended(finished):
    """Policy, optimizer and critic: the first real step is no first step of AdamW."""
    out, *_ = finished
    cfg, _ = dreamgym.report.run_config(out)
    (out / "checkpoints/s2r").rename(out / "checkpoints/aside")
    try:
        job = dreamgym.RLJob(cfg, "s2r", out, None)
    finally:
        (out / "checkpoints/aside").rename(out / "checkpoints/s2r")
    dreamt = runs.Run.newest(out, "dream")[1]
    saved, own = dreamt["optimizer"]["state"], job.optimizer.state_dict()["state"]
    assert saved and all(torch.equal(own[i]["exp_avg_sq"], saved[i]["exp_avg_sq"]) for i in saved)
    assert job.value.updates == dreamt["value"]["updates"] > 0


def test_learning_rate_falls_and_sim_to_real_begins_with_its_own():
    job = dreamgym.RLJob.__new__(dreamgym.RLJob)
    job.cfg, job.stage, job.iteration, job.real = dreamgym.Config(), "dream", 0, 0
    rl, s2r = job.cfg.rl, job.cfg.s2r
    assert job.rl.lr == rl.lr
    job.iteration = rl.iterations // 2
    assert job.rl.lr == pytest.approx(0.55 * rl.lr)
    job.stage = "s2r"                                          # by its budget
    assert job.rl.lr == s2r.lr
    job.real = s2r.transitions
    assert job.rl.lr == pytest.approx(0.1 * s2r.lr)


def test_the_tiny_model_has_the_precision_of_its_section(finished):
    out, *_ = finished
    cfg, _ = dreamgym.report.run_config(out)
    assert cfg.policy_model.dtype == cfg.mexp_model.dtype == "auto"
    assert dreamgym.new_lm(cfg, "policy", out).compute == torch.float32      # whatever the hardware
    assert dreamgym.new_lm(cfg, "mexp", out).compute == dreamgym.llm.compute_dtype(torch.device("cpu"))
    model = cfg.policy_model.model_copy(update={"dtype": "bfloat16"})
    cfg = cfg.model_copy(update={"policy_model": model})
    assert dreamgym.new_lm(cfg, "policy", out).compute == torch.bfloat16


def test_models_are_loaded_by_plain_transformers(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    out, *_ = finished
    for stage in ("policy", "mexp", "dream", "s2r"):
        model = AutoModelForCausalLM.from_pretrained(out / "models" / stage)
        ids = AutoTokenizer.from_pretrained(out / "models" / stage)("[home]", return_tensors="pt")["input_ids"]
        assert torch.isfinite(model(ids).logits).all()
        weights = runs.Run.newest(out, stage)[1]["weights"]
        assert all(torch.equal(w, weights[n]) for n, w in model.named_parameters() if n in weights) and len(weights) > 9


def test_a_finished_run_is_not_repeated(finished):
    out, *_ = finished
    before = outcome(out)
    assert "RL in the dream" in finish(out)
    assert outcome(out) == before


def test_another_configuration_is_refused(finished):
    out, *_ = finished
    process = start(out, "--set", "rl.lr=0.5")
    process.join(300)
    shown = printed(out)
    assert process.exitcode == 2 and shown.startswith("error: ") and "rl.lr" in shown and shown.count("\n") == 1


def test_the_program_in_a_process_that_imports_it(finished):
    out, *_ = finished
    done = subprocess.run([sys.executable, "dreamgym.py", "--config", "configs/nope.yaml"], cwd=ROOT, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 2 and done.stderr == "error: configs/nope.yaml: cannot be read: no such file or directory\n"


# ------------------------------------------------------------------------------------------------ kills
def test_killed_at_random_moments_it_ends_the_same(finished, tmp_path):
    whole, _, seconds = finished
    out, rng = tmp_path / "run", random.Random(0)
    for _ in range(KILLS):
        process = start(out)
        process.join(rng.uniform(0.1, 0.9) * seconds)
        process.kill()
        process.join()
    finish(out)
    assert outcome(out) == outcome(whole)


def test_killed_while_writing_it_ends_the_same(finished, tmp_path):
    """Every start dies inside the writing of some file, in turn before a torn file is synced and before it is renamed."""
    whole, *_ = finished
    out, rng, torn = tmp_path / "run", random.Random(1), set()
    for number in range(2 * KILLS):
        process = start(out, die=(("fsync", "replace")[number % 2], rng.randint(6, 14)))      # 3 are made at every start
        process.join(600)
        left = [path for path in out.rglob(".*.tmp")]
        torn |= {path.parent.name for path in left if path.suffixes[-2:] == [".safetensors", ".tmp"] or
                 ".safetensors." in path.name}
        assert process.exitcode in (0, -signal.SIGKILL) and (
            process.exitcode == 0 or 1 <= len(left) <= 2), printed(out)      # the torn file, perhaps in a torn folder
    assert torn, "no checkpoint was hit"
    finish(out)
    assert outcome(out) == outcome(whole) and not list(out.rglob(".*.tmp"))


def test_killed_before_finished_training_was_noted(finished, tmp_path, monkeypatch):
    """Policy and experience model are trained, half of their metrics are written: they are not written twice."""
    whole, *_ = finished
    out = tmp_path / "run"
    process = start(out)
    wait_for(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size, process, out)
    process.kill()
    process.join()
    stages = json.loads((out / "stages.json").read_text())
    stages["done"] = {"collect": stages["done"]["collect"]}                   # as if it had died a moment earlier
    (out / "stages.json").write_text(json.dumps(stages))
    finish(out)
    assert outcome(out) == outcome(whole)


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout.split()
    pairs = list(zip(map(int, listed[::2]), map(int, listed[1::2])))
    found, new = [], [pid]
    while new:
        new = [child for child, parent in pairs if parent in new]
        found += new
    return found


def living(pids) -> list[int]:
    alive = []
    for pid in pids:
        try:
            alive += [pid] if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z" else []
        except (FileNotFoundError, ProcessLookupError):
            pass
    return alive


@pytest.mark.skipif(KILLS < 3, reason="minutes, because helpers import everything anew: set DREAMGYM_KILLS")
def test_two_processes_killed_and_interrupted(tmp_path):
    """Helpers die with the first process, wherever it is killed; interrupted helpers save where they are."""
    whole, out, rng = tmp_path / "whole", tmp_path / "run", random.Random(2)
    finish(whole, processes=2)
    process = start(out, processes=2)                                         # two trainings side by side, interrupted
    wait_for(lambda: (out / "stages.json").exists() and len(children(process.pid)) >= 2, process, out)
    time.sleep(1)
    os.kill(process.pid, signal.SIGINT)
    process.join(300)
    assert process.exitcode == 130 and "the same command goes on" in printed(out), printed(out)
    for _ in range(KILLS):
        process = start(out, processes=2)
        wait_for(lambda: len(children(process.pid)) >= 2 or not process.is_alive(), process, out)
        time.sleep(rng.uniform(0, 15))
        helpers = children(process.pid)
        process.kill()
        process.join()
        end = time.monotonic() + 60
        while living(helpers) and time.monotonic() < end:
            time.sleep(0.1)
        assert not living(helpers)
    finish(out, processes=2)
    assert outcome(out) == outcome(whole)


# ------------------------------------------------------------------------------------------------ Ctrl-C, --from
MOMENTS = {                                                  # stage -> whether a run has just begun it
    "policy": lambda out: (out / "stages.json").exists(),
    "dream": lambda out: (out / "checkpoints/dream/00000001.safetensors").exists(),
    "eval": lambda out: (out / "checkpoints/eval").exists()}


def test_interrupted_in_every_stage_it_ends_the_same(finished, tmp_path):
    whole, *_ = finished
    out = tmp_path / "run"
    for stage, begun in MOMENTS.items():
        process = start(out)
        wait_for(lambda: begun(out), process, out)
        os.kill(process.pid, signal.SIGINT)
        process.join(300)
        shown = printed(out)
        assert process.exitcode == 130 and "Traceback" not in shown, shown
        assert "stopping after this step" in shown and shown.endswith("stopped; the same command goes on from here\n")
        assert not (out / "results.json").exists()
        if stage == "policy":                                  # not after the last step, but where it was
            assert (runs.Checkpoints(out / "checkpoints" / stage, 1).steps() or [0])[-1] < 8
    finish(out)
    assert outcome(out) == outcome(whole)


def test_an_interruption_saves_whatever_save_every_says(tmp_path):
    out = tmp_path / "run"
    process = start(out, "--set", "rl.save_every=100", "--set", "rl.iterations=30", "--set", "rl.eval_every=0")
    wait_for(lambda: (out / "metrics.jsonl").exists() and b"dream" in (out / "metrics.jsonl").read_bytes(), process, out)
    os.kill(process.pid, signal.SIGINT)
    process.join(300)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert runs.Checkpoints(out / "checkpoints/dream", 1).steps() == [max(x["step"] for x in lines if x["stage"] == "dream")]


def test_a_second_interruption_ends_it_at_once(tmp_path):
    out = tmp_path / "run"
    process = start(out, "--set", "policy.steps=100000")
    wait_for(lambda: MOMENTS["policy"](out), process, out)
    os.kill(process.pid, signal.SIGSTOP)                       # so that both arrive before a step ends
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 130


def test_from_repeats_a_stage_and_what_follows(finished, tmp_path):
    whole, *_ = finished
    before, stages = outcome(whole), json.loads((whole / "stages.json").read_text())["done"]
    policy = (whole / "checkpoints/policy/00000008.safetensors").stat().st_mtime_ns
    mexp = (whole / "checkpoints/mexp/00000008.safetensors").stat().st_mtime_ns
    finish(whole, "--from", "mexp")
    assert outcome(whole) == before and json.loads((whole / "stages.json").read_text())["done"] == stages
    assert (whole / "checkpoints/policy/00000008.safetensors").stat().st_mtime_ns == policy
    assert (whole / "checkpoints/mexp/00000008.safetensors").stat().st_mtime_ns > mexp
