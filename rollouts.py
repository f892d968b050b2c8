"""Rollouts: one function plays episodes in any world, real or dreamed, many side by side.

A *turn* keeps the prompt as the policy saw it and the ids that it sampled; neither is ever tokenised again.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Callable, Protocol, Sequence

import torch

import llm
from envs import Env, Task
from training import explain_out_of_memory, less_sampling_memory

INVALID_ACTION = "invalid"   # what the world is told when the answer holds no action: admissible nowhere


@dataclass
class Turn:
    """One decision.  ``invalid``: no action in the answer, or one that did nothing.  ``cut``: the token limit came
    before the end of the answer, which is then not executed; a cut turn is never also invalid."""
    state: str
    prompt_ids: list[int]
    action_ids: list[int]
    action: str
    next_state: str
    reward: float
    invalid: bool
    cut: bool
    logprobs: list[float] = field(default_factory=list)        # of the action tokens, as the sampler saw them


@dataclass
class Episode:
    """One rollout.  ``final_prompt_ids`` is the prompt of the state at which a truncated episode stopped (empty
    otherwise): PPO reads its value.  ``trimmed`` counts prompts that lost history to the context limit; ``overlong``
    says that even a prompt without history did not fit, which truncates the episode."""
    task: Task
    group: str
    turns: list[Turn] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    score: float = 0.0
    info: dict = field(default_factory=dict)
    source: str = "dream"
    final_prompt_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    action_tokens: int = 0
    trimmed: int = 0
    overlong: bool = False

    @property
    def outcome(self) -> float:
        """Outcome reward r of the paper (section 1.6): 1 on success, else 0."""
        return sum(turn.reward for turn in self.turns)

    def light(self) -> Episode:
        """A copy without token ids, to pass between processes; statistics read nothing else."""
        turns = [replace(t, prompt_ids=[], action_ids=[], logprobs=[]) for t in self.turns]
        return replace(self, turns=turns, final_prompt_ids=[])


class PromptFormat(Protocol):
    """How a policy is asked and read; one row of text in, at most one action out."""

    def prompt(self, task: str, history: list[str], state: str, admissible: list[str]) -> list[int]:
        """Token ids of the prompt; ``history`` holds the earlier actions, oldest first."""

    def parse(self, text: str) -> str | None:
        """The one action of an answer; None if there is none or more than one."""


class Batch(Protocol):
    """Many episodes side by side; ``step`` concerns only the episodes ``idx`` and returns what ``Env.step`` does."""
    source: str                                                # "real" or "dream"

    def reset(self, tasks: list[Task]) -> list[str]: ...

    def step(self, idx: list[int], actions: list[str]) -> list[tuple[str, float, bool, bool, dict]]: ...


class RealBatch:
    """A list of single environments as a ``Batch``; ``spend(n)`` is told of n real transitions before they happen."""
    source = "real"

    def __init__(self, envs: list[Env], spend: Callable[[int], None]):
        self.envs, self.spend = envs, spend

    def reset(self, tasks: list[Task]) -> list[str]:
        if len(tasks) > len(self.envs):
            raise ValueError(f"{len(tasks)} tasks need as many environments, not {len(self.envs)}")
        return [env.reset(task) for env, task in zip(self.envs, tasks)]

    def step(self, idx: list[int], actions: list[str]) -> list[tuple[str, float, bool, bool, dict]]:
        self.spend(len(idx))
        return [self.envs[i].step(action) for i, action in zip(idx, actions)]


def rollout(policy: llm.LM, batch: Batch, tasks: Sequence[Task], group_ids: Sequence[str], fmt: PromptFormat,
            admissible: Callable[[str], list[str]], *, max_turns: int, max_new_tokens: int, max_prompt_tokens: int,
            temperature: float, generator: torch.Generator | None = None) -> list[Episode]:
    """Play one episode per task, all side by side; finished ones leave the batch.  Training and evaluation alike.

    ``admissible`` reads the admissible actions off a state (``Grammar.admissible``); ``max_turns`` truncates.
    Raises ValueError if two episodes of a group begin differently: their baseline would compare two problems.
    """
    source = getattr(batch, "source", "dream")
    episodes = [Episode(task, group, source=source) for task, group in zip(tasks, group_ids, strict=True)]
    states = batch.reset(list(tasks))
    first: dict[str, str] = {}
    for episode, state in zip(episodes, states, strict=True):
        if first.setdefault(episode.group, state) != state:
            raise ValueError(f"group {episode.group} starts from two states: seed the environment per group")

    def prompt(i: int) -> list[int] | None:
        """Drops the oldest history until the prompt fits, never the task or the state; None if nothing helps."""
        history = [turn.action for turn in episodes[i].turns]
        for dropped in range(len(history) + 1):
            ids = fmt.prompt(episodes[i].task.text, history[dropped:], states[i], admissible(states[i]))
            if len(ids) <= max_prompt_tokens:
                episodes[i].trimmed += dropped > 0
                return ids
        return None

    alive = list(range(len(episodes)))
    while alive:
        prompts = {i: prompt(i) for i in alive}
        for i in [i for i in alive if prompts[i] is None]:
            episode = episodes[i]
            episode.truncated = episode.overlong = True
            if episode.turns:                                  # the last state whose value can still be read
                episode.final_prompt_ids = episode.turns[-1].prompt_ids
            alive.remove(i)
        if not alive:
            break
        with explain_out_of_memory(less_sampling_memory("policy_model")):
            samples = llm.generate(policy, [prompts[i] for i in alive], max_new_tokens=max_new_tokens,
                                   temperature=temperature, generator=generator)
        actions = [None if sample.cut else fmt.parse(policy.decode(sample.ids)) for sample in samples]
        with explain_out_of_memory(less_sampling_memory("mexp_model")):          # which plays a dreamed world
            results = batch.step(alive, [INVALID_ACTION if action is None else action for action in actions])
        for i, sample, action, result in zip(alive, samples, actions, results, strict=True):
            state, reward, terminated, truncated, info = result
            episode = episodes[i]
            invalid = not sample.cut and (action is None or info["invalid"])
            episode.turns.append(Turn(states[i], prompts[i], sample.ids, INVALID_ACTION if action is None else action,
                                      state, reward, invalid, sample.cut, sample.logprobs))
            episode.prompt_tokens += len(prompts[i])
            episode.action_tokens += len(sample.ids)
            states[i] = state
            episode.terminated = terminated
            episode.truncated = not terminated and (truncated or len(episode.turns) >= max_turns)
            episode.success, episode.score, episode.info = info["success"], info["score"], info
            if episode.truncated:
                episode.final_prompt_ids = prompt(i) or prompts[i]
        alive = [i for i in alive if not (episodes[i].terminated or episodes[i].truncated)]
    return episodes


def summary(episodes: Sequence[Episode]) -> dict[str, float]:
    """Counts over the episodes, and shares: of the episodes for how they ended, of the turns for how they went."""
    turns = [turn for episode in episodes for turn in episode.turns]
    E, K = max(1, len(episodes)), max(1, len(turns))
    return {"episodes": len(episodes), "turns": len(turns), "turns_per_episode": len(turns) / E,
            "prompt_tokens": sum(e.prompt_tokens for e in episodes),
            "action_tokens": sum(e.action_tokens for e in episodes),
            "real_transitions": sum(len(e.turns) for e in episodes if e.source == "real"),
            "success": sum(e.success for e in episodes) / E, "score": sum(e.score for e in episodes) / E,
            "outcome": sum(e.outcome for e in episodes) / E,
            "terminated": sum(e.terminated for e in episodes) / E, "truncated": sum(e.truncated for e in episodes) / E,
            "overlong": sum(e.overlong for e in episodes) / E, "trimmed": sum(e.trimmed for e in episodes),
            "invalid": sum(t.invalid for t in turns) / K, "cut": sum(t.cut for t in turns) / K}
