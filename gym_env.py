"""A dreamed or real world as a Gymnasium environment, one episode at a time.

    env = gym_env.open_run("runs/webshop-cpu-s0")              # the dream of a run, on its training tasks
    observation, info = env.reset(seed=0)                      # {"task": "wireless , ..", "state": "[home]"}
    observation, reward, terminated, truncated, info = env.step("search wireless travel headphones")
"""
from __future__ import annotations

import string
from pathlib import Path
from typing import Sequence

import gymnasium
from gymnasium import spaces

import commands
from envs import Grammar, Task, open_world


def open_run(folder: str | Path) -> TextEnv:
    """The experience model of a run folder as an environment.  Raises UserError where there is none yet."""
    cfg = commands.run_config(Path(folder))
    world = open_world(cfg.env)
    dream = commands.dream_world(cfg, Path(folder), world)
    return TextEnv(dream, world.tasks["train"][:cfg.env.train_tasks], dream.grammar)


class AnyText(spaces.Text):
    """Any text up to a length: pages hold all of Unicode, while samples are printable ASCII."""

    def __init__(self, max_length: int):
        printable = string.ascii_letters + string.digits + string.punctuation + " "
        super().__init__(max_length, min_length=0, charset=printable)

    def contains(self, x) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


class TextEnv(gymnasium.Env):
    """``world`` speaks the batched protocol (``mexp.DreamEnv``, ``rollouts.RealBatch``); of it one episode is used.

    ``reset(seed=..)`` seeds the choice of the task and, where the experience model of a dream has a generator, all that
    it samples; ``reset(options={"task": number})`` chooses the task.  ``info`` holds success, score, invalid, task id
    and the admissible actions.
    """
    metadata: dict = {"render_modes": []}

    def __init__(self, world, tasks: Sequence[Task], grammar: Grammar, max_state: int = 20_000,
                 max_action: int = 1_000):
        self.world, self.tasks, self.grammar = world, list(tasks), grammar
        self.observation_space = spaces.Dict({"task": AnyText(max_state), "state": AnyText(max_state)})
        self.action_space = AnyText(max_action)
        self.task: Task | None = None
        self.over = True

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        number = (options or {}).get("task")
        self.task = self.tasks[int(self.np_random.integers(len(self.tasks))) if number is None else number]
        generator = getattr(getattr(self.world, "model", None), "generator", None)
        if generator is not None:                              # follows from the seed, as the task does
            generator.manual_seed(int(self.np_random.integers(2**63)))
        self.over = False
        [state] = self.world.reset([self.task])
        return self._observed(state), self._info(state, {"success": False, "score": 0.0, "invalid": False})

    def step(self, action: str) -> tuple[dict, float, bool, bool, dict]:
        if self.over:
            raise RuntimeError("the episode is over: call reset first")
        [(state, reward, terminated, truncated, info)] = self.world.step([0], [action])
        self.over = terminated or truncated
        return self._observed(state), reward, terminated, truncated, self._info(state, info)

    def _observed(self, state: str) -> dict:
        return {"task": self.task.text, "state": state}

    def _info(self, state: str, info: dict) -> dict:
        return {**info, "task_id": self.task.id, "admissible": self.grammar.admissible(state)}
