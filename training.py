"""Mechanics of training on sampled tokens: forward passes, the frozen reference, memory, processes, optimizer steps.

No algorithm in here; shapes as in rl.py.
"""
from __future__ import annotations

import copy
import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import llm
from config import UserError

if TYPE_CHECKING:
    from rl import Row

MAX_BAD_STEPS = 3            # non-finite optimizer steps in a row that end the run
MAX_PADDING = 0.07           # share of padding in a forward pass of several rows, besides rounding: with it under a tenth
MAX_GAP = 0.05               # of the log-probs of sampler and trainer, mean per token; in one precision it is far smaller
LENGTHS = 4                  # forward passes are padded to multiples of this: few shapes, see ``llm.round_up``


# ------------------------------------------------------------------------------------------------ forward passes
@dataclass
class Micro:
    """One forward pass over B rows of similar length, right-padded to T tokens; its action tokens lie flat."""
    rows: list[int]                        # indices of the rows
    input_ids: Tensor                      # (B, T)
    attention_mask: Tensor                 # (B, T)
    action_mask: Tensor                    # (B, T - 1) bool, True where the *next* token was sampled by the policy
    lengths: Tensor                        # (B,) action tokens of each row; they sum to A
    old_logprobs: Tensor | None = None     # (A,)
    ref_logprobs: Tensor | None = None     # (A,)
    advantages: Tensor | None = None       # (A,)


def pack(lengths: Sequence[int], micro_tokens: int) -> list[list[int]]:
    """Indices of sequences, longest first, in packs of at most ``micro_tokens`` tokens with padding and at most
    MAX_PADDING of it (besides rounding); a sequence that is longer, or fits no other, is a pack of its own, none is ever
    sliced."""
    packs: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if packs:
            padded = (len(packs[-1]) + 1) * llm.round_up(lengths[packs[-1][0]], LENGTHS)
            used = sum(llm.round_up(lengths[j], LENGTHS) for j in [*packs[-1], i])         # equal rows always fit
            if padded <= micro_tokens and used >= (1 - MAX_PADDING) * padded:
                packs[-1].append(i)
                continue
        packs.append([i])
    return packs


def collate(pairs: Sequence[tuple[list[int], list[int]]], rows: Sequence[int], policy: llm.LM) -> Micro:
    """``pairs`` holds (prompt ids, action ids) of all rows, ``rows`` says which of them go into this forward pass.
    All masks are made from lengths: the padding id may equal EOS, and EOS is an action token."""
    chosen = [pairs[i] for i in rows]
    input_ids, attention_mask = llm.pad_rows([p + a for p, a in chosen], policy.pad_id, policy.device, LENGTHS)
    start = torch.tensor([len(p) for p, _ in chosen], device=policy.device)[:, None] - 1
    lengths = torch.tensor([len(a) for _, a in chosen], device=policy.device)
    position = torch.arange(input_ids.shape[1] - 1, device=policy.device)[None]
    action_mask = (position >= start) & (position < start + lengths[:, None])
    return Micro(list(rows), input_ids, attention_mask, action_mask, lengths)


@dataclass
class Step:
    """One optimizer step: its forward passes, and by name what its sum may be divided by, over all processes."""
    micros: list[Micro]
    sizes: dict[str, float]


def deal(rows: Sequence[Row], policy: llm.LM, cfg, generator, count: int) -> list[Step]:
    """Deal the rows to ``count`` optimizer steps at random, and each step's rows to forward passes.

    Done once an update: other shapes in later epochs would change low-precision log-probs.
    """
    order = [i for i in torch.randperm(len(rows), generator=generator).tolist() if not (cfg.mask_cut and rows[i].cut)]
    pairs = [(row.prompt_ids, row.action_ids) for row in rows]
    steps = []
    for m in range(count):
        mb = order[m::count]                                   # no remainder is dropped
        packs = pack([len(prompt) + len(action) for prompt, action in (pairs[i] for i in mb)], cfg.micro_tokens)
        sizes = sum_over_ranks({"tokens_of_step": sum(len(pairs[i][1]) for i in mb), "turns_of_step": len(mb),
                                "episodes_of_step": len({rows[i].episode for i in mb})})
        steps.append(Step([collate(pairs, [mb[j] for j in part], policy) for part in packs], sizes))
    return steps


def action_logprobs(lm: llm.LM, micro: Micro, temperature: float, with_entropy: bool = False):
    """log pi of the action tokens (A,) in fp32, and their entropies: the one function behind old, new and reference
    log-probs, at the sampling temperature.  Position t predicts token t + 1; this is the only shift."""
    hidden = llm.hidden_states(lm, micro.input_ids, micro.attention_mask)[:, :-1][micro.action_mask]     # (A, H)
    targets = micro.input_ids[:, 1:][micro.action_mask]                                                  # (A,)
    return llm.token_logprobs(lm, hidden, targets, temperature, with_entropy=with_entropy)


@torch.no_grad()
def state_features(policy: llm.LM, prompts: Sequence[list[int]], micro_tokens: int) -> Tensor:
    """Hidden state (N, H) of each prompt's last token, fp32 and detached: what the policy knows before it acts."""
    features = torch.zeros(len(prompts), policy.model.config.hidden_size, device=policy.device)
    for part in pack([len(p) for p in prompts], micro_tokens):
        ids, mask = llm.pad_rows([prompts[i] for i in part], policy.pad_id, policy.device, LENGTHS)
        last = mask.sum(-1) - 1                                                # (B,)
        features[part] = llm.hidden_states(policy, ids, mask)[torch.arange(len(part)), last].float()
    return features


# ------------------------------------------------------------------------------------------------ reference and modes
def freeze_reference(policy: llm.LM) -> llm.LM | str:
    """A frozen copy of the policy as it is now: KL to it is exactly 0 before the first step.

    With adapters the copy is a second adapter ``reference`` (switching adapters *off* would give the base model,
    not the policy the run started from); otherwise a second model.
    """
    model = policy.model
    if not hasattr(model, "peft_config"):
        return replace(policy, model=copy.deepcopy(model).eval().requires_grad_(False))
    trained = model.active_adapter
    model.add_adapter("reference", model.peft_config[trained])
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        if ".reference." in name:
            weight.data.copy_(weights[name.replace(".reference.", f".{trained}.")].data)
            weight.requires_grad_(False)
    return "reference"


@contextmanager
def reference_policy(policy: llm.LM, ref: llm.LM | str) -> Iterator[llm.LM]:
    """The reference as an LM: the frozen model, or the policy with its reference adapter switched on."""
    if not isinstance(ref, str):
        yield ref
        return
    trained = policy.model.active_adapter
    policy.model.set_adapter(ref)
    try:
        yield policy
    finally:
        policy.model.set_adapter(trained)


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Switch train/eval and switch back."""
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)


def less_training_memory(model: str, pass_tokens: int) -> str:
    """Three settings that lower the memory of training; ``model``: the section ``policy_model`` or ``mexp_model``."""
    return (f"lower rl.micro_tokens below {pass_tokens}, set {model}.gradient_checkpointing: true, or lower "
            f"{model}.max_prompt_tokens")


def less_sampling_memory(model: str) -> str:
    """Three settings that lower the memory of sampling."""
    return f"lower {model}.max_prompt_tokens, {model}.max_new_tokens or rl.tasks_per_step"


@contextmanager
def explain_out_of_memory(what_helps: str, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Out of memory becomes one clear line; weights and optimizer stay those of the last complete step."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        raise UserError(f"out of memory: {what_helps}; nothing is lost, the same command resumes the run") from error


# ------------------------------------------------------------------------------------------------ optimizer steps
def make_optimizer(policy: llm.LM, cfg) -> torch.optim.Optimizer:
    """AdamW over the trainable weights; its states take 8 bits on a GPU (bitsandbytes) with ``cfg.adam_8bit``."""
    params = [p for p in policy.model.parameters() if p.requires_grad]
    if not params:
        raise UserError("policy_model: no weight is trainable; load its adapter as trainable")
    options = {"lr": cfg.lr, "eps": cfg.adam_eps, "weight_decay": cfg.weight_decay}
    if cfg.adam_8bit and policy.device.type == "cuda":
        from bitsandbytes.optim import AdamW8bit
        return AdamW8bit(params, **options)
    return torch.optim.AdamW(params, fused=True, **options)    # one pass over memory


def sum_over_ranks(sums: dict[str, float]) -> dict[str, float]:
    """Add up named numbers over all processes (same names, same order, everywhere)."""
    if not (dist.is_available() and dist.is_initialized()):
        return {name: float(x) for name, x in sums.items()}
    total = torch.tensor([float(x) for x in sums.values()], dtype=torch.float64)
    dist.all_reduce(total)
    return dict(zip(sums, total.tolist()))


def optimizer_step(optimizer: torch.optim.Optimizer, lr: float, warmup: int, max_grad_norm: float,
                   rate: str = "rl.lr") -> float | None:
    """Sum gradients over processes, clip, step; returns the gradient norm, or None for a step that was skipped.

    A step whose gradient is not finite is skipped on every process; three in a row raise UserError, which names the
    setting ``rate`` that ``lr`` comes from.  The counts live in the optimizer's first parameter group, so that they
    are saved and resumed with it.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if dist.is_available() and dist.is_initialized():
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params])
        dist.all_reduce(flat)
        for p, grad in zip(params, flat.split([p.numel() for p in params])):
            p.grad = grad.view_as(p)
    norm = nn.utils.clip_grad_norm_(params, max_grad_norm).item()
    counts = optimizer.param_groups[0]
    taken, bad = counts.setdefault("taken", 0), counts.setdefault("bad_in_a_row", 0)
    finite = norm < float("inf")                               # False for NaN too
    if finite:
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (taken + 1) / max(1, warmup))
        optimizer.step()
        torch.autograd.graph.increment_version(params)         # fused and 8-bit steps do not, and the sampler's copy asks
        counts["taken"], counts["bad_in_a_row"] = taken + 1, 0
    else:
        counts["bad_in_a_row"] = bad + 1
    optimizer.zero_grad(set_to_none=True)
    if counts["bad_in_a_row"] >= MAX_BAD_STEPS:
        raise UserError(f"loss or gradient was not finite in {MAX_BAD_STEPS} steps in a row: lower {rate}, or resume "
                        "from an earlier checkpoint")
    return norm if finite else None


# ------------------------------------------------------------------------------------------------ alarms
def repetition(rows: Sequence[Row]) -> float:
    """Share of token pairs that the same action already held: near 0 for language, near 1 for a stuck policy."""
    pairs = [list(zip(row.action_ids, row.action_ids[1:])) for row in rows]
    s = sum_over_ranks({"pairs": sum(map(len, pairs)), "new": sum(len(set(p)) for p in pairs)})
    return 1 - s["new"] / s["pairs"] if s["pairs"] else 0.0


def sampler_gap(rows: Sequence[Row], micros: Sequence[Micro]) -> float | None:
    """Mean absolute difference, per action token, of the log-probs of sampler and trainer: what makes samples
    off-policy before the first step.  None where nothing was sampled."""
    sums = Counter(tokens=0.0, gap=0.0)
    for micro in micros:
        sampled = [p for i in micro.rows for p in rows[i].sampled_logprobs]
        if len(sampled) == len(micro.old_logprobs):
            sums["tokens"] += len(sampled)
            sums["gap"] += (micro.old_logprobs.cpu() - torch.tensor(sampled)).abs().sum().item()
    s = sum_over_ranks(sums)
    return s["gap"] / s["tokens"] if s["tokens"] else None


def alarms(metrics: dict[str, float | None], vocabulary: int) -> list[str]:
    """Signs of a collapsing or dissolving policy in the metrics of ``rows_from`` and ``update`` together, one sentence
    each; mostly none."""
    found, entropy = [], metrics["entropy"]
    if metrics.get("kept") == 0:
        found.append("all episodes of every group end alike: nothing is learned; raise rl.temperature or rl.group_size")
    if entropy is not None and entropy < 1e-3:
        found.append("the policy is deterministic (entropy below 0.001): raise rl.entropy_coef or lower rl.lr")
    if entropy is not None and entropy > 0.5 * math.log(vocabulary):
        found.append("the policy is close to random (entropy above half its maximum): lower rl.lr or rl.entropy_coef")
    if (metrics.get("sampler_gap") or 0.0) > MAX_GAP:
        found.append(f"sampler and trainer disagree about the samples (mean gap of log-probs above {MAX_GAP}): compute "
                     "in a higher precision (dtype)")
    if metrics["repetition"] > 0.5:
        found.append("actions repeat themselves (more than half of the token pairs): lower rl.lr, raise rl.kl_coef")
    return found
