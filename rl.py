"""Reinforcement learning for language-model agents: advantages, losses and one ``update``.

Eq. 2 of the paper (arXiv 2511.03773) is PPO with generalised advantage estimation, Eq. 3 is GRPO; section 1.2
leaves both unmodified.  Reading order: rollouts.py plays episodes, ``rows_from`` turns them into training rows,
``update`` makes the policy better; training.py holds the mechanics.  Nothing here knows whether a world is real
or dreamed.

How this differs from the paper and from the code it was run with (verl-agent):
  1. The GRPO baseline is taken over *episodes* and copied to their turns; over rows, long episodes weigh more.
  2. PPO's GAE runs over *turns* and bootstraps at truncation; V is a linear head on the policy's own detached
     hidden state, not a second model.
  3. Groups in which all episodes end alike are dropped before the update, and optimizer steps with them.
  4. Every action token weighs the same; only the constant that divides the sum can be chosen.
  5. The win reward is 1 (there 10), and the penalty of an invalid action 0.2 (there 0.1).
  6. KL by ``k2``, AdamW with a large eps, and a learning rate that rises for a few steps and then falls.

Words: a *row* is one turn: the prompt as the policy saw it and the ids it sampled, never tokenised again.  The
*action tokens* are those ids.  Shapes: N rows, B rows of one forward pass, T tokens, A action tokens of a forward
pass (one flat axis, so the maths never meets padding), K turns of an episode, H hidden size.

With torch.distributed initialised every process passes its own episodes (a group lives on one process); sums,
denominators and gradients are added up over processes, and all take the same decisions.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Sequence

import torch
from torch import Tensor, nn

import llm
from config import UserError
from envs import Task
from rollouts import Episode
from training import (Micro, action_logprobs, deal, explain_out_of_memory, less_training_memory, mode, optimizer_step,
                      reference_policy, repetition, sampler_gap, state_features, sum_over_ranks)

SUMS = ("loss", "policy_loss", "entropy", "clip_fraction", "old_kl", "abs_log_ratio", "ref_k1", "ref_k3")  # logged


# ------------------------------------------------------------------------------------------------ advantages
@dataclass(frozen=True)
class GroupStat:
    """Outcome rewards of one group; ``variance`` is V of Eq. 7 (population variance), the curriculum's signal."""
    task: Task
    size: int
    mean: float
    variance: float


def group_stats(episodes: Sequence[Episode]) -> dict[str, GroupStat]:
    """Group id -> statistics; GRPO drops the groups of variance 0, the curriculum varies those of high variance."""
    stats = {}
    for group in dict.fromkeys(e.group for e in episodes):
        members = [e for e in episodes if e.group == group]
        outcomes = torch.tensor([e.outcome for e in members], dtype=torch.float64)
        stats[group] = GroupStat(members[0].task, len(members), outcomes.mean().item(),
                                 outcomes.var(correction=0).item())
    return stats


def group_baseline(rewards: Tensor, groups: Sequence[str], norm_std: bool) -> tuple[Tensor, Tensor]:
    """Mean and divisor of Eq. 3 for each of E episodes: advantage = (reward - mean) / divisor.

    rewards (E,).  The divisor is the unbiased standard deviation of the group + 1e-6, or 1 without ``norm_std``:
    dividing gives almost solved and almost hopeless tasks the largest gradients (Dr. GRPO, 2503.20783).
    """
    mean, divisor = torch.zeros_like(rewards), torch.ones_like(rewards)
    for group in dict.fromkeys(groups):
        member = torch.tensor([g == group for g in groups])
        if member.sum() < 2:
            raise UserError(f"rl.group_size: group {group} has one episode, GRPO compares at least 2")
        mean[member] = rewards[member].mean()
        if norm_std:
            divisor[member] = rewards[member].std(correction=1) + 1e-6
    return mean, divisor


def gae(rewards: Tensor, values: Tensor, bootstrap: float, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Eq. 2 over the K turns of one episode; rewards, values (K,) -> advantages, returns (K,).

    ``bootstrap`` is the value of the state after the last turn: 0 where the task ended (terminated), V(s_K) where
    the step limit did (truncated), because the limit does not belong to the task (Pardo et al., 1712.00378).  With
    gamma = 1 wasting turns then costs nothing and V has no unique solution where an action can change nothing: use
    gamma < 1.
    """
    advantages = torch.zeros_like(rewards)
    running, following = 0.0, bootstrap
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following - values[t]
        running = delta + gamma * lam * running
        advantages[t] = running
        following = values[t]
    return advantages, advantages + values


@dataclass
class Row:
    """One turn as training data.  Rows of an episode follow each other in turn order.

    ``reward``: the turn's reward less its invalid penalty.  ``advantage``, ``divisor``: GRPO's, see
    ``group_baseline``; PPO computes its own.  ``bootstrap_ids``: prompt of the state after the turn, where the
    episode was truncated.  ``sampled_logprobs``: of the action tokens, as the sampler saw them; only compared.
    """
    prompt_ids: list[int]
    action_ids: list[int]
    episode: int
    reward: float
    cut: bool
    advantage: float = 0.0
    divisor: float = 1.0
    bootstrap_ids: list[int] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)


def rows_from(episodes: Sequence[Episode], cfg) -> tuple[list[Row], dict[str, float]]:
    """Training rows of a batch of episodes, and what was dropped.

    GRPO: outcome reward less the turn's own invalid penalty, normalised by the group's outcomes; groups whose
    outcomes are all equal give no rows.  PPO: all turns.  All processes must call this together.
    """
    stats = group_stats(episodes)
    is_grpo = cfg.algorithm == "grpo"
    if is_grpo:
        outcomes = torch.tensor([e.outcome for e in episodes])
        mean, divisor = group_baseline(outcomes, [e.group for e in episodes], cfg.norm_std)
    rows = []
    for i, episode in enumerate(episodes):
        if is_grpo and stats[episode.group].variance < 1e-12:
            continue
        for k, turn in enumerate(episode.turns):
            penalty = cfg.invalid_penalty * turn.invalid
            row = Row(turn.prompt_ids, turn.action_ids, i, turn.reward - penalty, turn.cut, sampled_logprobs=turn.logprobs)
            if is_grpo:
                row.divisor = divisor[i].item()
                row.advantage = (episode.outcome - penalty - mean[i].item()) / row.divisor
            if k == len(episode.turns) - 1:
                row.bootstrap_ids = episode.final_prompt_ids
            rows.append(row)
    total = sum_over_ranks({"groups": len(stats), "constant": sum(s.variance < 1e-12 for s in stats.values())})
    constant = total["constant"] / max(1, total["groups"])
    return rows, {"groups": total["groups"], "constant_groups": constant, "kept": 1 - constant if is_grpo else 1.0}


def turn_advantages(rows: Sequence[Row], rewards: Tensor, values: Tensor, bootstraps: Tensor, gamma: float,
                    lam: float) -> tuple[Tensor, Tensor]:
    """``gae`` episode by episode; all (N,).  ``bootstraps[i]``: value of the state after row i, 0 without one."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    ends = [i + 1 for i in range(len(rows)) if i + 1 == len(rows) or rows[i + 1].episode != rows[i].episode]
    for start, end in zip([0, *ends], ends):
        advantages[start:end], returns[start:end] = gae(rewards[start:end], values[start:end],
                                                        bootstraps[end - 1].item(), gamma, lam)
    return advantages, returns


def whiten(advantages: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 over the turns of all processes (N,); fewer than two turns stay as they are."""
    s = sum_over_ranks({"n": len(advantages), "sum": advantages.sum(), "squares": (advantages ** 2).sum()})
    if s["n"] < 2:
        return advantages
    mean = s["sum"] / s["n"]
    variance = max(0.0, s["squares"] / s["n"] - mean ** 2)
    return (advantages - mean) / (variance ** 0.5 + 1e-6)


# ------------------------------------------------------------------------------------------------ losses
def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float,
                dual_clip: float | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate with token-level ratios, *summed* over action tokens.

    logprobs, old_logprobs, advantages (A,).  The ratio may move in [1 - clip_low, 1 + clip_high].  ``dual_clip``
    c > 1 bounds the loss of a token with negative advantage at c |advantage|.  Also returns sums for the log.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-20, 20)                       # (A,) no overflow after a rare token
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    with torch.no_grad():
        sums = {"clip_fraction": (clipped > plain).float().sum(), "old_kl": (torch.expm1(log_ratio) - log_ratio).sum(),
                "abs_log_ratio": log_ratio.abs().sum()}
    return loss.sum(), sums


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str, old_logprobs: Tensor | None = None) -> Tensor:
    """Estimates of KL(policy || reference) per token from sampled tokens (Schulman's KL note); all (A,).

    With r = reference / policy: ``k1`` = -log r: the right gradient in the *reward* (as a loss its expected
    gradient is 0).  ``k2`` = (log r)^2 / 2: the right gradient as a loss on fresh samples, the farther the stronger.
    ``k3`` = r - 1 - log r: right value, but as a loss it pulls a token that the policy overrates with at most its
    weight, however far it went (verl-agent's choice, there bounded at 10 too).  ``k3_weighted`` = k3
    times policy / old policy: the right value and gradient, also on samples of the old policy (2512.21852).
    """
    log_r = (ref_logprobs - logprobs).clamp(-20, 20)
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return 0.5 * log_r ** 2
    if estimator == "k3":
        return (torch.expm1(log_r) - log_r).clamp(max=10)
    if estimator == "k3_weighted":
        return (logprobs - old_logprobs).clamp(-20, 20).exp() * (torch.expm1(log_r) - log_r).clamp(max=10)
    raise UserError(f"rl.kl_estimator: {estimator!r} is none of k1, k2, k3, k3_weighted")


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, clip: float | None = None) -> Tensor:
    """Half the squared error, *summed* over turns; (n,) each.  With ``clip`` the new value may leave the old one by
    at most that much, and the larger of both errors counts."""
    loss = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns) ** 2)
    return 0.5 * loss.sum()


# ------------------------------------------------------------------------------------------------ update
class ValueHead(nn.Module):
    """V(s): an fp32 linear layer on the policy's detached hidden state; 0 everywhere at first.

    It has its own optimizer and file, and no gradient of its loss can reach the policy.
    """

    def __init__(self, hidden_size: int, lr: float, device="cpu"):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=torch.float32, device=device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=0.0)
        self.updates = 0

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features)[:, 0]                                     # (n, H) -> (n,)

    def state(self) -> dict:
        """Everything that resuming needs, for a file of its own (``runs.save_state``)."""
        return {"weights": self.state_dict(), "optimizer": self.optimizer.state_dict(), "updates": self.updates}

    def restore(self, state: dict) -> None:
        self.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]


def fit_value(value: ValueHead, features: Tensor, returns: Tensor, cfg, generator=None) -> dict[str, float]:
    """Regress V on the returns: features (N, H), returns (N,).  The policy's weights take no part."""
    with torch.no_grad():
        old_values = value(features)
    for _ in range(cfg.value_epochs):
        order = torch.randperm(len(returns), generator=generator).to(features.device)
        for m in range(cfg.minibatches):
            mb = order[m::cfg.minibatches]
            turns = sum_over_ranks({"turns": len(mb)})["turns"]
            if turns:
                loss = value_loss(value(features[mb]), returns[mb], old_values[mb], cfg.value_clip) / turns
                loss.backward()
                optimizer_step(value.optimizer, cfg.value_lr, 0, cfg.max_grad_norm, "rl.value_lr")
    value.updates += 1
    error = returns - old_values
    s = sum_over_ranks({"n": len(returns), "r": returns.sum(), "rr": (returns ** 2).sum(), "e": error.sum(),
                        "ee": (error ** 2).sum()})
    n = max(1.0, s["n"])
    variance = s["rr"] / n - (s["r"] / n) ** 2
    unexplained = s["ee"] / n - (s["e"] / n) ** 2
    return {"value_loss": 0.5 * s["ee"] / n, "value_mean": (s["r"] - s["e"]) / n, "return_mean": s["r"] / n,
            "explained_variance": 1 - unexplained / variance if variance > 1e-12 else 0.0}


def check(policy: llm.LM, ref, cfg, value: ValueHead | None) -> None:
    """What cannot work raises UserError before anything is computed."""
    if cfg.temperature <= 0:
        raise UserError("rl.temperature: training samples need a temperature above 0")
    if (cfg.algorithm == "ppo") != (value is not None):
        raise UserError("rl.algorithm: ppo needs a value head, grpo takes none")
    if cfg.kl_in != "none" and ref is None:
        raise UserError(f"rl.kl_in: {cfg.kl_in} needs a reference policy")
    if (cfg.kl_in == "reward") != (cfg.kl_estimator == "k1") and cfg.kl_in != "none":
        raise UserError("rl.kl_estimator: k1 belongs into the reward (as a loss its expected gradient is 0), "
                        "the others into the loss")
    rates = [m.p for m in policy.model.modules() if isinstance(m, nn.Dropout)]
    if any(rates) or getattr(policy.model.config, "attention_dropout", 0.0):
        raise UserError("policy_model: dropout must be 0 in RL, it would make log-prob ratios random")


def micro_loss(policy: llm.LM, micro: Micro, cfg) -> tuple[Tensor, dict[str, float]]:
    """Policy loss + KL - entropy bonus, summed over the action tokens of one forward pass, and sums for the log."""
    logprobs, entropy = action_logprobs(policy, micro, cfg.temperature, with_entropy=True)               # (A,), (A,)
    loss, sums = policy_loss(logprobs, micro.old_logprobs, micro.advantages, cfg.clip_low, cfg.clip_high, cfg.dual_clip)
    sums |= {"policy_loss": loss.detach(), "entropy": entropy.detach().sum()}
    if cfg.entropy_coef:
        loss = loss - cfg.entropy_coef * entropy.sum()
    if micro.ref_logprobs is not None:
        sums |= {"ref_k1": kl_estimate(logprobs.detach(), micro.ref_logprobs, "k1").sum(),
                 "ref_k3": kl_estimate(logprobs.detach(), micro.ref_logprobs, "k3").sum()}
        if cfg.kl_in == "loss":
            kl = kl_estimate(logprobs, micro.ref_logprobs, cfg.kl_estimator, micro.old_logprobs)
            loss = loss + cfg.kl_coef * kl.sum()
    return loss, {"loss": loss.item(), **{name: x.item() for name, x in sums.items()}}


@torch.no_grad()
def score(policy: llm.LM, ref: llm.LM | str | None, micros: list[Micro], cfg) -> None:
    """Old and reference log-probs, in eval mode, once and before the first step (critical!)."""
    with mode(policy.model, training=False):
        for micro in micros:
            micro.old_logprobs, _ = action_logprobs(policy, micro, cfg.temperature)
        if ref is not None:
            with reference_policy(policy, ref) as frozen:
                for micro in micros:
                    micro.ref_logprobs, _ = action_logprobs(frozen, micro, cfg.temperature)


def assign_advantages(policy: llm.LM, rows: Sequence[Row], micros: list[Micro], cfg, value: ValueHead | None,
                      generator) -> dict[str, float]:
    """Put each turn's advantage on each of its action tokens; PPO also fits its critic and returns its metrics."""
    N = len(rows)
    kl_paid = torch.zeros(N)                                   # KL in the reward: every turn pays for its own tokens
    if cfg.kl_in == "reward":
        for micro in micros:
            k1 = kl_estimate(micro.old_logprobs, micro.ref_logprobs, "k1").split(micro.lengths.tolist())
            kl_paid[micro.rows] = cfg.kl_coef * torch.tensor([x.sum().item() for x in k1])
    metrics: dict[str, float] = {}
    if value is None:
        divisors = torch.tensor([row.divisor for row in rows])
        advantages = torch.tensor([row.advantage for row in rows]) - kl_paid / divisors
    else:
        truncated = [i for i in range(N) if rows[i].bootstrap_ids]
        prompts = [row.prompt_ids for row in rows] + [rows[i].bootstrap_ids for i in truncated]
        with mode(policy.model, training=False), torch.no_grad():
            features = state_features(policy, prompts, cfg.micro_tokens)       # (N + truncated, H)
            values = value(features).cpu()
        bootstraps = torch.zeros(N)
        bootstraps[truncated] = values[N:]
        rewards = torch.tensor([row.reward for row in rows]) - kl_paid
        advantages, returns = turn_advantages(rows, rewards, values[:N], bootstraps, cfg.gamma, cfg.lam)
        if cfg.whiten:
            advantages = whiten(advantages)
        metrics = fit_value(value, features[:N], returns.to(features.device), cfg, generator)
    for micro in micros:
        micro.advantages = torch.repeat_interleave(advantages[micro.rows].to(policy.device), micro.lengths)
    return metrics


def update(policy: llm.LM, ref: llm.LM | str | None, optimizer: torch.optim.Optimizer, rows: Sequence[Row], cfg,
           value: ValueHead | None = None, generator: torch.Generator | None = None,
           kept: float = 1.0) -> dict[str, float | None]:
    """Improve the policy on the rows that it has just sampled; returns metrics, averaged over action
    tokens (None where no step was taken).

    ``ref``: what ``training.freeze_reference`` returned.  ``value``: PPO's critic.  ``generator`` deals the rows.
    ``kept``: the share of the groups that gave rows.  Where few are left, fewer optimizer steps are taken, each as
    large as ever: small ones are noise, which AdamW takes as seriously as signal.
    Raises UserError for settings that cannot work, out of memory, and three non-finite steps in a row.
    """
    check(policy, ref, cfg, value)
    model = policy.model
    totals = Counter(dict.fromkeys((*SUMS, "grad_norm", "tokens"), 0.0))
    counts = Counter(steps=0, skipped_steps=0, empty_steps=0, stopped_early=0)
    with explain_out_of_memory(less_training_memory("policy_model", cfg.micro_tokens), optimizer):
        steps = deal(rows, policy, cfg, generator, max(1, round(cfg.minibatches * kept)))
        micros = [micro for step in steps for micro in step.micros]
        score(policy, ref, micros, cfg)
        metrics = assign_advantages(policy, rows, micros, cfg, value, generator)
        epochs = 0 if value is not None and value.updates <= cfg.value_warmup else cfg.epochs
        # Dropout is 0, so the mode changes no number; transformers checkpoints activations in train mode only.
        with mode(model, training=getattr(model, "is_activation_checkpointing", False)):
            for step in steps * epochs:
                tokens, denominator = step.sizes["tokens_of_step"], step.sizes[cfg.loss_denominator]
                if not tokens:
                    counts["empty_steps"] += 1
                    continue
                sums = Counter(dict.fromkeys(SUMS, 0.0))
                for micro in step.micros:
                    loss, parts = micro_loss(policy, micro, cfg)
                    (loss / denominator).backward()            # the whole step's denominator, the only division
                    sums.update(parts)
                sums = sum_over_ranks(sums)
                if cfg.target_kl is not None and sums["old_kl"] / tokens > cfg.target_kl:
                    optimizer.zero_grad(set_to_none=True)      # too far from the samples: this step is not taken
                    counts["stopped_early"] = 1
                    break
                norm = optimizer_step(optimizer, cfg.lr, cfg.lr_warmup, cfg.max_grad_norm)
                if norm is None:
                    counts["skipped_steps"] += 1
                    continue
                counts["steps"] += 1
                sums["loss"] *= tokens / denominator           # reported as it was minimised
                totals.update({**sums, "grad_norm": norm * tokens, "tokens": tokens})
    seen = totals.pop("tokens")
    means = {name: x / seen if seen else None for name, x in totals.items()}
    return metrics | means | dict(counts) | {"sampler_gap": sampler_gap(rows, micros), "repetition": repetition(rows)}
