"""The one protocol that every world of DreamGym speaks, real or dreamed.

An environment hands out *abstract textual states* (paper section 1.1: cleaned text, never raw pages) and
takes *actions as text*.  ``terminated`` and ``truncated`` have Gymnasium's meaning: the first is an end that
belongs to the task, the second an end from outside (the step limit).
"""
from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Protocol, Sequence


@dataclass(frozen=True)
class Task:
    """One task: what the agent reads (``text``) and what only the real environment may read (``goal``).

    ``start`` is the first abstract state (rho_0 of the paper: ``reset`` returns it, and a dream starts from it).
    ``split`` is ``train``, ``validation`` or ``test``; ``parent`` is the id of the task that a synthetic task
    varies (Eq. 6) and None for a task of the environment's own.
    """
    id: str
    text: str
    split: str
    start: str = ""
    parent: str | None = None
    goal: Any = field(default=None, compare=False, repr=False)


class Env(Protocol):
    """One episode at a time.  An invalid action gives a failure state with reward 0 and never an exception."""
    max_steps: int

    def tasks(self, split: str) -> list[Task]:
        """All tasks of a split, always in the same order."""

    def reset(self, task: Task) -> str:
        """Start the task; returns the first abstract state."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Returns (state, reward, terminated, truncated, info); reward is 1.0 only on full success.

        ``info`` always holds ``success`` (bool), ``score`` (graded outcome in [0, 1]) and ``invalid`` (bool: the
        action was not admissible and nothing happened).
        """

    def admissible(self) -> list[str]:
        """The actions that do something now, in the environment's grammar; ``search`` is listed as ``search <words>``."""


class Grammar(Protocol):
    """The text side of an environment: pure functions over text, with no access to any hidden state.

    The experience model, the policy and the curriculum work on these alone, so a dream can never look at
    the real environment.  ``state`` is always the abstract rendering, ``task`` the task's text.

    Where some things are hidden, a grammar also has ``reveals(state, action)``: does the step show what no model can
    know?  and ``move(state, action)``: what the step does, in a word or two, for tables.

    ``verdict_words``: the words of a trace that carry a verdict or the place of a look-up; they weigh more in training.
    ``open_vocabulary``: may words appear that no training text holds?
    """
    verdict_words: frozenset[str]
    open_vocabulary: bool

    def parse(self, state: str) -> Any:
        """Inverse of the rendering; raises ValueError on text that is no state."""

    def render(self, page: Any) -> str:
        """The one rendering that the real environment and the experience model share."""

    def admissible(self, state: str) -> list[str]:
        """Same list as ``Env.admissible``, read off the state."""

    def key(self, state: str, action: str) -> str:
        """What phi encodes for retrieval (Eq. of section 1.4): page kind, action, and what the action points at."""

    def kind(self, state: str) -> str:
        """Page kind, e.g. ``results``."""

    def diff(self, state: str, action: str, next_state: str, memory: Sequence[str],
             past: Sequence[str] = ()) -> str:
        """The next state as an edit (``[mem]``, ``[pick] v``, ``[same]`` ..) or, where none fits, as full text.

        ``memory``: next states of the retrieved transitions, nearest first.  ``past``: earlier states of this
        episode, newest last, without ``state`` itself.  An environment says where its edits lose something.
        """

    def patch(self, state: str, action: str, edit: str, memory: Sequence[str], past: Sequence[str] = ()) -> str:
        """Inverse of ``diff``: edit -> next state.  Raises ValueError on text that is no edit, and on an edit that
        has nothing to work on (``[mem]`` without memory)."""

    def judge(self, task: str, state: str) -> list[tuple[str, str, bool]]:
        """What the task asks, one check each: (wanted, what follows it in the state, met?).  Success = all met."""

    def decides(self, state: str, action: str) -> bool:
        """May this step fulfil a task?  (WebShop: a purchase; ALFWorld: an object put down, a lamp used.)"""

    def decisive(self, state: str, next_state: str) -> str:
        """The page that ``judge`` reads on such a step: the one before it or the one after."""

    def outcome(self, task: str, state: str, action: str, next_state: str) -> tuple[bool, bool]:
        """(done, success) of a step by the rule on the text alone."""

    def explain(self, task: str, state: str, action: str, next_state: str) -> str:
        """Reasoning trace R* of one transition in look-up form (teacher ``rules``)."""

    def counterfactual(self, task: str, state: str, action: str, next_state: str, rng) -> str | None:
        """Another task text for the same step that ``decides``, some checks broken at random; None where there is none."""

    def advice(self, task: str, state: str, history: Sequence[str]) -> str | None:
        """The action that ``consider`` ends with, if it ends with one."""

    def varied(self, task: str, state: str, action: str, history: Sequence[str], rng) -> tuple[str, list[str]]:
        """Another (task, history) under which the same state may have been seen, or these; for cloned policies, whose
        demonstrations hold few steps of some kinds."""

    def consider(self, task: str, state: str, history: list[str]) -> str:
        """What an agent should look at before it acts, in look-up form: the thought of a cloned policy."""

    def task_parts(self, task: str, start: str) -> tuple[frozenset[str], frozenset[str]]:
        """(action types, parts) of a task, without order; raises ValueError with one word that says why a task is
        malformed or not feasible, as far as training texts tell."""

    def content_words(self, text: str) -> set[str]:
        """Words of the text that carry content and may be renamed consistently."""


@dataclass
class World:
    """One real environment with everything a run needs of it.

    make: a new ``Env`` (they share what is heavy).  tasks: by split.  grammar: the text side, taught by texts of the
    training data.  scripted: name -> policy ``(task text, state, earlier actions, rng) -> action`` for offline data.
    rules: split -> {name: success} of simple rules; no result should be read without them.  kind: the type of a task,
    by which results are told apart; None where all tasks are of one type.
    """
    make: Callable[[], Env]
    tasks: dict[str, list[Task]]
    grammar: Callable[[Iterable[str]], Grammar]
    scripted: Callable[[str], Callable]
    rules: Callable[[str], dict[str, float]]
    kind: Callable[[Task], str] | None = None


_opened: list = []              # the section of the configuration that was opened last, and its world


def open_world(cfg) -> World:
    """The environment that ``cfg`` (section ``env``) names: the same object as long as it is asked for again, because
    a world does not change and to read one may take minutes."""
    if not _opened or _opened[0] != cfg:
        _opened.clear()                                        # two would need twice the memory
        module = importlib.import_module(f"envs.{cfg.name}")
        _opened.extend((cfg, module.open_world(cfg)))
    return _opened[1]
