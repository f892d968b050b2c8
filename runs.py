"""One run = one folder: configuration, lock, checkpoints, metrics, ledger; resuming is the same command again.

    runs/webshop-cpu-s0/
      config.yaml        resolved configuration; another one is refused with the difference
      run.json           every start: time, command, git commit, versions, hardware, seed
      stages.json        finished stages, what they returned, where metrics and ledger stood
      metrics.jsonl      one line a step, stable keys, no times: equal runs give equal bytes
      times.jsonl        seconds of every RL iteration, which differ from run to run
      results.json       final numbers with the ledger of real interactions
      checkpoints/<stage>/00000012.safetensors
      models/<stage>/    finished models as plain transformers or peft load them
      lock               held while a process works in the folder

    with Interrupt() as interrupt, Run.open(cfg, reason, sys.argv, stages=("collect", "mexp", "rl")) as run:
        if not run.stage_done("rl"):
            first, state = run.resume("rl")                           # (0, None) without a checkpoint
            for step in range(first + 1, cfg.rl.iterations + 1):
                ...
                run.log("rl", step, loss=loss)
                run.checkpoint("rl", step, state, score=validation)   # score only where there is one
                if interrupt:
                    raise Stopped
            run.mark_done("rl", {"loss": loss})

Files are written whole or not at all.  Nothing that is read back can execute code: YAML through the safe loader,
JSON, and safetensors.  Only rank 0 of several processes opens the run.
"""
from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes

import config as configuration
from config import Config, UserError


# ------------------------------------------------------------------------------------------- whole files

@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """An error of the file system becomes one line that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}; nothing was changed") from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: str | os.PathLike, data: bytes | str) -> None:
    """Replaces a file at once: temporary file, fsync, rename, fsync of the folder.

    A crash leaves the old or the new content, never a mixture.  Raises UserError (disk full, read-only, ..).
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _disk(path):
        try:
            with open(temporary, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:                                          # also Ctrl-C: no half file stays behind
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def append_whole(path: Path, text: str) -> None:
    """Appends lines; where the disk is full, none of them.  Raises UserError."""
    with _disk(path), open(path, "ab", buffering=0) as file:
        size, data = file.tell(), text.encode()
        try:
            if file.write(data) < len(data):                         # the disk is nearly full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(size)
            raise


def _lost(path: Path, size: int, recorded: int) -> UserError:
    return UserError(f"{path}: shorter ({size} bytes) than recorded ({recorded}); restore it, or start over in another "
                     f"run.out")


def cut(path: Path, size: int) -> None:
    """Takes off what a killed process wrote behind its last checkpoint.  Raises UserError where lines were lost."""
    with _disk(path), open(path, "ab") as file:
        if file.tell() < size:
            raise _lost(path, file.tell(), size)
        file.truncate(size)
        os.fsync(file.fileno())


def _read_json(path: Path, default: Any) -> Any:
    """Raises UserError where the file holds no JSON, or a value of another kind than ``default``."""
    if not path.exists():
        return default
    with _disk(path):
        data = path.read_bytes()
    try:
        value = json.loads(data.decode())                    # UTF-8 alone, as it was written
        if type(value) is type(default):
            return value
    except (ValueError, RecursionError):
        pass
    raise UserError(f"{path}: damaged (not the JSON that was written); restore it or choose another run.out")


# ------------------------------------------------------------------------------------------------- state

def _pack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON form of a nest of dicts, lists, tuples, plain values, tensors and arrays; tensors go to ``tensors``."""
    if isinstance(value, torch.Tensor):
        name = f"t{len(tensors)}"
        # A copy each: tied weights share storage, which safetensors refuses.
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"$tensor": name}
    if isinstance(value, np.ndarray):
        return {"$array": _pack(torch.from_numpy(value.copy()), tensors)["$tensor"], "dtype": value.dtype.str}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return {"$tuple": [_pack(v, tensors) for v in value]}
    if isinstance(value, list):
        return [_pack(v, tensors) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: _pack(v, tensors) for k, v in value.items()}
        return {"$dict": [[_pack(k, tensors), _pack(v, tensors)] for k, v in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a state cannot hold {type(value).__name__}")


def _unpack(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(v, tensor) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensor(value["$tensor"])
    if "$array" in value:
        return tensor(value["$array"]).numpy().astype(value["dtype"])
    if "$tuple" in value:
        return tuple(_unpack(v, tensor) for v in value["$tuple"])
    if "$dict" in value:
        return {_unpack(k, tensor): _unpack(v, tensor) for k, v in value["$dict"]}
    return {k: _unpack(v, tensor) for k, v in value.items()}


_JSON = "json"                 # name of the tensor (uint8) that holds everything that is no tensor


def save_state(path: str | os.PathLike, state: Any, **header: str) -> None:
    """One safetensors file with a nest of dicts, lists, tuples, plain values, tensors and arrays (state dicts of
    models and optimizers, RNG states, lists of tasks ..).  Written whole or not at all.  ``header`` can be read
    without the rest (``read_header``)."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_pack(state, tensors), separators=(",", ":"))
    tensors[_JSON] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    write_whole(path, safetensors_bytes(tensors, metadata={"format": "dreamgym"} | header))


@contextlib.contextmanager
def _open_state(path: Path) -> Iterator[Any]:
    try:
        with _disk(path), safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("format") != "dreamgym":
                raise UserError(f"{path}: not a file of this program")
            yield file
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({type(error).__name__}); restore it, or delete it to go on from the one before; "
                        f"if its stage is finished: --from {path.parent.name}") from None


def load_state(path: str | os.PathLike) -> Any:
    """Inverse of ``save_state``; tensors lie on the CPU.  Raises UserError for a damaged or foreign file."""
    with _open_state(Path(path)) as file:
        return _unpack(json.loads(bytes(file.get_tensor(_JSON).numpy())), file.get_tensor)


def read_header(path: str | os.PathLike) -> dict[str, str]:
    with _open_state(Path(path)) as file:
        return file.metadata()


class Checkpoints:
    """Checkpoints of one stage: the newest ``keep`` and the best by score (higher is better)."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = Path(folder), keep

    def path(self, step: int) -> Path:
        return self.folder / f"{step:08d}.safetensors"

    def steps(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("[0-9]*.safetensors") if path.stem.isdecimal())

    def scores(self) -> dict[int, float]:
        """Step -> score up to the newest checkpoint, which carries them: one file, so they cannot disagree."""
        if not self.steps():
            return {}
        scores = json.loads(read_header(self.path(self.steps()[-1]))["scores"])
        return {int(step): score for step, score in scores.items()}

    def best(self) -> int | None:
        """Step of the highest score, the earliest of equals; None where nothing was scored."""
        scores = self.scores()
        return min(scores.keys() & set(self.steps()), key=lambda step: (-scores[step], step), default=None)

    def save(self, step: int, state: Any, score: float | None = None, position: dict | None = None) -> Path:
        """``state`` is what ``save_state`` takes; ``position`` is where the run stood (``Run.checkpoint``)."""
        with _disk(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        scores = self.scores() | ({} if score is None else {step: float(score)})
        save_state(self.path(step), {"state": state, "position": position}, scores=json.dumps(scores))
        for old in set(self.steps()) - {*self.steps()[-self.keep:], self.best()}:
            with _disk(self.path(old)):
                self.path(old).unlink()
        return self.path(step)

    def load(self, step: int) -> Any:
        return load_state(self.path(step))["state"]

    def newest(self) -> tuple[int, Any]:
        """(step, state), or (0, None) where there is none."""
        steps = self.steps()
        return (steps[-1], self.load(steps[-1])) if steps else (0, None)


# ------------------------------------------------------------------------------------------------ randomness

def derive_seed(*parts: int | str) -> int:
    """63-bit seed from (run seed, step, task, sample ..): the same on every machine, independent of the order of
    use, so a resumed run needs no stored generator."""
    text = repr([part if isinstance(part, str) else int(part) for part in parts])        # 1 and "1" differ
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(**private: random.Random | np.random.Generator | torch.Generator) -> dict[str, Any]:
    """States of the global generators of random, numpy and torch (all CUDA devices) and of private ones by name."""
    state: dict[str, Any] = {"random": random.getstate(), "numpy": np.random.get_state(),
                             "torch": torch.get_rng_state(), "private": {}}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    for name, generator in private.items():
        state["private"][name] = (generator.getstate() if isinstance(generator, random.Random)
                                  else generator.bit_generator.state if isinstance(generator, np.random.Generator)
                                  else generator.get_state())
    return state


def set_rng_state(state: dict[str, Any], **private: random.Random | np.random.Generator | torch.Generator) -> None:
    """Inverse of ``rng_state``; raises KeyError where a private generator was not saved."""
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    for name, generator in private.items():
        saved = state["private"][name]
        if isinstance(generator, random.Random):
            generator.setstate(saved)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = saved
        else:
            generator.set_state(saved)


# --------------------------------------------------------------------------------------------------- ledger

class Ledger:
    """Counts every interaction with the real environment, by purpose.

    ``offline``, ``rl`` and ``s2r`` train something; ``validation`` chooses checkpoints; ``evaluation`` only reports.
    """
    PURPOSES = ("offline", "rl", "s2r", "validation", "evaluation")
    TRAINING = ("offline", "rl", "s2r")

    def __init__(self) -> None:
        self.transitions = dict.fromkeys(self.PURPOSES, 0)
        self.episodes = dict.fromkeys(self.PURPOSES, 0)

    def add(self, purpose: str, transitions: int, episodes: int = 0) -> None:
        self.transitions[purpose] += transitions
        self.episodes[purpose] += episodes

    def training(self) -> int:
        """Real transitions that any training has used."""
        return sum(self.transitions[purpose] for purpose in self.TRAINING)

    def state(self) -> dict[str, dict[str, int]]:
        return {"transitions": dict(self.transitions), "episodes": dict(self.episodes)}

    def restore(self, state: dict[str, dict[str, int]]) -> None:
        self.transitions, self.episodes = dict(state["transitions"]), dict(state["episodes"])

    def __str__(self) -> str:
        counts = ", ".join(f"{purpose} {self.transitions[purpose]:,}" for purpose in self.PURPOSES)
        return f"real transitions: {counts} (training {self.training():,})"


# ------------------------------------------------------------------------------------------- interruption, progress

class Stopped(Exception):
    """Raised between two steps after an interruption, once everything is saved; main exits with 130."""


class Interrupt:
    """First Ctrl-C (or SIGTERM): sets a flag that loops check between steps.  Second: the process ends at once."""

    def __init__(self) -> None:
        self.requested = False
        self._old: dict[int, Any] = {}

    def _handle(self, signum: int, frame: Any) -> None:
        if self.requested:
            os._exit(130)                             # files are whole at any moment, so nothing needs tidying up
        self.requested = True
        os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")

    def __bool__(self) -> bool:
        return self.requested

    def __enter__(self) -> Interrupt:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._old[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: Any) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)


def clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Progress:
    """A bar on a terminal; otherwise one line every ``every`` seconds at the most.  Writes to stderr."""

    def __init__(self, title: str, total: int, start: int = 0, every: float = 5.0) -> None:
        self.title, self.total, self.count, self.every = title, total, start, every
        self.bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm
            self.bar = tqdm(total=total, initial=start, desc=title, dynamic_ncols=True)
        self.began, self.start = time.monotonic(), start
        self.shown_at, self.shown_count = self.began, start

    def update(self, count: int = 1, **values: float) -> None:
        """``values`` are shown next to the bar, floats with four digits."""
        self.count += count
        self.total = max(self.total, self.count)               # a budget may last longer than it must
        if self.bar is not None:
            self.bar.total = self.total
            self.bar.set_postfix(values, refresh=False)
            self.bar.update(count)
        elif time.monotonic() - self.shown_at >= self.every or self.count == self.total:
            if self.count != self.shown_count:
                shown = "".join(f"  {k} {v:.4g}" if isinstance(v, float) else f"  {k} {v}" for k, v in values.items())
                print(f"{self.title}: {self.count}/{self.total}{shown}{self.left()}", file=sys.stderr, flush=True)
            self.shown_at, self.shown_count = time.monotonic(), self.count

    def left(self) -> str:
        """Expected time left, from the pace so far; nothing below two seconds."""
        pace = (time.monotonic() - self.began) / max(1, self.count - self.start)
        seconds = pace * (self.total - self.count)
        return "" if seconds < 2 else f"  {clock(seconds)} left"

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


# ---------------------------------------------------------------------------------------------------- metrics

def cache_folder() -> Path:
    """The only place outside the run folder that is written to: $DREAMGYM_CACHE or ~/.cache/dreamgym."""
    return Path(os.environ.get("DREAMGYM_CACHE") or Path.home() / ".cache" / "dreamgym")


def _plain(value: Any) -> Any:
    """JSON value of a metric; NaN and infinities become null, which JSON lacks."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a metric cannot be {type(value).__name__}")


class Tracker:
    """TensorBoard or wandb behind one ``log``; imported only when asked for, silent for ``none``."""

    @staticmethod
    def require(kind: str) -> None:
        """Raises UserError where its package or key is missing; before a folder is made for the run."""
        if kind == "none":
            return
        if kind == "wandb" and not os.environ.get("WANDB_API_KEY") and os.environ.get("WANDB_MODE") != "offline":
            raise UserError("run.tracker: wandb needs WANDB_API_KEY (or WANDB_MODE=offline) in the environment")
        try:
            importlib.import_module("torch.utils.tensorboard" if kind == "tensorboard" else kind)
        except ImportError:
            raise UserError(f"run.tracker: {kind} is not installed: pip install {kind}") from None

    def __init__(self, kind: str, folder: Path, config: Config) -> None:
        self.kind, self.writer = kind, None
        if kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
            self.writer = SummaryWriter(str(folder / "tensorboard"))
        elif kind == "wandb":
            for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
                os.environ.setdefault(name, str(folder if name == "WANDB_DIR" else cache_folder() / "wandb"))
            import wandb
            identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
            self.writer = wandb.init(project="dreamgym", name=folder.name, id=identity, resume="allow",
                                     config=config.model_dump())

    def log(self, stage: str, step: int, values: dict[str, Any]) -> None:
        numbers = {f"{stage}/{k}": v for k, v in values.items() if isinstance(v, (int, float))}
        if self.kind == "tensorboard":
            for name, value in numbers.items():
                self.writer.add_scalar(name, value, step)
        elif self.kind == "wandb":
            self.writer.log(numbers | {f"{stage}/step": step})

    def close(self) -> None:
        if self.kind == "tensorboard":
            self.writer.close()
        elif self.kind == "wandb":
            self.writer.finish()


# --------------------------------------------------------------------------------------------------------- lock

def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:                              # somebody else's
        pass
    return True


class Lock:
    """Advisory lock (flock) on ``<folder>/lock``, which holds the owner's pid and host.

    The system frees it when its owner dies, so a stale lock is simply taken over (``took_over`` says whose).
    Where a file system knows no flock, the pid in the file decides; then two starts in the same instant both win.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        self.took_over: int | None = None
        with _disk(self.path):
            self.file = open(self.path, "a+b")
        owner, host = self._owner()
        here = host == platform.node()
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            dead = " (ended; a process it started still runs)" if owner and here and not _alive(owner) else ""
            raise UserError(f"{folder}: in use by process {owner or 'unknown'}{dead} on {host or 'this host'}; "
                            f"wait for it or choose another run.out") from None
        except OSError:
            if owner and owner != os.getpid() and (not here or _alive(owner)):
                self.file.close()
                raise UserError(f"{folder}: in use by process {owner} on {host}; if that is not so, "
                                f"delete {self.path}") from None
        if owner:
            self.took_over = owner
        self._write(f"{os.getpid()} {platform.node()}\n")

    def _owner(self) -> tuple[int | None, str]:
        self.file.seek(0)
        words = self.file.read(200).decode(errors="replace").split()
        if words and re.fullmatch("[1-9][0-9]{0,8}", words[0]):
            return int(words[0]), " ".join(words[1:])
        return None, ""

    def _write(self, text: str) -> None:
        with _disk(self.path):
            self.file.truncate(0)
            self.file.write(text.encode())
            self.file.flush()

    def close(self) -> None:
        if not self.file.closed:
            self._write("")                              # the file stays: deleting it would race with the next owner
            self.file.close()


# ----------------------------------------------------------------------------------------------------------- run

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "peft", "bitsandbytes")
_OWN_FILES = {"lock", "run.json"}                        # what a start that was killed early may leave behind


def describe_machine() -> dict[str, Any]:
    """Versions and hardware, for run.json."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"versions": versions, "system": f"{platform.system()} {platform.machine()}",
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(), "gpus": gpus}


def git_commit() -> str | None:
    """Commit of this source tree, with ``+`` where files were changed; None outside git."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True,
                              timeout=20, check=True).stdout.strip()
    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


LEFT = {"fidelity": "fidelity.json", "eval": "results.json"}           # what a finished stage leaves besides a checkpoint


class Run:
    """An open run folder; see the module's docstring.  Made by ``Run.open``."""

    def __init__(self, folder: Path, config: Config, lock: Lock, stages: Sequence[str]) -> None:
        self.folder, self.config, self.lock, self.stages = folder, config, lock, tuple(stages)
        self.ledger = Ledger()
        self.tracker: Tracker | None = None
        self._keys: dict[str, list[str]] = {}            # stage -> keys of its metric lines
        self._done: dict[str, dict] = {}                 # stage -> payload, metrics position, ledger
        self._metrics_path = folder / "metrics.jsonl"

    # -- opening and closing

    @classmethod
    def open(cls, config: Config, reason: str, command: Sequence[str], stages: Sequence[str],
             restart: str | None = None) -> Run:
        """Opens or creates ``config.run.out``, takes the lock and finds out what is done.

        ``stages`` are all stages in order; ``restart`` (the command line's --from) repeats that stage and all after.
        Raises UserError: folder in use, of another configuration, of something else, not writable, unknown stage.
        """
        if restart is not None and restart not in stages:
            near = difflib.get_close_matches(restart, stages, 1, 0.4) or [", ".join(stages)]
            raise UserError(f"--from {restart}: unknown stage; did you mean {near[0]}?")
        Tracker.require(config.run.tracker)
        folder = Path(config.run.out).expanduser()
        with _disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            holds = {path.name for path in folder.iterdir() if not path.name.endswith(".tmp")}
        if holds - _OWN_FILES and "config.yaml" not in holds:
            raise UserError(f"{folder}: holds other files and no config.yaml, so it is no run folder; choose another "
                            f"run.out")
        lock = Lock(folder)
        try:
            if (folder / "config.yaml").exists():
                old = configuration.load_run(folder)
                if differences := configuration.describe_differences(old, config):
                    more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
                    raise UserError(f"{folder}: holds a run of another configuration: {'; '.join(differences[:5])}"
                                    f"{more} (there -> here); choose another run.out or delete the folder")
            run = cls(folder, config, lock, stages)
            run._start(reason, command, restart)
        except BaseException:                                          # also Ctrl-C: the folder is free again
            lock.close()
            raise
        return run

    def _start(self, reason: str, command: Sequence[str], restart: str | None) -> None:
        starts = _read_json(self.folder / "run.json", [])
        state = _read_json(self.folder / "stages.json", {"done": {}, "repeat": []})
        try:
            first = min(self.stages.index(stage) for stage in [*state["repeat"], *([restart] if restart else [])]
                        or [self.stages[-1]])
            repeat = list(self.stages[first:]) if state["repeat"] or restart else []
            self._done = {stage: entry for stage, entry in state["done"].items() if stage not in repeat}
            position = self._last_position()
            self.ledger.restore(position["ledger"])
            self._keys = self._read_keys(position["metrics_bytes"])
            for stage, entry in self._done.items():
                left = [self.checkpoints(stage).path(entry["step"])] if entry.get("step") else []
                for path in left + ([self.folder / LEFT[stage]] if stage in LEFT else []):
                    if not path.exists():
                        raise UserError(f"{path}: missing, the result of a finished stage; restore it or repeat from "
                                        f"there: --from {stage}")
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(f"{self.folder / 'stages.json'}: damaged (not what was written); restore it or choose "
                            f"another run.out") from None

        with _disk(self.folder):
            for leftover in list(self.folder.rglob(".*.tmp")):       # of a process that was killed while writing
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        if self.lock.took_over:
            print(f"{self.folder}: took over from process {self.lock.took_over}, which ended early", file=sys.stderr)
        starts.append({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": list(command),
                       "profile": reason, "seed": self.config.run.seed, "commit": git_commit()} | describe_machine())
        write_whole(self.folder / "run.json", json.dumps(starts, indent=1) + "\n")
        write_whole(self.folder / "config.yaml", configuration.to_yaml(self.config))
        if repeat:
            self._forget(repeat)
        self.tracker = Tracker(self.config.run.tracker, self.folder, self.config)

    def _forget(self, stages: list[str]) -> None:
        """Deletes what these stages left.  Recorded first: a start that is killed in between is finished by the next."""
        self._write_stages(stages)
        with _disk(self.folder):
            (self.folder / "results.json").unlink(missing_ok=True)
            for stage in stages:
                for stale in (self.folder / "checkpoints" / stage, self.folder / "models" / stage,
                              self.folder / f"buffer-{stage}"):
                    if stale.exists():
                        shutil.rmtree(stale)
                measured = "*" if stage == "mexp" else stage         # with its policy, or in what it made of any policy
                for stale in [*self.folder.glob(f"eval-{stage}-*.json"), *self.folder.glob(f"fidelity-{measured}-*.json")]:
                    stale.unlink()
        self._write_stages([])

    def _write_stages(self, repeat: list[str]) -> None:
        write_whole(self.folder / "stages.json", json.dumps({"done": self._done, "repeat": repeat}, indent=1) + "\n")

    def close(self) -> None:
        if self.tracker is not None:
            self.tracker.close()
        self.lock.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # -- metrics

    def log(self, stage: str, step: int, **values: Any) -> None:
        """Appends one line to metrics.jsonl.  Every line of a stage has the keys of its first one (pass None where
        there is nothing to say), and no value may be a time: equal runs must give equal bytes."""
        line = {"stage": stage, "step": step} | {key: _plain(value) for key, value in values.items()}
        keys = self._keys.setdefault(stage, list(line))
        if list(line) != keys:
            raise ValueError(f"metrics of {stage} changed their keys: {sorted(set(keys) ^ set(line)) or 'their order'}")
        append_whole(self._metrics_path, json.dumps(line) + "\n")
        self.tracker.log(stage, step, {key: line[key] for key in values})

    def log_times(self, stage: str, step: int, **values: float) -> None:
        """Seconds, tokens a second and the like: times.jsonl, which differs from run to run and is never cut."""
        append_whole(self.folder / "times.jsonl", json.dumps({"stage": stage, "step": step} | values) + "\n")

    def _position(self) -> dict[str, Any]:
        """Where metrics and ledger stand now; the metrics up to here are on the disk."""
        with _disk(self._metrics_path), open(self._metrics_path, "ab") as file:
            os.fsync(file.fileno())
            return {"metrics_bytes": file.tell(), "ledger": self.ledger.state()}

    def _last_position(self) -> dict[str, Any]:
        """The position at which the stage that was finished last ended."""
        finished = list(self._done.values())
        return finished[-1] if finished else {"metrics_bytes": 0, "ledger": Ledger().state()}

    def _rewind(self, position: dict[str, Any]) -> None:
        """Cuts the metrics back to a position and resets the ledger: what came after will be done again."""
        self._keys = self._read_keys(position["metrics_bytes"])
        cut(self._metrics_path, position["metrics_bytes"])
        self.ledger.restore(position["ledger"])

    def _read_keys(self, size: int) -> dict[str, list[str]]:
        """Stage -> keys of its lines among the first ``size`` bytes of the metrics.  Raises UserError."""
        keys: dict[str, list[str]] = {}
        with _disk(self._metrics_path):
            data = self._metrics_path.read_bytes()[:size] if self._metrics_path.exists() else b""
        if len(data) < size:
            raise _lost(self._metrics_path, len(data), size)
        for number, text in enumerate(data.splitlines(), 1):
            try:
                line = json.loads(text)
                keys.setdefault(line["stage"], list(line))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise UserError(f"{self._metrics_path} line {number}: damaged; restore the file, or start over in "
                                f"another run.out") from None
        return keys

    # -- stages and checkpoints

    def path(self, name: str) -> Path:
        """A file of this run."""
        return self.folder / name

    def stage_done(self, stage: str) -> bool:
        return stage in self._done

    def mark_done(self, stage: str, payload: Any = None) -> None:
        """Finished: the next start skips the stage.  ``payload`` (JSON) stays in stages.json for people to read."""
        if stage not in self.stages:
            raise ValueError(f"unknown stage {stage}")
        steps = self.checkpoints(stage).steps()
        self._done[stage] = {"payload": payload, "step": steps[-1] if steps else 0} | self._position()
        self._write_stages([])

    def checkpoints(self, stage: str) -> Checkpoints:
        return Checkpoints(self.folder / "checkpoints" / stage, self.config.run.keep_checkpoints)

    def checkpoint(self, stage: str, step: int, state: Any, score: float | None = None) -> Path:
        """Saves ``state`` (what ``save_state`` takes) with the random generators, the metrics position and the
        ledger; ``score`` (validation, higher is better) protects the best one from being deleted."""
        return self.checkpoints(stage).save(step, state, score, self._position() | {"rng": rng_state()})

    def resume(self, stage: str) -> tuple[int, Any]:
        """Every stage that is not done begins with this call, after its models are built.

        Returns (step, state) of its newest checkpoint, or (0, None).  Metrics, ledger and the global random
        generators go back to that moment; without a checkpoint, to the end of the stage before, and the generators
        are seeded for this stage, so that what earlier stages drew does not matter.
        """
        checkpoints = self.checkpoints(stage)
        step = max(checkpoints.steps(), default=0)
        saved = load_state(checkpoints.path(step)) if step else {"state": None, "position": None}
        if saved["position"] is None:                                # none, or one of a process that has no run
            self._rewind(self._last_position())
            seed_everything(derive_seed(self.config.run.seed, stage))
        else:
            self._rewind(saved["position"])
            set_rng_state(saved["position"]["rng"])
        return step, saved["state"]

    @staticmethod
    def newest(folder: str | os.PathLike, stage: str) -> tuple[int, Any]:
        """(step, state) of a stage's newest checkpoint or (0, None), for processes that only read."""
        return Checkpoints(Path(folder) / "checkpoints" / stage, 1).newest()

    def export(self, stage: str, lm: Any) -> None:
        """models/<stage>: the model as plain ``transformers`` or ``peft`` load it, whole or not at all."""
        folder = self.folder / "models" / stage
        temporary = folder.with_name(f".{stage}.tmp")
        with _disk(folder):
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                lm.export(temporary)
            except OSError:
                raise
            except Exception as error:                               # safetensors and tokenizers say so of a full disk
                if "os error" not in str(error):
                    raise
                raise UserError(f"{folder}: cannot be written: {error}") from None
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(temporary, folder)

    def write_results(self, results: dict[str, Any]) -> None:
        """results.json: final numbers together with the real interactions they cost."""
        document = results | {"real": self.ledger.state() | {"training": self.ledger.training()}}
        write_whole(self.folder / "results.json", json.dumps(document, indent=1) + "\n")
