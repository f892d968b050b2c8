"""Helper processes: they stop when asked, and end with the process that started them.

    python -m pytest -q tests/test_parallel.py
"""
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import parallel
from config import UserError


def job(place: Path, name: str, stop) -> None:
    """Works until it is asked to stop, then saves."""
    (place / f"{name}.began").write_text(str(os.getpid()))
    while not stop():
        time.sleep(0.05)
    (place / f"{name}.saved").write_text("")


def member(run=None) -> list[int]:
    if parallel.rank():
        raise UserError("the second process says no")
    return parallel.gather([1])


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def began(place: Path) -> list[int]:
    return [int(text) for path in place.glob("*.began") if (text := path.read_text())]


def test_jobs_side_by_side_save_when_asked(tmp_path):
    jobs = [(job, (tmp_path, "a")), (job, (tmp_path, "b"))]
    parallel.side_by_side(jobs, 1, at_once=True, stopping=lambda: len(began(tmp_path)) == 2)
    assert len(list(tmp_path.glob("*.saved"))) == 2


def test_jobs_in_turn_are_not_begun_after_an_interruption(tmp_path):
    asked = iter([False, True, True])
    parallel.side_by_side([(job, (tmp_path, "a")), (job, (tmp_path, "b"))], 1, at_once=False, stopping=lambda: next(asked))
    assert (tmp_path / "a.saved").exists() and not (tmp_path / "b.began").exists()


def test_a_mistake_in_another_process_is_the_message():
    with pytest.raises(UserError, match="the second process says no"):
        parallel.spmd(member, 2, 1, (), ("run",))
    assert parallel.size() == 1                                # nothing is left of the group


def test_helpers_end_with_a_killed_parent(tmp_path):
    code = (f"import sys; sys.path[:0] = {[str(Path(__file__).parent.parent), str(Path(__file__).parent)]!r}\n"
            f"import parallel, pathlib, test_parallel as t\nplace = pathlib.Path({str(tmp_path)!r})\n"
            "if __name__ == '__main__':\n"
            "    parallel.side_by_side([(t.job, (place, 'a')), (t.job, (place, 'b'))], 1, at_once=True)\n")
    (tmp_path / "script.py").write_text(code)
    process = subprocess.Popen([sys.executable, tmp_path / "script.py"])
    end = time.monotonic() + 300
    while len(began(tmp_path)) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    helpers = began(tmp_path)
    assert len(helpers) == 2 and process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 60
    while any(map(lives, helpers)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(lives, helpers))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_memory_of_large_tensors_is_kept():
    """The same 64 MB again and again: its pages are asked of the system once, or every time."""
    code = ("import resource, sys, torch, parallel\n"
            "if sys.argv[1] == 'keep': parallel.keep_memory()\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
            "for _ in range(60): torch.ones(2**24)\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)")
    kept, given = (int(subprocess.run([sys.executable, "-c", code, how], cwd=Path(parallel.__file__).parent, text=True,
                                      capture_output=True, check=True).stdout) for how in ("keep", "give"))
    assert kept < given / 3, (kept, given)
