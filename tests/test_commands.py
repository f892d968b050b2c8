"""The small commands: what they print, what they leave on disk, and one clear line for every mistake.

    python -m pytest -q tests/test_commands.py
"""
import argparse
import builtins
import json
import sys

import pytest

import commands
import config
import dreamgym
import envs.webshop
import small_run
from config import UserError
from runs import Run
from test_runs import file_size_limit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_run.make(tmp_path_factory.mktemp("runs") / "s0")


def call(*words):
    """Exit code of a command line, as dreamgym.py would run it."""
    parser = argparse.ArgumentParser()
    commands.add_parsers(parser.add_subparsers(required=True))
    args = parser.parse_args([str(w) for w in words])
    return config.run_main(lambda: args.run(args))


def test_report_and_show(folder, capsys, tmp_path):
    assert call("report", folder) == 0 and (folder / "report.html").stat().st_size > 20_000
    assert "report.html" in capsys.readouterr().out
    assert call("report", folder, "--out", tmp_path / "r.html") == 0 and (tmp_path / "r.html").exists()
    assert call("show", folder, "--episode", "-1") == 0
    assert "episode dream-2-0/1" in capsys.readouterr().out


def test_tasks(folder, capsys):
    assert call("tasks", folder) == 0
    first, head, *rows = capsys.readouterr().out.splitlines()
    assert "after iteration 3: 1,398 training tasks and 0 synthetic" in first and len(rows) == 1398
    assert head.split() == ["task", "parent", "visits", "V", "success", "text"] and rows[0].startswith("webshop-")


def test_validate(folder, capsys, tmp_path):
    assert call("validate", folder / "offline.jsonl") == 0
    assert "in 20 episodes, all fine" in capsys.readouterr().out
    lines = (folder / "offline.jsonl").read_text().splitlines()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join([lines[0].replace('"reward": 0.0', '"reward": "much"'), *lines[1:3], "{"]) + "\n")
    assert call("validate", bad) == 2
    found = capsys.readouterr().out.splitlines()
    assert found[0].startswith("line 1: reward: expected float") and found[-1].startswith("line 4: no JSON")


def test_eval_is_repeatable_and_on_disk(folder, capsys):
    assert call("eval", folder, "--temperature", "1") == 0
    shown = capsys.readouterr().out
    path = folder / "eval-dream-test-T1.json"
    first = json.loads(path.read_text())
    assert first["stage"] == "dream" and first["step"] == 3 and len(first["sampled"]["outcomes"]) == 3
    low, high = first["greedy"]["interval"]
    success = first["greedy"]["success"]
    assert 0 <= low <= success + 1e-9 and success <= high <= 1 and "95 % interval" in shown
    assert call("eval", folder, "--temperature", "1") == 0 and json.loads(path.read_text()) == first
    assert call("eval", folder, "--stage", "policy", "--split", "validation") == 0
    assert len(json.loads((folder / "eval-policy-validation-T0.4.json").read_text())["greedy"]["outcomes"]) == 2


def test_eval_on_a_full_disk_still_says_what_was_measured(folder, capsys):
    before = sorted(path.name for path in folder.iterdir())
    with file_size_limit(64):
        assert call("eval", folder, "--temperature", "2") == 2
    out, err = capsys.readouterr()
    assert "95 % interval" in out and "T2.json: file too large; nothing was changed" in err
    assert sorted(path.name for path in folder.iterdir()) == before


def test_eval_of_a_checkpoint_and_of_exported_models(folder, capsys, tmp_path):
    """The stage's newest checkpoint, its file, and the folder for other programs are one policy."""
    assert call("eval", folder, "--stage", "dream") == 0
    wanted = json.loads((folder / "eval-dream-test-T0.4.json").read_text())
    newest = folder / "checkpoints/dream/00000003.safetensors"
    dreamgym.trained_lm(commands.run_config(folder), "policy", folder, "dream").export(tmp_path / "exported")
    capsys.readouterr()
    for path, name in ((newest, "dream-00000003"), (tmp_path / "exported", f"{tmp_path.name}-exported")):
        assert call("eval", folder, "--checkpoint", path) == 0
        assert f"policy {path} on 3 test tasks" in capsys.readouterr().out
        found = json.loads((folder / f"eval-{name}-test-T0.4.json").read_text())
        assert found["checkpoint"] == str(path)
        assert (found["greedy"], found["sampled"]) == (wanted["greedy"], wanted["sampled"])


def test_play_in_both_worlds(folder, capsys, monkeypatch):
    task = "webshop-2"                                         # the actions only have to be possible
    typed = iter(["1", "search chair", "click 1", "click buy"])
    monkeypatch.setattr(builtins, "input", lambda _: next(typed))
    assert call("play", "--config", small_run.CONFIG, "--profile", "smoke", "--task", task) == 0
    shown = capsys.readouterr().out
    assert "type it out: search <words>" in shown and "[item]" in shown and "reward 0" in shown
    typed = iter(["search chair"])
    assert call("play", "--dream", folder, "--task", task) == 0         # an untrained model ends it at once
    assert "a dream of" in capsys.readouterr().out
    typed = iter([""])
    assert call("play", "--dream", folder) == 0


@pytest.fixture
def program(monkeypatch, capsys):
    """program(words) -> (exit code, output, errors) of ``python dreamgym.py play WORDS``; nothing is typed."""
    monkeypatch.setattr(builtins, "input", lambda _: "")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["dreamgym.py", "play", *map(str, words)])
        capsys.readouterr()
        return config.run_main(dreamgym.main), *capsys.readouterr()
    return run


def own(folder, *settings):
    """The words that made the run folder, and more settings."""
    settings = [*small_run.SETTINGS, f"run.out={folder}", *settings]
    return ["--config", small_run.CONFIG, "--profile", "smoke", *(word for s in settings for word in ("--set", s))]


def test_play_dreams_in_the_run_folder_of_a_configuration(folder, program, monkeypatch):
    """Or in one that is named: the same dream.  Without --dream the environment of the configuration is real."""
    task = ["--task", "webshop-2"]
    code, shown, _ = program(*own(folder), "--dream", *task)
    assert code == 0 and f"a dream of {folder}; " in shown
    assert program("--dream", *own(folder), *task)[:2] == program("--dream", folder, *task)[:2] == (0, shown)
    assert "the real environment; " in program(*own(folder), *task)[1]
    assert program(*own(folder, "run.keep_checkpoints=9"), "--dream", *task)[:2] == (0, shown)      # alters no number
    monkeypatch.setenv("HOME", str(folder.parent))
    assert f"a dream of {folder}; " in program(*own("~/" + folder.name), "--dream", *task)[1]


@pytest.mark.parametrize("words, message", [
    (("--dream",), "play: name the environment with --config FILE, or a run with --dream RUN"),
    (("--dream", "--set", "rl.lr=1"), "play: name the environment"),
    (("--profile", "smoke"), "play: name the environment"),
    (("--dream", "RUN", "--config", small_run.CONFIG), "{} has its own configuration; leave --config, --profile and"),
    (("--config", small_run.CONFIG, "--dream", "RUN"), "has its own configuration"),
    (("--dream", "RUN", "--profile", "smoke"), "has its own configuration"),
    (("--set", "mexp.temperature=1", "--dream", "RUN"), "has its own configuration"),
    (("--config", small_run.CONFIG, "--set", "run.out=nope", "--dream"), "nope: no such folder"),
    (("--config", "nope.yaml", "--dream"), "nope.yaml"),
    (("OWN", "--set", "mexp.temperature=1", "--dream"), "{0} holds a run of another configuration: mexp.temperature: "
     "0.0 -> 1.0 (there -> here); play in that run with --dream {0} alone")])
def test_play_ignores_nothing_that_was_typed(folder, program, words, message):
    words = [w for word in words for w in (own(folder) if word == "OWN" else [folder if word == "RUN" else word])]
    code, shown, err = program(*words)
    assert (code, shown) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert message.format(folder) in err


@pytest.mark.parametrize("words, message", [
    (("show", "nope"), "no such folder"), (("report", "."), "no run folder"), (("tasks", "nope"), "no such folder"),
    (("validate", "nope.jsonl"), "cannot read nope.jsonl"), (("eval", "RUN", "--stage", "s2r"), "it has dream, policy"),
    (("eval", "RUN", "--temperature", "-1"), "between 0 and 5"), (("play",), "--config FILE"),
    (("play", "--dream", "RUN", "--task", "x"), "no such task"), (("show", "RUN", "--episode", "x"), "no episode x"),
    (("report", "RUN", "--out", "nope/r.html"), "no such folder")])
def test_mistakes_are_one_line(folder, capsys, words, message):
    assert call(*(folder if w == "RUN" else w for w in words)) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("error: ") and err.count("\n") == 1


def test_no_checkpoint_yet(folder, tmp_path):
    (tmp_path / "config.yaml").write_text((folder / "config.yaml").read_text())
    with pytest.raises(UserError, match="no checkpoint of stage dream or real yet"):
        commands.newest_stage(tmp_path, ("dream", "real"))


def test_dry_run(capsys, tmp_path):
    cfg, _ = config.load(small_run.CONFIG, "smoke", [f"run.out={tmp_path / 'out'}"])
    commands.dry_run(cfg)
    shown = capsys.readouterr().out
    for part in ("4 tasks x 4 = 16 episodes", "parameters", "KV cache", "first prompt of the policy:\n<task> ",
                 "first prompt of the experience model:\n"):
        assert part in shown
    assert not (tmp_path / "out").exists()


def test_the_first_start_opens_the_world_once(monkeypatch, tmp_path):
    """Its checks and its first stage: official data take minutes."""
    opened, original = [], envs.webshop.open_world
    monkeypatch.setattr(envs.webshop, "open_world", lambda cfg: opened.append(cfg) or original(cfg))
    cfg, reason = config.load(small_run.CONFIG, "smoke", [*small_run.SETTINGS, f"run.out={tmp_path}", "env.max_steps=7"])
    commands.preflight(cfg)
    with Run.open(cfg, reason, [], dreamgym.STAGES) as run:
        run.resume("collect")
        dreamgym.collect(cfg, run)
    world = envs.open_world(cfg.env)
    assert opened == [cfg.env] and world.make().max_steps == 7
    other = envs.open_world(cfg.env.model_copy(update={"max_steps": 8}))
    assert len(opened) == 2 and other is not world and other.make().max_steps == 8


def test_expected_time_follows_the_sizes(monkeypatch):
    def seconds(*overrides, profile="cpu"):
        return commands.expected(config.load(small_run.CONFIG, profile, overrides)[0])

    whole = seconds()
    assert 120 < sum(whole.values()) < 1800
    assert seconds("rl.iterations=48")["RL in the dream"] > 1.7 * whole["RL in the dream"]
    assert seconds("run.processes=1")["evaluation"] > whole["evaluation"]
    assert "RL in the dream" not in seconds("run.method=bc")
    assert sum(seconds(profile="smoke").values()) < 90
    monkeypatch.setattr(commands, "speed", lambda processes: commands.REFERENCE / 2)
    assert "only known for" in commands.estimate(config.load(small_run.CONFIG, "smollm2")[0])
    text = commands.estimate(config.load(small_run.CONFIG, "cpu")[0])
    assert commands.clock(2 * sum(whole.values())) in text


def test_speed_is_measured_quickly():
    assert 1e8 < commands.speed(2) < 1e13
