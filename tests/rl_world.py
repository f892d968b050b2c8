"""What the tests of rl.py share: a policy of a few thousand weights, two small worlds, a configuration."""
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import llm
import rl
import rollouts
import training
from config import RLSection
from envs import Task

WORDS = ["a", "b", "c"]


def word_tokenizer(words=WORDS):
    """One token per word."""
    vocabulary = {w: i for i, w in enumerate([llm.PAD, llm.EOS, *words])}
    tok = Tokenizer(models.WordLevel(vocabulary, unk_token=llm.PAD))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token=llm.PAD, eos_token=llm.EOS)


def byte_tokenizer(merges=()):
    """One token per byte, plus the merges given (pairs of single characters)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {w: i for i, w in enumerate([llm.PAD, llm.EOS, *alphabet, *(x + y for x, y in merges)])}
    tok = Tokenizer(models.BPE(vocabulary, list(merges)))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token=llm.PAD, eos_token=llm.EOS)


def tiny_policy(seed=0, tokenizer=None, layers=1, width=32):
    return llm.tiny_lm(tokenizer or word_tokenizer(), layers=layers, width=width, heads=2, mlp=2 * width, seed=seed,
                       constructed=False)


def config(**changes):
    """rl settings of the tests: the defaults, except where a small value makes a test sharper."""
    sharper = dict(lr=3e-3, lr_warmup=0, adam_eps=1e-8, weight_decay=0.0, kl_coef=0.0, kl_in="none", minibatches=1,
                   value_lr=1e-2, value_warmup=0, invalid_penalty=0.0)
    values = RLSection().model_dump() | sharper
    assert changes.keys() <= values.keys()
    return SimpleNamespace(**{**values, **changes})


class Format:
    """Bare actions; the prompt is the state, after as many earlier actions as ``memory`` says."""

    def __init__(self, policy, memory=0):
        self.policy, self.memory = policy, memory

    def prompt(self, task, history, state, admissible):
        return self.policy.encode(" ".join([*history[-self.memory:], state] if self.memory else [state]))

    def parse(self, text):
        return text.strip() or None


class Bandit:
    """One turn, two tokens: half a reward for each that is right.  The best policy earns 1."""
    best = ["b", "a"]

    def reset(self, task):
        return "c"

    def step(self, action):
        words = action.split()
        score = sum(x == y for x, y in zip(words, self.best)) / 2 if len(words) <= 2 else 0.0
        return "c", score, True, False, {"success": score == 1, "score": score, "invalid": False}


class Corridor:
    """Three doors, each opened by its own word; a wrong word changes nothing.  Each door is worth a third, and a task
    says how many are open at the start: the best policy earns 1 from the first door.  Four turns."""
    doors = ["b", "c", "a"]

    def reset(self, task):
        self.cell, self.turn = task.goal or 0, 0
        return "abc"[self.cell]

    def step(self, action):
        right = action == self.doors[self.cell]
        self.cell += right
        self.turn += 1
        done = self.cell == 3
        return ("abca"[self.cell], right / 3, done, not done and self.turn == 4,
                {"success": done, "score": self.cell / 3, "invalid": not right})


def play(policy, world, episodes, temperature=1.0, group_size=None, starts=(0,), generator=None, **options):
    """``episodes`` rollouts in groups of ``group_size`` (default: one group); groups take turns with ``starts``."""
    size = group_size or episodes
    tasks = [Task("t", "task", "train", goal=starts[i // size % len(starts)]) for i in range(episodes)]
    options = dict(max_turns=4, max_new_tokens=3, max_prompt_tokens=64) | options
    return rollouts.rollout(policy, rollouts.RealBatch([world() for _ in tasks], lambda n: None), tasks,
                      [f"0/{i // size}" for i in range(episodes)], Format(policy), lambda state: [],
                      temperature=temperature, generator=generator, **options)


def mean_outcome(episodes):
    return sum(e.outcome for e in episodes) / len(episodes)


def learn(world, cfg, iterations, seed, episodes=64, group_size=16, starts=(0,), target=0.97):
    """Train a fresh policy until two batches from the first start reach ``target``; returns (policy, mean outcomes)."""
    policy = tiny_policy(seed)
    optimizer = training.make_optimizer(policy, cfg)
    ref = training.freeze_reference(policy) if cfg.kl_in != "none" else None
    value = rl.ValueHead(policy.model.config.hidden_size, cfg.value_lr) if cfg.algorithm == "ppo" else None
    generator = torch.Generator().manual_seed(seed)
    curve = []
    for _ in range(iterations):
        played = play(policy, world, episodes, group_size=group_size, starts=starts, generator=generator)
        curve.append(mean_outcome([e for e in played if not e.task.goal]))
        if min(curve[-2:]) >= target and len(curve) > 1:
            break
        rows, _ = rl.rows_from(played, cfg)
        rl.update(policy, ref, optimizer, rows, cfg, value, generator)
    return policy, curve
