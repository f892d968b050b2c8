"""The whole program: a tiny run from end to end, and the same run killed again and again.

DREAMGYM_KILLS (default 2) says how often the run is killed: DREAMGYM_KILLS=20 python -m pytest tests/test_main.py
"""
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = ["--profile", "smoke", "--set", "policy.steps=12", "--set", "mexp.steps=12", "--set", "eval.tasks=4",
        "--set", "eval.validation_tasks=4", "--set", "env.max_steps=4", "--set", "mexp_model.max_new_tokens=24",
        "--set", "policy_model.max_new_tokens=8", "--set", "collect.noisy=30", "--set", "run.processes=1",
        "--set", "s2r.transitions=64", "--set", "rl.tasks_per_step=2", "--set", "rl.eval_every=1"]


def command(out: Path, *more: str) -> list[str]:
    return [sys.executable, "dreamgym.py", "--config", "configs/webshop.yaml", *TINY, "--set", f"run.out={out}", *more]


def start(out: Path, *more: str) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DREAMGYM_CACHE": str(out.parent / "cache")}
    return subprocess.Popen(command(out, *more), cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def finish(out: Path, *more: str) -> str:
    process = start(out, *more)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    return stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(run folder, what it printed, seconds it took)."""
    out, began = tmp_path_factory.mktemp("main") / "run", time.time()
    return out, finish(out), time.time() - began


def test_all_stages_end_in_a_table_of_real_success(finished):
    out, printed, _ = finished
    results = json.loads((out / "results.json").read_text())
    assert set(results["policies"]) == {"cloned", "dream", "s2r"}
    assert results["real"]["transitions"]["rl"] == 0                          # the dream used nothing real
    assert 0 < results["real"]["transitions"]["s2r"] <= 64
    assert "real success on 4 held-out test tasks" in printed and "RL in the dream" in printed


def test_a_finished_run_is_not_repeated(finished):
    out, _, seconds = finished
    before = (out / "metrics.jsonl").read_bytes()
    assert "RL in the dream" in finish(out)
    assert (out / "metrics.jsonl").read_bytes() == before


def test_another_configuration_is_refused(finished):
    out, *_ = finished
    process = start(out, "--set", "rl.lr=0.5")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 2 and "rl.lr" in stderr and "Traceback" not in stderr


def test_killed_at_random_moments_it_ends_the_same(finished, tmp_path):
    whole, _, seconds = finished
    out, rng = tmp_path / "run", random.Random(0)
    for _ in range(int(os.environ.get("DREAMGYM_KILLS", 2))):
        process = start(out)
        try:
            process.communicate(timeout=rng.uniform(0.2, 0.9) * seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    finish(out)
    assert (out / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    one, other = (json.loads((folder / "results.json").read_text()) for folder in (whole, out))
    assert one == other
