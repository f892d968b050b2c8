"""Run folders: whole files, exact resumption, locks, ledger, interruption.

    python -m pytest -q tests/test_runs.py
"""
from __future__ import annotations

import errno
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
import types
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import config
import rl_world
import runs
from config import Config, UserError
from runs import Checkpoints, Interrupt, Ledger, Lock, Progress, Run, load_state, save_state

STAGES = ("collect", "policy", "rl")


def make_config(folder, **rl) -> Config:
    return Config(run=config.RunSection(out=str(folder)), rl=config.RLSection(**rl))


def open_run(folder, restart=None, **rl) -> Run:
    return Run.open(make_config(folder, **rl), "profile cpu: asked for", ["dreamgym.py"], STAGES, restart)


class Killed(Exception):
    pass


def work(folder, die_at=None, before=lambda step: None) -> None:
    """Three stages that use every source of randomness; ``die_at`` (stage, step) ends it without any notice."""
    with open_run(folder) as run:
        if not run.stage_done("collect"):
            run.resume("collect")
            run.ledger.add("offline", 100, episodes=10)
            run.mark_done("collect", {"draw": random.random()})
        for stage, steps in (("policy", 3), ("rl", 5)):
            if run.stage_done(stage):
                continue
            model = torch.nn.Linear(2, 1, bias=False)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            private = random.Random(0)
            first, state = run.resume(stage)
            if state is None:
                torch.nn.init.normal_(model.weight)
            else:
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                private.setstate(state["private"])
            for step in range(first + 1, steps + 1):
                x = torch.randn(8, 2) * random.random() * np.random.rand() + private.random()
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.ledger.add("rl", 7)
                run.log(stage, step, loss=loss, real=run.ledger.training(), validation=None)
                before(step)
                if die_at == (stage, step):
                    raise Killed
                if step % 2 == 0:                             # so that some metrics are written after the last one
                    run.checkpoint(stage, step, {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                                                 "private": private.getstate()}, score=-loss.item())
            save_state(run.path(f"{stage}.safetensors"), model.state_dict())
            run.mark_done(stage, {"loss": loss.item()})
        stages = json.loads(run.path("stages.json").read_text())["done"]
        run.write_results({"loss": stages["rl"]["payload"]["loss"]})


def outcome(folder: Path) -> tuple:
    return ((folder / "metrics.jsonl").read_bytes(), (folder / "results.json").read_bytes(),
            load_state(folder / "rl.safetensors")["weight"].tolist(), json.loads((folder / "stages.json").read_text()))


# ------------------------------------------------------------------------------------------------- state

def test_state_survives_a_round_trip(tmp_path):
    model = torch.nn.Linear(3, 3)
    tied = {"a": model.weight, "b": model.weight}
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"tied": tied, "optimizer": optimizer.state_dict(), "half": torch.arange(3).to(torch.bfloat16),
             "none": None, "pi": 0.1 + 0.2, "big": 2**100, "t": (1, ("x", [True, {}])), "ints": {3: "c", (1, 2): 4},
             "$odd": {"$tuple": 1}, "scalar": torch.tensor(5), "empty": torch.zeros(0, 4), "np": np.float32(1.5),
             "u32": np.arange(4, dtype=np.uint32), "f": np.asfortranarray(np.eye(2)), "text": "räksmörgås \u2028"}
    save_state(tmp_path / "s", state)
    loaded = load_state(tmp_path / "s")
    torch.testing.assert_close(loaded.pop("tied"), {k: v.detach() for k, v in tied.items()}, rtol=0, atol=0)
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(loaded.pop("optimizer"))
    assert repr(fresh.state_dict()) == repr(optimizer.state_dict())
    for name in ("half", "scalar", "empty"):
        wanted, got = state[name], loaded.pop(name)
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    for name in ("u32", "f"):
        got = loaded.pop(name)
        assert got.dtype == state[name].dtype and np.array_equal(got, state[name])
    assert loaded == {k: state[k] for k in loaded} and loaded["t"] == (1, ("x", [True, {}]))
    assert isinstance(loaded["t"][1], tuple)


def test_state_refuses_what_it_cannot_hold(tmp_path):
    with pytest.raises(TypeError, match="a state cannot hold set"):
        save_state(tmp_path / "s", {"a": {1, 2}})
    assert list(tmp_path.iterdir()) == []


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_damaged_and_foreign_states(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "s"
    save_state(path, {"a": torch.ones(100)})
    whole = path.read_bytes()
    for damage in (b"", whole[:4], whole[:100], whole[:-1], b"\xff" * 64, pickle.dumps(Bomb())):
        path.write_bytes(damage)
        with pytest.raises(UserError, match="damaged"):
            load_state(path)
    assert not (tmp_path / "exploded").exists()
    from safetensors.torch import save_file
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(UserError, match="not a file of this program"):
        load_state(path)
    with pytest.raises(UserError, match="missing: no such file"):
        load_state(tmp_path / "missing")


@contextmanager
def file_size_limit(size):
    """The system refuses to write files beyond ``size`` bytes: a full disk without a disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "s"
    save_state(path, {"a": torch.ones(10)})
    before = path.read_bytes()
    with file_size_limit(4096), pytest.raises(UserError, match="s: file too large; nothing was changed"):
        save_state(path, {"a": torch.ones(10_000)})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_failing_write_leaves_the_old_file(call, code, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(code, os.strerror(code))
    path = tmp_path / "s"
    runs.write_whole(path, "old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(UserError, match=os.strerror(code).lower()):
        runs.write_whole(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_full_disk_while_a_model_is_exported(tmp_path):
    """The tokenizers library raises plain Exception then; a model that is there stays."""
    tokenizer = rl_world.word_tokenizer()
    with open_run(tmp_path / "r") as run:
        place = tmp_path / "r/models/policy"
        run.export("policy", types.SimpleNamespace(export=tokenizer.save_pretrained))
        before = {path.name: path.read_bytes() for path in place.iterdir()}
        size = len(before["tokenizer.json"])
        assert size > 1.5 * len(before["tokenizer_config.json"])
        with file_size_limit(size - 10), pytest.raises(UserError, match="models/policy: cannot be written: File too large"):
            run.export("policy", types.SimpleNamespace(export=tokenizer.save_pretrained))
        assert {path.name: path.read_bytes() for path in place.iterdir()} == before
        with pytest.raises(ZeroDivisionError):
            run.export("policy", types.SimpleNamespace(export=lambda _: 1 / 0))


def test_full_disk_while_logging_leaves_whole_lines(tmp_path):
    with open_run(tmp_path / "r") as run:
        run.resume("policy")
        run.log("policy", 1, loss=1.0)
        size = (tmp_path / "r" / "metrics.jsonl").stat().st_size
        with file_size_limit(size + 10), pytest.raises(UserError, match="metrics.jsonl: no space left on device"):
            run.log("policy", 2, loss=2.0)
        assert (tmp_path / "r" / "metrics.jsonl").stat().st_size == size
        run.log("policy", 2, loss=2.0)
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 2


def test_random_generators(tmp_path):
    private = {"a": random.Random(1), "b": np.random.default_rng(2), "c": torch.Generator().manual_seed(3)}

    def draw():
        return (random.random(), np.random.rand(), torch.rand(3).tolist(), private["a"].random(),
                private["b"].random(), torch.rand(2, generator=private["c"]).tolist())
    random.gauss(0, 1), np.random.randn()                            # both keep half a pair back
    save_state(tmp_path / "s", runs.rng_state(**private))
    wanted = draw()
    assert draw() != wanted
    runs.set_rng_state(load_state(tmp_path / "s"), **private)
    assert draw() == wanted
    with pytest.raises(KeyError):
        runs.set_rng_state(load_state(tmp_path / "s"), d=random.Random())


def test_derived_seeds():
    seeds = {runs.derive_seed(run, step, task) for run in (0, 1) for step in range(50) for task in ("a", "b", "1")}
    assert len(seeds) == 300 and all(0 <= seed < 2**63 for seed in seeds)
    assert runs.derive_seed(0, np.int64(1), "a") == 963212204654154687        # the same on every machine


def test_newest_and_best_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.steps() == [] and checkpoints.best() is None
    for step, score in enumerate([0.1, 0.7, 0.7, None, 0.5, 0.2], start=1):
        checkpoints.save(step, {"step": step}, score)
    (tmp_path / "c" / "00000006 copy.safetensors").write_bytes(b"")                       # somebody's own file
    assert checkpoints.steps() == [2, 5, 6] and checkpoints.best() == 2
    checkpoints.save(7, {}, 0.9)
    assert checkpoints.steps() == [6, 7] and checkpoints.best() == 7
    assert checkpoints.load(6) == {"step": 6} and checkpoints.newest() == (7, {})


def test_best_and_newest_of_a_stage(tmp_path):
    with open_run(tmp_path / "run") as run:
        assert Run.newest(tmp_path / "run", "rl") == (0, None)
        run.checkpoint("rl", 1, "a", score=0.5)
        run.checkpoint("rl", 2, "b", score=0.4)
        run.checkpoint("policy", 1, "c")
        assert run.checkpoints("rl").best() == 1 and run.checkpoints("policy").best() is None
        assert Run.newest(tmp_path / "run", "rl") == (2, "b")


# ------------------------------------------------------------------------------------------------- resuming

@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "run"
    work(folder)
    return outcome(folder)


@pytest.mark.parametrize("die_at", [("policy", 1), ("policy", 2), ("policy", 3), ("rl", 1), ("rl", 3), ("rl", 5)])
def test_resuming_gives_the_same_bytes(die_at, tmp_path, reference):
    with pytest.raises(Killed):
        work(tmp_path / "run", die_at)
    random.seed(), np.random.seed(), torch.manual_seed(os.getpid())
    work(tmp_path / "run")
    assert outcome(tmp_path / "run") == reference


def test_finished_run_repeats_nothing(tmp_path, reference):
    def never(step):
        raise AssertionError("a finished stage ran again")
    work(tmp_path / "run")
    work(tmp_path / "run", before=never)
    assert outcome(tmp_path / "run") == reference
    real = json.loads((tmp_path / "run" / "results.json").read_text())["real"]
    assert real["training"] == 100 + 8 * 7 and real["episodes"]["offline"] == 10


SCRIPT = """
import os, signal, sys, time
sys.path[:0] = [{root!r}, {tests!r}]
import torch
torch.set_num_threads(1)
import runs, test_runs
"""


def start(body: str) -> subprocess.Popen:
    tests = Path(__file__).parent
    code = SCRIPT.format(root=str(tests.parent), tests=str(tests)) + body
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_killed_process_is_resumed_and_its_lock_taken_over(tmp_path, reference, capsys):
    """A real SIGKILL in the middle of stage rl; while the process lives the folder is refused with its pid."""
    folder = tmp_path / "run"
    process = start(f"""
def before(step):
    if step == 3 and runs.Path({str(folder)!r}, "policy.safetensors").exists():
        print("ready", flush=True)
        time.sleep(60)
test_runs.work({str(folder)!r}, before=before)
""")
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    with pytest.raises(UserError, match=f"in use by process {process.pid} on "):
        work(folder)
    process.kill()
    process.communicate()
    work(folder)
    assert f"took over from process {process.pid}, which ended early" in capsys.readouterr().err
    assert outcome(folder) == reference


def test_interruption(tmp_path):
    """The first Ctrl-C sets a flag, the second ends the process at once."""
    process = start("""
with runs.Interrupt() as interrupt:
    print("ready", flush=True)
    while not interrupt:
        time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(60)
""")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and err.count("\n") == 2 and "press Ctrl-C again" in err


def test_interrupt_restores_the_handlers():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupt() as interrupt:
        assert not interrupt
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_from_repeats_a_stage_and_all_after(tmp_path, reference):
    folder = tmp_path / "run"
    work(folder)
    for name in ("eval-rl-test", "fidelity-rl-test", "fidelity-collect-test"):
        (folder / f"{name}.json").write_text("{}")
    open_run(folder, restart="policy").close()
    assert [path.name for path in folder.glob("*-test.json")] == ["fidelity-collect-test.json"]
    with Run.open(make_config(folder), "", [], ("collect", "policy", "mexp", "rl"), "mexp"):
        assert not list(folder.glob("*-test.json"))                  # of the old experience model, whichever the policy
    with open_run(folder) as run:
        assert run.stage_done("collect") and not run.stage_done("policy") and not run.stage_done("rl")
        assert run.ledger.training() == 100 and not run.path("results.json").exists()
        assert run.checkpoints("policy").steps() == run.checkpoints("rl").steps() == []
    work(folder)
    assert outcome(folder) == reference
    with pytest.raises(UserError, match="--from polcy: unknown stage; did you mean policy?"):
        open_run(folder, restart="polcy")
    assert outcome(folder) == reference


def test_from_that_is_killed_half_way_is_finished_later(tmp_path, monkeypatch, reference):
    folder = tmp_path / "run"
    work(folder)

    def fail(*_):
        raise Killed
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(runs.shutil, "rmtree", fail)
        open_run(folder, restart="policy")
    work(folder)
    assert outcome(folder) == reference


def test_metrics_that_lost_lines_are_refused(tmp_path):
    work(tmp_path / "run")
    open_run(tmp_path / "run", restart="rl").close()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"metrics.jsonl: shorter \(0 bytes\) than recorded"):
        work(tmp_path / "run")


def test_damaged_checkpoint_is_named(tmp_path):
    with pytest.raises(Killed):
        work(tmp_path / "run", die_at=("rl", 5))
    newest = tmp_path / "run" / "checkpoints" / "rl" / "00000004.safetensors"
    newest.write_bytes(newest.read_bytes()[:-3])
    with pytest.raises(UserError, match="rl/00000004.safetensors: damaged"):
        work(tmp_path / "run")
    newest.unlink()                                                  # what the message advises
    work(tmp_path / "run")


# ------------------------------------------------------------------------------------------------- the folder

def test_folder_of_another_configuration(tmp_path):
    open_run(tmp_path / "run").close()
    with pytest.raises(UserError, match="another configuration: rl.lr: 0.0003 -> 0.001 .there -> here.") as caught:
        open_run(tmp_path / "run", lr=1e-3)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="and 2 more"):
        open_run(tmp_path / "run", lr=1e-3, gamma=0.9, lam=0.9, epochs=2, iterations=3, kl_coef=1.0, temperature=2.0)
    open_run(tmp_path / "run").close()                               # the refusals left nothing behind


def test_moved_folder_and_harmless_changes(tmp_path):
    open_run(tmp_path / "run").close()
    (tmp_path / "run").rename(tmp_path / "moved")
    open_run(tmp_path / "moved").close()


def test_folders_that_are_no_run_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("do not touch")
    with pytest.raises(UserError, match="holds other files and no config.yaml"):
        open_run(tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="file exists"):
        open_run(tmp_path / "mine" / "thesis.tex")
    with pytest.raises(UserError, match="not a directory"):
        open_run(tmp_path / "mine" / "thesis.tex" / "run")
    with pytest.raises(UserError, match="file name too long"):
        open_run(tmp_path / ("x" * 300))


def test_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(UserError, match="run: permission denied"):
        open_run(tmp_path / "run")


@pytest.mark.parametrize("name", ["stages.json", "run.json", "config.yaml"])
def test_damaged_files_of_the_folder(name, tmp_path):
    open_run(tmp_path / "run").close()
    (tmp_path / "run" / "stages.json").write_text('{"done": {}, "repeat": []}')
    (tmp_path / "run" / name).write_text('{"done"')
    with pytest.raises(UserError, match=name):
        open_run(tmp_path / "run")


def test_two_owners(tmp_path):
    with open_run(tmp_path / "run"):
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
            open_run(tmp_path / "run")
    open_run(tmp_path / "run").close()


def test_lock_without_flock(tmp_path, monkeypatch):
    """On a file system without flock the pid in the file decides, and only a living one counts."""
    def fail(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(runs.fcntl, "flock", fail)
    child = subprocess.Popen(["sleep", "60"])
    host = runs.platform.node()
    try:
        (tmp_path / "lock").write_text(f"{child.pid} {host}\n")
        with pytest.raises(UserError, match=f"in use by process {child.pid} .* delete .*lock"):
            Lock(tmp_path)
    finally:
        child.kill()
        child.wait()
    lock = Lock(tmp_path)
    assert lock.took_over == child.pid
    lock.close()
    assert (tmp_path / "lock").read_text() == ""
    for text in ("no number", "\x00\xff", "", "²", "9" * 150, "-1"):
        (tmp_path / "lock").write_text(text)
        Lock(tmp_path).close()


def test_what_a_start_records(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    monkeypatch.setenv("HF_TOKEN", "very-secret")
    work(Path("run"))
    open_run("run").close()
    starts = json.loads(Path("run/run.json").read_text())
    assert len(starts) == 2 and starts[0]["command"] == ["dreamgym.py"] and starts[0]["seed"] == 0
    assert torch.__version__.startswith(starts[0]["versions"]["torch"].split("+")[0])
    assert starts[0]["commit"] == runs.git_commit() and starts[0]["cpus"] >= 1
    assert [p.name for p in tmp_path.iterdir()] == ["run"]           # nothing outside the folder
    assert not any(b"very-secret" in p.read_bytes() for p in Path("run").rglob("*") if p.is_file())


def test_a_lost_result_of_a_finished_stage_is_named(tmp_path):
    """Deleting the newest checkpoint of a finished stage must not silently bring an older one back."""
    work(tmp_path / "run")
    newest = tmp_path / "run/checkpoints/rl/00000004.safetensors"
    newest.unlink()
    before = (tmp_path / "run/run.json").read_bytes()
    with pytest.raises(UserError, match="00000004.safetensors: missing, the result of a finished stage; .* --from rl"):
        work(tmp_path / "run")
    assert (tmp_path / "run/run.json").read_bytes() == before
    open_run(tmp_path / "run", restart="rl").close()


def test_appended_lines_and_cuts(tmp_path):
    path = tmp_path / "a.jsonl"
    runs.append_whole(path, "one\n")
    with file_size_limit(6), pytest.raises(UserError, match="no space left on device"):
        runs.append_whole(path, "four\n")
    assert path.read_text() == "one\n"
    with pytest.raises(UserError, match=r"a.jsonl: shorter \(4 bytes\) than recorded \(9\)"):
        runs.cut(path, 9)                                            # never longer, filled with zeros
    assert path.read_text() == "one\n"


def test_leftovers_of_a_killed_write_are_removed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.yaml.123.tmp").write_text("half")
    open_run(tmp_path / "run").close()
    assert not (tmp_path / "run" / ".config.yaml.123.tmp").exists()


# ------------------------------------------------------------------------------------------------- metrics

def test_metric_lines(tmp_path):
    with open_run(tmp_path / "run") as run:
        run.resume("policy")
        run.log("policy", 1, loss=torch.tensor(0.5), n=np.int64(3), bad=float("nan"), note="x")
        with pytest.raises(ValueError, match=r"changed their keys: \['extra', 'note'\]"):
            run.log("policy", 2, loss=1.0, n=1, bad=0.0, extra=1)
        with pytest.raises(TypeError, match="a metric cannot be list"):
            run.log("policy", 2, loss=[1])
        run.log("rl", 1, reward=1)
        run.log_times("rl", 1, seconds=0.25)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"stage": "policy", "step": 1, "loss": 0.5, "n": 3, "bad": null, "note": "x"}',
                     '{"stage": "rl", "step": 1, "reward": 1}']
    assert json.loads((tmp_path / "run" / "times.jsonl").read_text()) == {"stage": "rl", "step": 1, "seconds": 0.25}


def test_ledger():
    ledger = Ledger()
    ledger.add("offline", 1000, episodes=100)
    ledger.add("s2r", 50)
    ledger.add("evaluation", 7)
    assert ledger.training() == 1050
    assert str(ledger) == ("real transitions: offline 1,000, rl 0, s2r 50, validation 0, evaluation 7 "
                           "(training 1,050)")
    with pytest.raises(KeyError):
        ledger.add("other", 1)
    copy = Ledger()
    copy.restore(ledger.state())
    assert copy.state() == ledger.state()


def test_progress_without_a_terminal(capsys):
    with Progress("rl", total=1000, every=60) as progress:
        for _ in range(1000):
            progress.update(loss=0.123456, n=3)
    with Progress("rl", total=10, start=4, every=0.05) as progress:
        progress.update()
        time.sleep(0.06)
        progress.update()
    out, err = capsys.readouterr()
    assert out == "" and err == "rl: 1000/1000  loss 0.1235  n 3\nrl: 6/10\n"
    with Progress("s2r", total=1, every=0) as progress:        # a budget may pay for more iterations than for sure
        progress.update()
        progress.update()
    assert capsys.readouterr().err == "s2r: 1/1\ns2r: 2/2\n"


def test_progress_says_what_is_left(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    with Progress("rl", total=10, start=4) as progress:
        now[0] += 120
        progress.update(2)
    assert capsys.readouterr().err == "rl: 6/10  4 min left\n"
    assert [runs.clock(s) for s in (12.4, 600, 7200)] == ["12 s", "10 min", "2.0 h"]


def open_with_tracker(folder, kind) -> Run:
    cfg = Config(run=config.RunSection(out=str(folder), tracker=kind))
    return Run.open(cfg, "", [], STAGES)


def test_trackers_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        open_with_tracker(tmp_path / "run", "tensorboard")
    with pytest.raises(UserError, match="wandb needs WANDB_API_KEY"):
        open_with_tracker(tmp_path / "run", "wandb")
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    with pytest.raises(UserError, match="pip install wandb"):
        open_with_tracker(tmp_path / "run", "wandb")
    open_with_tracker(tmp_path / "run", "none").close()              # the lock was freed each time


def test_tracker_gets_numbers_only(tmp_path, monkeypatch):
    logged = []
    fake = types.SimpleNamespace(init=lambda **_: types.SimpleNamespace(log=logged.append, finish=lambda: None))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    with open_with_tracker(tmp_path / "run", "wandb") as run:
        run.resume("rl")
        run.log("rl", 3, loss=torch.tensor(0.5), validation=None)
    assert logged == [{"rl/loss": 0.5, "rl/step": 3}]
