"""Reasoning traces R* for Eq. 5: a teacher explains whole trajectories in hindsight (paper sections 1.5 and 1.10).

A teacher sees a trajectory and its outcome and answers in the paper's form,

    {"task_tutorial": {"overall_plan": "..", "success_mode": "..", "failure_mode": ".."},
     "state_transitions": [{"step_id": 0, "transition_plan": ".."}, ..]}

with exactly one transition plan per step; plan t becomes R*_t.  Three teachers:

- ``rules``: the environment's own text side (``Grammar.explain`` and ``judge``); free, exact, and what the tiny model
  can learn.
- a local model (``llm.LM``): a folder or an id of the Hugging Face hub.
- a server with OpenAI's chat interface (``endpoint.Endpoint``).

``annotate`` asks one about all trajectories, resumably.  The paper does not name its teacher.
"""
from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Callable, Sequence

import torch

import formats
import llm
from buffer import Transition
from endpoint import Endpoint
from envs import Grammar
from runs import Progress, Stopped, append_whole, write_whole

LONGEST = 4000          # characters of one plan; more is no explanation of one step
ANSWER_TOKENS = 2048    # longest answer about one trajectory
AT_ONCE = 32            # trajectories between two saved states
SYSTEM = (
    "You are an expert in the dynamics of interactive text environments. You read a task, whether the agent fulfilled "
    "it, and the agent's whole trajectory. Explain in hindsight why every action led to its next state and, at the "
    "end, why the task was fulfilled or not. Answer with strict JSON and nothing else: "
    '{"task_tutorial": {"overall_plan": "one sentence", "success_mode": "one sentence", "failure_mode": "one '
    'sentence"}, "state_transitions": [{"step_id": 0, "transition_plan": "what the action changes and why"}, ...]}, '
    "with exactly one entry of state_transitions for every step, in order.")


@dataclass(frozen=True)
class Annotation:
    """What a teacher says about one trajectory; ``steps`` holds one transition plan per step."""
    plan: str
    success_mode: str
    failure_mode: str
    steps: tuple[str, ...]

    def to_json(self) -> str:
        """The paper's form, on one line."""
        return json.dumps({
            "task_tutorial": {"overall_plan": self.plan, "success_mode": self.success_mode,
                              "failure_mode": self.failure_mode},
            "state_transitions": [{"step_id": i, "transition_plan": text} for i, text in enumerate(self.steps)]},
            ensure_ascii=False)


def parse_annotation(text: str, steps: int) -> Annotation:
    """A teacher's answer for a trajectory of ``steps`` steps.  Raises ValueError saying what is wrong with it.

    A code fence around the JSON is tolerated, nothing else: unknown, missing or empty parts, plans out of order or too
    few or too many are refused.
    """
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*)\n\s*```\s*", text, re.DOTALL)
    try:
        record = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None
    tutorial, transitions = _parts(record, "answer", ("task_tutorial", "state_transitions"))
    modes = _parts(tutorial, "task_tutorial", ("overall_plan", "success_mode", "failure_mode"))
    if not isinstance(transitions, list) or len(transitions) != steps:
        had = len(transitions) if isinstance(transitions, list) else "no list of"
        raise ValueError(f"state_transitions: {had} plans for {steps} steps")
    plans = []
    for number, entry in enumerate(transitions):
        step, plan = _parts(entry, f"state_transitions[{number}]", ("step_id", "transition_plan"))
        if step != number or isinstance(step, bool):
            raise ValueError(f"state_transitions[{number}]: step_id is {step!r}")
        plans.append(plan)
    return Annotation(*(_sentence(t) for t in modes), steps=tuple(_sentence(t) for t in plans))


def _parts(record, place: str, names: Sequence[str]) -> list:
    if not isinstance(record, dict) or record.keys() != set(names):
        raise ValueError(f"{place}: expected an object with exactly {', '.join(names)}")
    return [record[name] for name in names]


def _sentence(text) -> str:
    if not isinstance(text, str) or not text.strip() or len(text) > LONGEST:
        raise ValueError(f"expected a text of 1 to {LONGEST} characters, not {str(text)[:40]!r}")
    text.encode()                                              # half a surrogate pair is valid JSON, but no UTF-8
    return " ".join(text.split())


def annotation_prompt(trajectory: Sequence[Transition]) -> str:
    """One fact a line.  No text of the environment can forge one: it stays on its line, and without special tokens."""
    first, last = trajectory[0], trajectory[-1]
    lines = [f"Task: {_line(first.task)}", f"Fulfilled: {'yes' if last.success else 'no'}",
             f"Steps: {len(trajectory)} (step_id 0 to {len(trajectory) - 1})",
             f"State at the start: {_line(first.state)}"]
    for number, t in enumerate(trajectory):
        lines += [f"Step {number}, action: {_line(t.action)}", f"Step {number}, next state: {_line(t.next_state)}"]
    return "\n".join(lines)


def _line(text: str) -> str:
    """Environment text without markers (``formats.escape``) and line breaks, of which Unicode has some more."""
    return "".join(f"&#{ord(c)};" if len(f"{c}.".splitlines()) > 1 else c for c in formats.escape(text))


class RulesTeacher:
    """The environment's own text side explains; see ``Grammar.explain``."""

    def __init__(self, grammar: Grammar):
        self.grammar = grammar

    def annotate(self, trajectories: Sequence[Sequence[Transition]]) -> list[Annotation | None]:
        return [self._one(trajectory) for trajectory in trajectories]

    def _one(self, trajectory: Sequence[Transition]) -> Annotation:
        last = trajectory[-1]
        useful = [t.action for t in trajectory if t.next_state != t.state]
        checks = max((self.grammar.judge(last.task, state) for state in (last.state, last.next_state)),
                     key=lambda checks: sum(met for *_, met in checks))
        met, unmet = (", ".join(word for word, _, fine in checks if fine == wanted) or "nothing"
                      for wanted in (True, False))
        plan = f"to get {last.task} do {' ; '.join(useful) or 'nothing'}"
        return Annotation(plan, f"met: {met}", f"not met: {unmet}", tuple(
            self.grammar.explain(t.task, t.state, t.action, t.next_state) for t in trajectory))


class ModelTeacher:
    """A language model explains.  ``write(prompts, attempt)`` gives one answer per prompt, or None; an answer that is
    not in the form gets one more attempt."""

    def __init__(self, write: Callable[[list[str], int], list[str | None]], retries: int = 1):
        self.write, self.retries = write, retries
        self.problems: list[str] = []

    def annotate(self, trajectories: Sequence[Sequence[Transition]]) -> list[Annotation | None]:
        """None where no attempt gave a valid answer; ``problems`` says why."""
        out: list[Annotation | None] = [None] * len(trajectories)
        todo = list(range(len(trajectories)))
        for attempt in range(1 + self.retries):
            texts = self.write([annotation_prompt(trajectories[i]) for i in todo], attempt)
            for i, text in zip(todo, texts):
                try:
                    out[i] = parse_annotation(formats.unescape(text or ""), len(trajectories[i]))
                except ValueError as error:
                    self.problems.append(f"episode {trajectories[i][0].episode}: {error}")
            todo = [i for i in todo if out[i] is None]
            if not todo:
                break
        return out


def local_teacher(lm: llm.LM, max_new_tokens: int = ANSWER_TOKENS, seed: int = 0) -> ModelTeacher:
    def write(prompts: list[str], attempt: int) -> list[str]:
        generator = torch.Generator(lm.device).manual_seed(seed)
        ids = [lm.prompt(SYSTEM, p) for p in prompts]
        samples = llm.generate(lm, ids, max_new_tokens, float(attempt > 0), generator)
        return [lm.decode(s.ids) for s in samples]
    return ModelTeacher(write)


def endpoint_teacher(endpoint: Endpoint, max_new_tokens: int = ANSWER_TOKENS) -> ModelTeacher:
    def write(prompts: list[str], attempt: int) -> list[str | None]:
        return endpoint.chats(SYSTEM, prompts, max_new_tokens, float(attempt > 0), salt=attempt)
    return ModelTeacher(write)


def annotate(teacher, transitions: Sequence[Transition], path: Path | None = None,
             stopping: Callable[[], bool] = bool) -> tuple[list[Transition], list[Annotation | None]]:
    """The transitions with R* as the teacher gives it, and its annotations, one per trajectory.

    Where the teacher had nothing valid to say, the trace that the transition came with stays.  ``path``: every
    annotation is written there as soon as it is made, and what it holds already is not asked again.  Raises Stopped
    between two parts of the work once ``stopping()`` is true.
    """
    trajectories = [list(steps) for _, steps in groupby(transitions, key=lambda t: t.episode)]
    names = [hashlib.sha256(annotation_prompt(steps).encode()).hexdigest() for steps in trajectories]
    found = read_annotations(path, dict(zip(names, map(len, trajectories)))) if path else {}
    todo = [(name, steps) for name, steps in zip(names, trajectories) if name not in found]
    with Progress("teacher", len(trajectories), start=len(trajectories) - len(todo)) as progress:
        for start in range(0, len(todo), AT_ONCE):
            if stopping():
                raise Stopped
            part = todo[start:start + AT_ONCE]
            said = teacher.annotate([steps for _, steps in part])
            found |= {name: a for (name, _), a in zip(part, said)}
            if path:
                append_whole(path, "".join(json.dumps({
                    "episode": steps[0].episode, "trajectory": name, "annotation": a and json.loads(a.to_json())})
                    + "\n" for (name, steps), a in zip(part, said)))
            progress.update(len(part))
    annotations = [found[name] for name in names]
    annotated = [replace(t, reasoning=a.steps[i]) if a else t
                 for steps, a in zip(trajectories, annotations) for i, t in enumerate(steps)]
    return annotated, annotations


def read_annotations(path: Path, steps: dict[str, int]) -> dict[str, Annotation | None]:
    """What ``annotate`` has written about the trajectories (name -> number of steps) before it was interrupted.

    Takes lines off the file that are no such thing, like a last one that a killed process left unfinished.
    """
    found: dict[str, Annotation | None] = {}
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []:
        try:
            record = json.loads(line)
            name, said = record["trajectory"], record["annotation"]
            found[name] = None if said is None else parse_annotation(json.dumps(said), steps[name])
            lines.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    if path.exists():
        write_whole(path, "".join(lines))
    return found
