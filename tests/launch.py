"""The program in processes of its own that need not import everything again: forks of a server that has done so.

    process = launch(folder / "log", "--config", .., die=("replace", 5))
    process.join()
    process.exitcode, (folder / "log").read_text()
"""
import multiprocessing
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
servers = multiprocessing.get_context("forkserver")
servers.set_forkserver_preload(["dreamgym", "torch._dynamo", "transformers.models.llama.modeling_llama",   # seconds each
                                "transformers.models.auto.modeling_auto", "tqdm"])


def die_at(name: str, number: int) -> None:
    """This process kills itself in its ``number``-th call of os.fsync or os.replace: in the middle of writing a file.

    In fsync the file is torn first, as a power cut would do it.
    """
    original, calls = getattr(os, name), 0

    def fatal(*args):
        nonlocal calls
        place = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else args[0]
        calls += str(place).endswith(".tmp")
        if calls == number and str(place).endswith(".tmp"):
            if name == "fsync":
                os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(os, name, fatal)


def _main(words: list[str], log: Path, die: tuple[str, int] | None) -> None:
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "DREAMGYM_CACHE": str(log.parent / "cache")}
    import config
    import dreamgym
    sys.argv = ["dreamgym.py", *words]
    if die:
        die_at(*die)
    sys.exit(config.run_main(dreamgym.main))


def launch(log: Path, *words: str, die: tuple[str, int] | None = None) -> multiprocessing.Process:
    """A running ``python dreamgym.py WORDS..``; what it prints goes to the file ``log``."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])           # for the server
    process = servers.Process(target=_main, args=([str(w) for w in words], log, die))
    process.start()
    os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)
    return process
