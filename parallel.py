"""Processes on one machine.  Two processes of one thread beat one process of two threads on a small CPU.

``side_by_side`` runs different jobs at once (policy and experience model train without each other);
``spmd`` runs one function in every process, each on its share, with sums over all (torch.distributed, gloo).
"""
from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import signal
import socket
import sys
import threading
import traceback
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from config import UserError

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4                          # of glibc's mallopt


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def share(items: Sequence) -> list:
    """This process's part: a contiguous slice; the parts of all ranks in order make up ``items``."""
    n, r = size(), rank()
    return list(items[len(items) * r // n:len(items) * (r + 1) // n])


def gather(items: list) -> list:
    """The lists of all processes, in rank order, on every process."""
    if size() == 1:
        return items
    parts: list[Any] = [None] * size()
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def agree(flag: bool) -> bool:
    """True on every process if it is true on any."""
    return any(gather([bool(flag)]))


def keep_memory() -> None:
    """This process keeps what large tensors leave behind.  glibc gives it back to the system each time, which clears it
    page by page for the next tensor: a fifth of the processor's time in training SmolLM2."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _end_with_parent() -> None:
    """Ends this process as soon as the one that started it has ended, however that happened: a helper that went on
    alone would write into the folder of the next run."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _child(fn: Callable, threads: int, args: tuple, errors) -> None:
    """Entry of a helper process: interruptions are the first process's business, errors travel to it as text."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    keep_memory()
    try:
        fn(*args)
    except UserError as error:
        errors.put(("user", str(error)))
        sys.exit(2)
    except BaseException:                                      # whatever ends the process must reach the first one
        errors.put(("bug", traceback.format_exc()))
        sys.exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)                                                # at a normal exit threads of libraries now and then abort


def _start(process) -> None:
    """Start it deaf to Ctrl-C from its first moment, which it inherits: its imports would end in a traceback."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)


def _raise(errors, processes) -> None:
    """Re-raise the first error of a helper process, if one ended badly."""
    if all(p.exitcode in (0, None) for p in processes):
        return
    kind, text = errors.get(timeout=5) if not errors.empty() else ("bug", "a helper process was killed")
    raise UserError(text) if kind == "user" else RuntimeError(text)


def _job(fn: Callable, args: tuple) -> None:
    """A job in a process of its own, which SIGTERM asks to stop."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    fn(*args, lambda: bool(asked))


def side_by_side(jobs: Sequence[tuple[Callable, tuple]], threads: int, at_once: bool,
                 stopping: Callable[[], bool] = bool) -> None:
    """Call ``fn(*args, stop)`` for every job (fn, args), each in a process of its own if there is room (``at_once``).

    ``stopping`` is polled; once it is true, so is what ``stop()`` returns to the jobs, which then save and return.
    """
    if not at_once:
        keep_memory()
        for fn, args in jobs:
            if not stopping():
                fn(*args, stopping)
        return
    context = mp.get_context("spawn")
    errors = context.Queue()
    processes = [context.Process(target=_child, args=(_job, threads, (fn, args), errors), daemon=True)
                 for fn, args in jobs]
    asked = False
    try:
        for p in processes:
            _start(p)
        while any(p.is_alive() for p in processes):
            for p in processes:
                p.join(0.2)
            if stopping() and not asked:
                asked = True
                for p in processes:
                    p.terminate()
            if not asked and any(p.exitcode not in (0, None) for p in processes):
                break
    finally:
        _kill(processes)
    if not asked:                                              # one that had not begun yet dies of being asked
        _raise(errors, processes)


def _kill(processes) -> None:
    for p in processes:
        if p.is_alive():
            p.kill()                                           # it may hang in a sum that will never be complete
            p.join()


def _member(fn: Callable, number: int, count: int, port: int, args: tuple) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)              # the first process asks through ``agree``
    _join(number, count, port)
    try:
        fn(*args)
    finally:
        dist.destroy_process_group()


def _join(number: int, count: int, port: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=count)


def spmd(fn: Callable, count: int, threads: int, args: tuple, first: tuple = ()) -> Any:
    """Call ``fn(*args, *first)`` here as rank 0 and ``fn(*args)`` in ``count - 1`` further processes; returns rank
    0's value.  ``args`` must pickle."""
    keep_memory()
    if count == 1:
        return fn(*args, *first)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    errors = context.Queue()
    others = [context.Process(target=_child, args=(_member, threads, (fn, r, count, port, args), errors), daemon=True)
              for r in range(1, count)]
    try:
        for p in others:
            _start(p)
        _join(0, count, port)
        result = fn(*args, *first)
        for p in others:
            p.join()
        return result
    except RuntimeError:                                       # the others' end shows here as a broken connection
        for p in others:
            p.join(20)                                         # on a busy machine it takes a while to say why
        _raise(errors, others)
        raise
    finally:
        _kill(others)
        errors.cancel_join_thread()
        if dist.is_initialized():                              # not where joining failed
            dist.destroy_process_group()
