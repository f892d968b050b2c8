"""DreamGym: train language-model agents by reinforcement learning inside an experience model (arXiv 2511.03773).

    python dreamgym.py --config configs/webshop.yaml                    the whole method, end to end
    python dreamgym.py --config configs/webshop.yaml --profile smoke    the same in its shortest honest form
    python dreamgym.py --config configs/webshop.yaml --dry-run          build everything, print sizes, stop
    python dreamgym.py --help                                           everything else

Stages, each cached in the run folder: ``collect`` offline data of the real environment, ``policy`` (behaviour
cloning) and ``mexp`` (experience model, Eq. 5) side by side, ``dream`` (RL inside the experience model, with zero
real transitions), ``s2r`` (a few real ones), ``eval`` (the real environment, held-out tasks).
"""
from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Iterator, Sequence

if __name__ == "__main__":                                     # until there is something to save, Ctrl-C ends it quietly
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
from transformers.utils import logging as transformers_logging

import backbones
import commands
import config
import fidelity
import formats
import llm
import parallel
import report
import rl
import rollouts
import teacher
import training
from buffer import ReplayBuffer, Transition, make_encoder, read_transitions, write_transitions
from config import Config, UserError
from curriculum import Curriculum, TaskWriter, graded_stats, writer_rows
from endpoint import Endpoint, EndpointLM
from envs import Grammar, Task, World, open_world
from mexp import (PIECES, Codec, DreamEnv, ExperienceModel, Renamed, TrainingRows, content_words, random_names, rename)
from runs import (Checkpoints, Interrupt, Progress, Run, Stopped, append_whole, cache_folder, cut, derive_seed,
                  write_whole)

CURVE_EVERY, SFT_SAVE_EVERY = 20, 200      # optimizer steps between points of the curve, between checkpoints
EVAL_ROWS = 96                             # episodes side by side in an evaluation
TOKENIZER_WORDS = 1_200_000                # of training texts are enough for a tokenizer
KEPT = 12                                  # greedy episodes of every policy that an evaluation keeps in real.jsonl
GATE_EPISODES = {"expert": 1, "noisy": 3, "mediocre": 2, "random": 0.4, "curious": 0.2}     # x eval.validation_tasks
GATE_PURCHASES = 240                       # of each outcome
STAGES = ("collect", "policy", "mexp", "fidelity", "dream", "s2r", "real", "eval")
RL_STAGES = {"dream": ("dream", "s2r"), "real": ("real",), "both": ("dream", "s2r", "real"), "bc": ()}   # by method

if not sys.stderr.isatty():
    transformers_logging.disable_progress_bar()                # a log takes whole lines; helper processes come by here, too


# ------------------------------------------------------------------------------------------------ models
def new_lm(cfg: Config, role: str, folder: Path) -> llm.LM:
    """The backbone of ``role`` (policy or mexp) before any training of ours."""
    model = getattr(cfg, f"{role}_model")
    if model.name == "tiny":
        tokenizer = load_tokenizer(folder / "tokenizer")
        tiny = model.tiny
        dtype = "float32" if (role, model.dtype) == ("policy", "auto") else model.dtype     # sampled as trained, exactly
        return llm.tiny_lm(tokenizer, tiny.layers, tiny.width, tiny.heads, tiny.mlp,
                           seed=derive_seed(cfg.run.seed, role), constructed=getattr(cfg, role).heads == "constructed",
                           device=backbones.pick_device(model.device), dtype=dtype)
    return backbones.load_backbone(model, seed=derive_seed(cfg.run.seed, role), micro_tokens=cfg.rl.micro_tokens)


def load_tokenizer(folder: Path):
    """The tokenizer that stage ``collect`` left.  Raises UserError where it is damaged."""
    try:
        tokenizer = llm.load_tokenizer(folder)
    except Exception as error:                                 # the library raises plain Exception for damaged files
        raise UserError(f"{folder}: damaged tokenizer ({backbones.first_line(error)[:80]}); restore it, or make it again "
                        f"with --from collect") from None
    if None in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        raise UserError(f"{folder}: this tokenizer has no padding or no end token; restore it, or make it again with "
                        f"--from collect")
    return tokenizer


def trained_lm(cfg: Config, role: str, folder: Path, stage: str | None = None) -> llm.LM:
    """The backbone of ``role`` with the weights that ``stage`` (by default its supervised training) left."""
    return restored(new_lm(cfg, role, folder), folder, stage or role)


def restored(lm: llm.LM, folder: Path, stage: str) -> llm.LM:
    """``lm`` with the weights that ``stage`` left.  Raises UserError where they are missing or of another model."""
    _, state = Run.newest(folder, stage)
    place = folder / "checkpoints" / stage
    if state is None:
        raise UserError(f"{place}: no checkpoint; restore it, or repeat from there: --from {stage}")
    try:
        lm.load_weights(state["weights"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{place}: its weights belong to another model; restore it, or repeat from there: --from "
                        f"{stage}") from None
    return lm


def new_buffer(cfg: Config, grammar: Grammar, world: World, real: list[Transition]) -> ReplayBuffer:
    """The replay buffer, seeded with the offline data (section 4.1)."""
    banned = [t.id for split in ("validation", "test") for t in world.tasks[split]]
    device = str(backbones.pick_device(cfg.mexp_model.device))
    buffer = ReplayBuffer(make_encoder(cfg.retrieval.encoder, device), grammar, cfg.retrieval.capacity,
                          cfg.retrieval.synthetic_share, banned, device)
    if full := buffer.add(real)["full"]:
        print(f"warning: retrieval.capacity = {cfg.retrieval.capacity:,} leaves out {full:,} real transitions", file=sys.stderr)
    return buffer


def last_buffer(cfg: Config, folder: Path, grammar: Grammar, world: World, real: list[Transition]) -> ReplayBuffer:
    """The replay buffer of a run as the dream left it; where there was none yet, as it begins."""
    place = folder / "buffer-dream"
    if not place.is_dir():
        return new_buffer(cfg, grammar, world, real)
    buffer = new_buffer(cfg, grammar, world, [])
    for problem in buffer.load(place):
        print(f"warning: {problem}", file=sys.stderr)
    return buffer


def new_codec(cfg: Config, grammar: Grammar, buffer: ReplayBuffer) -> Codec:
    return Codec(grammar, buffer, cfg.mexp.format == "edits", cfg.mexp.history, cfg.retrieval.k, cfg.mexp.reasoning)


def new_server(cfg: Config, name: str, cache: Path | None = None) -> Endpoint:
    """The server of ``mexp.teacher`` or ``mexp.endpoint``; its answers are kept in ``cache``."""
    return Endpoint(config.server_address(name), cfg.mexp.server_model, cache,
                    prices=(cfg.mexp.price_in, cfg.mexp.price_out))


def keep_account(run: Run | None, server: Endpoint) -> str:
    """Adds what all processes asked of the server since the last time to server.json; a line with the sums.

    Killed runs and repeated stages included: paid is paid.
    """
    counts = parallel.gather([server.take_counts()])
    if not run:
        return ""
    total = report.read_account(run.folder)
    for name in counts[0]:
        total[name] = total.get(name, 0) + sum(part[name] for part in counts)
    write_whole(run.path("server.json"), json.dumps(total, indent=1) + "\n")
    return f"server {server.base}, all in all: " + ", ".join(
        f"{n:.4f} cost" if name == "cost" else f"{n:,} {name.replace('_', ' ')}" for name, n in total.items())


def experience_lm(cfg: Config, folder: Path) -> llm.LM | EndpointLM:
    """What plays the environment: the server of ``mexp.endpoint``, or the backbone trained in this run.

    A server's answers belong to the run: under the same name it may be another one tomorrow, trained again.  They lie
    where --from mexp forgets them.
    """
    if cfg.mexp.endpoint:
        return EndpointLM(new_server(cfg, cfg.mexp.endpoint, folder / "models" / "mexp" / "answers"))
    return trained_lm(cfg, "mexp", folder)


def policy_and_world(cfg: Config, folder: Path, stage: str) -> tuple[llm.LM, llm.LM | EndpointLM]:
    """The policy that ``stage`` left and what plays the environment; two adapters on one copy of the frozen weights
    where both models have the same base (the reference policy will be a third)."""
    shared = not cfg.mexp.endpoint and backbones.same_base(cfg.policy_model, cfg.mexp_model)
    if shared and parallel.rank() == 0:
        print(backbones.shared_memory(cfg.policy_model, cfg.mexp_model, cfg.rl.micro_tokens), flush=True)
    policy = trained_lm(cfg, "policy", folder, stage)
    if not shared:
        return policy, experience_lm(cfg, folder)
    lm = backbones.attach_adapter(policy, "mexp", cfg.mexp_model)
    return policy, restored(lm, folder, "mexp")


def new_mexp(cfg: Config, lm: llm.LM | EndpointLM, grammar: Grammar, buffer: ReplayBuffer) -> ExperienceModel:
    """M_exp with its memory; its own generator samples (``mexp.temperature``, second attempts)."""
    generator = None if isinstance(lm, EndpointLM) else torch.Generator(lm.device).manual_seed(
        derive_seed(cfg.run.seed, "mexp", parallel.rank()))
    return ExperienceModel(lm, new_codec(cfg, grammar, buffer), cfg.mexp_model.max_new_tokens, cfg.mexp.temperature,
                           cfg.mexp.retries, generator, max_prompt_tokens=cfg.mexp_model.max_prompt_tokens)


# ------------------------------------------------------------------------------------------------ stages
def collect(cfg: Config, run: Run, stopping: Callable[[], bool] = bool) -> None:
    """Offline real trajectories by scripted policies on training tasks: successes and failures (Table of section 5)."""
    world = open_world(cfg.env)
    rng = random.Random(derive_seed(cfg.run.seed, "collect"))
    tasks = world.tasks["train"][:cfg.env.train_tasks]
    grammar, env = world.grammar([t.text for t in tasks]), world.make()
    plan = [name for name, count in cfg.collect for _ in range(count)]
    transitions: list[Transition] = []
    successes = dict.fromkeys(dict(cfg.collect), 0)
    acts = {name: world.scripted(name) for name in dict.fromkeys(plan)}
    unseen = varied(tasks, acts["curious"], rng) if "curious" in acts else iter(())
    with Progress("collect", len(plan)) as progress:
        for number, name in enumerate(plan):
            if stopping():
                raise Stopped
            task = next(unseen) if name == "curious" else rng.choice(tasks)
            transitions += fidelity.play_scripted(env, task, acts[name], grammar, f"{name}-{number:06d}", rng)
            successes[name] += transitions[-1].success
            progress.update(1, transitions=len(transitions))
    transitions = explain(cfg, run, grammar, transitions, stopping)
    write_transitions(run.path("offline.jsonl"), transitions)
    run.ledger.add("offline", len(transitions), len(plan))
    if "tiny" in (cfg.policy_model.name, cfg.mexp_model.name):
        grammar = training_grammar(world, transitions)
        codec = new_codec(cfg, grammar, new_buffer(cfg, grammar, world, transitions))
        texts = TrainingRows(codec, transitions, None).texts() + [
            formats.join(grammar.consider(t.task, t.state, t.history), "<do>", t.action) for t in transitions]
        every = -(-sum(text.count(" ") for text in texts) // TOKENIZER_WORDS)
        tokenizer = llm.train_tokenizer(texts[::every], cfg.mexp_model.tiny.vocab, PIECES)
        run.path("tokenizer").mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=run.folder, prefix=".tokenizer.", suffix=".tmp") as place:
            tokenizer.save_pretrained(place)
            for file in Path(place).iterdir():
                write_whole(run.path("tokenizer") / file.name, file.read_bytes())
    rates = {name: successes[name] / count for name, count in cfg.collect if count}
    print("collect: success of the scripted policies on training tasks: "
          + ", ".join(f"{n} {r:.0%}" for n, r in rates.items()) + f"; {len(transitions):,} transitions")
    run.mark_done("collect", {"transitions": len(transitions), "success": rates})


def varied(tasks: Sequence[Task], act: Callable, rng: random.Random) -> Iterator[Task]:
    """The tasks again and again in random order; each time those first on which ``act`` begins unlike on any before."""
    while True:
        begun, later = set(), []
        for task in rng.sample(tasks, len(tasks)):
            action = act(task.text, task.start, [], rng)
            if action in begun:
                later.append(task)
            else:
                begun.add(action)
                yield task
        yield from later


def teacher_section(cfg: Config) -> config.ModelSection:
    """How a local teacher is loaded: as the experience model is, without any training."""
    return cfg.mexp_model.model_copy(update={"name": cfg.mexp.teacher, "lora_rank": 0, "gradient_checkpointing": False,
                                             "max_new_tokens": teacher.ANSWER_TOKENS})


def explain(cfg: Config, run: Run, grammar: Grammar, transitions: Sequence[Transition],
            stopping: Callable[[], bool]) -> list[Transition]:
    """The transitions with reasoning traces R* by the teacher of the configuration.

    Leaves annotations.jsonl (one trajectory a line, in the paper's form), from which an interrupted stage goes on.
    """
    name, path, server = cfg.mexp.teacher, run.path("annotations.jsonl"), None
    if name == "rules":
        path.unlink(missing_ok=True)                           # made in a moment, so always anew
        who = teacher.RulesTeacher(grammar)
    elif config.is_address(name):
        server = new_server(cfg, name, cache_folder() / "endpoint")
        who = teacher.endpoint_teacher(server)
    else:
        who = teacher.local_teacher(backbones.load_backbone(teacher_section(cfg), frozen=True))
    try:
        annotated, annotations = teacher.annotate(who, transitions, path, stopping)
    finally:
        if server:                                             # paid is paid, however this ends
            print(keep_account(run, server))
    missing = sum(a is None for a in annotations)
    if missing:
        print(f"teacher: nothing valid about {missing} of {len(annotations)} trajectories, which keep the traces of the "
              f"rules; for example {who.problems[-1] if getattr(who, 'problems', None) else 'see annotations.jsonl'}")
    ends = [t for t in transitions if t.done and name == "rules"]      # official data rest on attributes no page shows
    if other := sum(grammar.outcome(t.task, t.state, t.action, t.next_state) != (t.done, t.success) for t in ends):
        print(f"warning: the rules read {other:,} of {len(ends):,} final steps otherwise than the environment judged them; "
              "their traces contradict their flags", file=sys.stderr)
    return annotated


def training_grammar(world: World, offline: Sequence[Transition]) -> Grammar:
    """The text side, taught by the training data alone."""
    return world.grammar([t.text for t in world.tasks["train"]] + [t.next_state for t in offline])


class CloningRows:
    """Rows for behaviour cloning: the steps of the offline episodes that succeeded, or (``demonstrations: all``) of all
    episodes of those who meant well, their mistakes included.

    Two augmentations need no environment: content words are renamed in a share of the rows, and half of the rows have
    another task or history (``Grammar.varied``), with the thought that this asks for and, where the action followed its
    thought, the action.  Some pages few demonstrations come to (the third visit of a page), a policy that learns does.
    """

    def __init__(self, offline: Sequence[Transition], grammar: Grammar, fmt: formats.PolicyFormat, rename: float,
                 reasoning: bool, demonstrations: str):
        won = {t.episode for t in offline if t.success}
        chosen = [t for t in offline if t.episode.startswith(("expert-", "noisy-"))] if demonstrations == "all" else [
            t for t in offline if t.episode in won]
        self.steps = [t for t in chosen if t.next_state != t.state]
        self.grammar, self.fmt, self.rename, self.reasoning = grammar, fmt, rename, reasoning
        self.words = content_words(grammar, self.steps)

    def draw(self, rng: random.Random) -> llm.Row:
        t = rng.choice(self.steps)
        task, history, action, thought = t.task, t.history, t.action, ""
        if self.reasoning:
            if rng.random() < 0.5:
                task, history = self.grammar.varied(t.task, t.state, t.action, t.history, rng)
                if action == self.grammar.advice(t.task, t.state, t.history):
                    action = self.grammar.advice(task, t.state, history)
            thought = self.grammar.consider(task, t.state, history)
        names = random_names(self.words, rng) if rng.random() < self.rename else {}
        task, state, action, thought, *history = (rename(text, names) for text in (task, t.state, action, thought, *history))
        offered = [rename(text, names) for text in self.grammar.admissible(t.state)]
        return llm.Row(self.fmt.prompt(task, history, state, offered), self.fmt.target(action, thought))


class Mixture:
    """Rows of the experience model with a share of rows of the task writer among them."""

    def __init__(self, rows: TrainingRows, writer, share: float):
        self.rows, self.writer, self.share = rows, writer, share

    def draw(self, rng: random.Random) -> llm.Row:
        return self.writer(rng) if rng.random() < self.share else self.rows.draw(rng)


def train_backbone(cfg: Config, role: str, folder: Path, stopping: Callable[[], bool]) -> None:
    """Stages ``policy`` and ``mexp``: supervised training, in a process of its own where there is room; resumable.

    Leaves a checkpoint with the weights and the training curve, also where it ends early because of ``stopping``.
    """
    settings = getattr(cfg, role)
    checkpoints = Checkpoints(folder / "checkpoints" / role, cfg.run.keep_checkpoints)
    saved = checkpoints.load(checkpoints.steps()[-1]) if checkpoints.steps() else None
    if saved and saved["step"] == settings.steps:
        return
    world = open_world(cfg.env)
    offline = read_transitions(folder / "offline.jsonl")
    grammar = training_grammar(world, offline)
    lm = new_lm(cfg, role, folder)
    if role == "policy":
        rows = CloningRows(offline, grammar, formats.PolicyFormat(lm, settings.history), settings.rename,
                           settings.reasoning, settings.demonstrations)
    else:
        codec = new_codec(cfg, grammar, new_buffer(cfg, grammar, world, offline))
        rows = TrainingRows(codec, offline, lm, settings.judged, settings.counterfactual, settings.rename,
                            invent=settings.invent, max_prompt_tokens=cfg.mexp_model.max_prompt_tokens)
        if cfg.curriculum.enabled:                             # M_task of Eq. 6 is the same weights under another prompt
            tasks = world.tasks["train"][:cfg.env.train_tasks]
            rows = Mixture(rows, writer_rows(tasks, grammar, lm, cfg.curriculum.seeds), cfg.curriculum.writer_share)
    if saved:
        lm.load_weights(saved["weights"])
    curve: list[dict] = saved["curve"] if saved else []
    progress = Progress(role, settings.steps, start=saved["step"] if saved else 0)

    def on_step(step: int, metrics: dict) -> None:
        done = step + 1
        progress.update(1, loss=metrics["loss"])
        if done % CURVE_EVERY == 0 or done == settings.steps:
            curve.append({"step": done, "loss": metrics["loss"], "grad_norm": metrics["grad_norm"]})
        stop = stopping()
        if done % SFT_SAVE_EVERY == 0 or done == settings.steps or stop:
            checkpoints.save(done, {"step": done, "weights": lm.weights(), "curve": curve,
                                    "optimizers": [o.state_dict() for o in metrics["optimizers"]]})
        if stop:
            raise Stopped

    with progress, contextlib.suppress(Stopped):
        llm.sft(lm, rows.draw, settings.steps, settings.batch_tokens, settings.lr, settings.optimizer,
                derive_seed(cfg.run.seed, role, "rows"), settings.warmup, settings.prompt_weight,
                micro_tokens=cfg.rl.micro_tokens, state=saved, on_step=on_step, section=role)


def pretrain(cfg: Config, run: Run, interrupt: Interrupt) -> None:
    """Policy and experience model side by side: neither needs the other's weights."""
    roles = [role for role in ("policy", "mexp") if not run.stage_done(role)
             and not (role == "mexp" and ("dream" not in RL_STAGES[cfg.run.method] or cfg.mexp.endpoint))]
    parallel.side_by_side([(train_backbone, (cfg, role, run.folder)) for role in roles], cfg.run.threads,
                          at_once=cfg.run.processes > 1 and len(roles) > 1, stopping=lambda: bool(interrupt))
    if interrupt:
        raise Stopped
    for role in roles:
        run.resume(role)                                       # cuts what a process wrote that was killed just here
        for point in run.checkpoints(role).load(run.checkpoints(role).steps()[-1])["curve"]:
            run.log(role, **point)
        run.mark_done(role)


# ------------------------------------------------------------------------------------------------ evaluation
def evaluate(policy: llm.LM, fmt: formats.PolicyFormat, world: World, tasks: Sequence[Task], temperature: float,
             cfg: Config, seed: int, kept: list[rollouts.Episode] | None = None) -> dict:
    """Real success on a fixed panel of tasks, each played once; the processes share the tasks.  ``kept`` takes the first
    episodes.

    Returns ``success`` (share) with its Wilson ``interval``, ``score``, ``tasks``, ``transitions`` and ``outcomes``:
    task id -> [success, score].
    """
    grammar = world.grammar([])
    used = [0]

    def spend(n: int) -> None:
        used[0] += n

    generator = torch.Generator().manual_seed(derive_seed(seed, "evaluate", parallel.rank()))
    mine, outcomes = parallel.share(tasks), []
    envs = [world.make() for _ in range(min(len(mine), EVAL_ROWS))]
    for start in range(0, len(mine), EVAL_ROWS):
        part = mine[start:start + EVAL_ROWS]
        episodes = rollouts.rollout(policy, rollouts.RealBatch(envs, spend), part, [t.id for t in part], fmt,
                                    grammar.admissible, temperature=temperature, generator=generator,
                                    **limits(cfg, cfg.env.max_steps))
        outcomes += [(e.task.id, e.success, e.score) for e in episodes]
        if kept is not None:
            kept += episodes[:KEPT - len(kept)]
    outcomes = parallel.gather(outcomes)
    won = sum(s for _, s, _ in outcomes)
    return {"success": won / max(1, len(outcomes)), "tasks": len(outcomes),
            "score": sum(s for *_, s in outcomes) / max(1, len(outcomes)),
            "transitions": sum(parallel.gather(used)), "outcomes": {i: [s, g] for i, s, g in outcomes},
            "interval": fidelity.wilson(won, len(outcomes))}


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """``count`` tasks evenly over the list (neighbours share a product), always the same."""
    count = min(count, len(tasks))
    return [tasks[i * len(tasks) // count] for i in range(count)]


def limits(cfg: Config, turns: int) -> dict[str, int]:
    """The limits of a rollout: turns, new tokens of an answer, tokens of a prompt."""
    model = cfg.policy_model
    return {"max_turns": turns, "max_new_tokens": model.max_new_tokens,
            "max_prompt_tokens": model.max_prompt_tokens}


# ------------------------------------------------------------------------------------------------ RL
def train_rl(cfg: Config, stage: str, folder: Path, run: Run | None = None, interrupt: Interrupt | None = None) -> None:
    """Stages ``dream``, ``s2r`` and ``real``: the loop of section 4.3, in the experience model or the real environment.

    Runs in every process alike, each on its share of the groups; only the first one holds ``run``, writes and prints.
    """
    job = RLJob(cfg, stage, folder, run)
    with Progress(stage, job.iterations, start=job.iteration) as progress:
        while not job.finished():
            it, began = job.iteration, time.perf_counter()
            tasks = job.curriculum.sample(job.tasks_per_step())                      # by reward entropy, Eq. 7
            episodes = job.play(tasks, it)                                           # policy and world take turns
            rows, groups = rl.rows_from(episodes, job.rl)                            # advantages, Eq. 3 (or Eq. 2)
            update = rl.update(job.policy, job.reference, job.optimizer, rows, job.rl, job.value,
                               job.generator(it, "mb"), kept=groups["kept"])
            enriched = job.enrich(len(episodes))                                     # dreams join the replay buffer
            everything = parallel.gather([e.light() for e in episodes])
            job.curriculum.record(rl.group_stats(everything), job.graded(everything))
            job.curriculum.grow(job.writer, len(tasks))                              # variations, Eq. 6
            job.iteration += 1
            metrics = rollouts.summary(everything) | groups | update | enriched
            validation, stop = job.validate(), parallel.agree(bool(interrupt))
            if run:
                run.log(stage, job.iteration, **metrics, **validation, **job.curriculum.metrics())
                for alarm in training.alarms(metrics, job.policy.model.config.vocab_size):
                    print(f"warning: {stage} {job.iteration}: {alarm}", file=sys.stderr)
                run.log_times(stage, job.iteration, seconds=time.perf_counter() - began)
                shown = {"success": metrics["success"], "reward": metrics["outcome"], "kl": metrics["ref_k3"]} | validation
                progress.update(1, **{name: value for name, value in shown.items() if value is not None})
                if job.iteration % cfg.rl.save_every == 0 or job.finished() or stop:
                    run.checkpoint(stage, job.iteration, job.state(), score=validation["real_greedy"])
            if stop:
                raise Stopped
    if run and job.dreaming:
        job.buffer.save(folder / f"buffer-{stage}")


class RLJob:
    """Everything that the loop works with, and what of it a checkpoint holds.

    ``dream``: the world is the experience model.  ``real``: the real environment, from the same start (the baseline).
    ``s2r``: the real environment with a budget of transitions, from the dream's policy.
    """

    def __init__(self, cfg: Config, stage: str, folder: Path, run: Run | None):
        self.cfg, self.stage, self.folder, self.run = cfg, stage, folder, run
        self.world = open_world(cfg.env)
        offline = read_transitions(folder / "offline.jsonl")
        self.grammar = training_grammar(self.world, offline)
        self.words = content_words(self.grammar, offline)
        self.dreaming = stage == "dream"
        if self.dreaming:
            self.policy, lm = policy_and_world(cfg, folder, "policy")
        else:
            self.policy = trained_lm(cfg, "policy", folder, "dream" if stage == "s2r" else "policy")
        self.format = formats.PolicyFormat(self.policy, cfg.policy.history)
        self.reference = training.freeze_reference(self.policy) if cfg.rl.kl_in != "none" else None
        self.optimizer = training.make_optimizer(self.policy, cfg.rl)
        self.value = rl.ValueHead(self.policy.model.config.hidden_size, cfg.rl.value_lr,
                                  self.policy.device) if cfg.rl.algorithm == "ppo" else None
        train = self.world.tasks["train"][:cfg.env.train_tasks]
        held_out = [t for split in ("validation", "test") for t in self.world.tasks[split]]
        encoder = make_encoder(cfg.retrieval.encoder)
        self.curriculum = Curriculum(cfg, train, held_out, self.grammar, encoder)
        if stage == "s2r":                                     # goes on where the dream ended
            dreamt = Run.newest(folder, "dream")[1]
            self.curriculum.inherit(dreamt["curriculum"])
            self.optimizer.load_state_dict(dreamt["optimizer"])
            if self.value:
                self.value.restore(dreamt["value"])
        self.validation = spread(self.world.tasks["validation"], cfg.eval.validation_tasks)
        self.iteration, self.used, self.real, self.writer, self.mexp = 0, 0, 0, None, None
        if self.dreaming:
            self.buffer = new_buffer(cfg, self.grammar, self.world, offline)
            self.mexp = new_mexp(cfg, lm, self.grammar, self.buffer)
            self.batch = DreamEnv(self.mexp, cfg.rl_turns, cfg.rl.reward_source)
            if cfg.curriculum.enabled:
                self.writer = TaskWriter(lm, cfg.curriculum.candidates, cfg.mexp_model.max_new_tokens)
        else:
            count = (cfg.s2r if stage == "s2r" else cfg.rl).tasks_per_step * cfg.rl.group_size
            self.batch = rollouts.RealBatch([self.world.make() for _ in range(count)], self.spend)
        self.resume()

    def spend(self, n: int) -> None:
        """Real transitions of this process since the iteration began."""
        self.used += n

    def seed(self, *parts) -> int:
        """Randomness from (seed, stage, iteration, purpose, process) alone: a resumed run needs no stored state."""
        return derive_seed(self.cfg.run.seed, self.stage, *parts, parallel.rank())

    def generator(self, *parts) -> torch.Generator:
        return torch.Generator(self.policy.device).manual_seed(self.seed(*parts))

    @property
    def rl(self) -> config.RLSection:
        """The settings of this iteration: the learning rate falls linearly to a tenth, as in supervised training."""
        if self.stage == "s2r":
            lr, done = self.cfg.s2r.lr, self.real / self.cfg.s2r.transitions
        else:
            lr, done = self.cfg.rl.lr, self.iteration / self.iterations
        return self.cfg.rl.model_copy(update={"lr": lr * (1 - 0.9 * done)})

    @property
    def iterations(self) -> int:
        """How many there will be; in S2R at least."""
        most = self.cfg.s2r.tasks_per_step * self.dearest
        return -(-self.cfg.s2r.transitions // most) if self.stage == "s2r" else self.cfg.rl.iterations

    @property
    def dearest(self) -> int:
        """Transitions of one task's group if every episode runs to its limit."""
        return self.cfg.rl.group_size * self.cfg.rl_turns

    def tasks_per_step(self) -> int:
        """Tasks of the next iteration; in S2R no more than what is left of the budget pays for in the dearest case."""
        if self.stage != "s2r":
            return self.cfg.rl.tasks_per_step
        affordable = (self.cfg.s2r.transitions - self.real) // self.dearest
        n = min(self.cfg.s2r.tasks_per_step, affordable)
        return n - n % self.cfg.run.processes                       # every process plays as many

    def finished(self) -> bool:
        if self.stage != "s2r":
            return self.iteration >= self.cfg.rl.iterations
        return self.tasks_per_step() < self.cfg.s2r_fewest_tasks                # groups too few for an update

    def play(self, tasks: Sequence[Task], iteration: int) -> list[rollouts.Episode]:
        """This process's share of the groups: ``group_size`` episodes of each task, some groups under other names."""
        rng = random.Random(derive_seed(self.cfg.run.seed, self.stage, iteration, "names"))
        names = [random_names(self.words, rng) if rng.random() < self.cfg.rl.rename else {} for _ in tasks]
        mine = [(t, n) for t, n in parallel.share(list(zip(tasks, names))) for _ in range(self.cfg.rl.group_size)]
        if self.mexp:
            self.mexp.forget()
            if self.mexp.generator:
                self.mexp.generator.manual_seed(self.seed(iteration, "mexp"))
            self.batch.begin(f"dream-{iteration}-{parallel.rank()}")
        shown = Renamed(self.batch, [n for _, n in mine])
        return rollouts.rollout(self.policy, shown, shown.tasks([t for t, _ in mine]),
                                [f"{iteration}/{t.id}" for t, _ in mine], self.format,
                                self.grammar.admissible, temperature=self.cfg.rl.temperature,
                                generator=self.generator(iteration, "rollout"),
                                **limits(self.cfg, self.cfg.rl_turns))

    def graded(self, episodes: Sequence[rollouts.Episode]) -> dict | None:
        """Statistics of the graded score for the curriculum, if it is to use them."""
        return graded_stats(episodes) if self.cfg.curriculum.score == "graded" else None

    def enrich(self, episodes: int) -> dict[str, float]:
        """What was dreamed joins the replay buffer, if it passes the filter; real transitions go to the ledger, with the
        number of ``episodes`` that this process played."""
        used, played = map(sum, zip(*parallel.gather([(self.used, episodes)])))
        self.used = 0
        self.real += used
        if not self.dreaming:
            if self.run:
                self.run.ledger.add("s2r" if self.stage == "s2r" else "rl", used, played)
            return {"unparsed": 0.0, "mexp_failed": 0.0, "mexp_trimmed": 0.0, "buffer_dream": 0, "buffer_rejected": 0.0}
        if isinstance(self.mexp.lm, EndpointLM):
            keep_account(self.run, self.mexp.lm.endpoint)
        dreamed = parallel.gather(self.batch.transitions)
        if self.run:
            append_whole(self.folder / "dream.jsonl", "".join(t.to_json() + "\n" for t in dreamed))
        self.remember(dreamed)
        counts, stats = self.mexp.counts, self.buffer.stats()
        total = parallel.gather([[counts[name] for name in ("steps", "unparsed", "failed", "trimmed")]])
        steps, unparsed, failed, trimmed = map(sum, zip(*total))
        self.mexp.counts = dict.fromkeys(counts, 0)
        return {"unparsed": unparsed / max(1, steps), "mexp_failed": failed / max(1, steps),
                "mexp_trimmed": trimmed / max(1, steps), "buffer_dream": stats["dream"],
                "buffer_rejected": stats["rejected_share"]}

    def remember(self, dreamed: Sequence[Transition]) -> None:
        """Dreams of one iteration join the replay buffer; answers without an action were never dreamed."""
        self.buffer.add([t for t in dreamed if t.action != rollouts.INVALID_ACTION])

    def validate(self) -> dict[str, float | None]:
        """Every ``eval_every`` iterations: real success on validation tasks, on the side; nothing learns from it."""
        every = self.cfg.rl.eval_every
        if not every or (self.iteration % every and not self.finished()):
            return {"real_greedy": None, "real_sampled": None}
        out = {}
        for name, temperature in (("real_greedy", 0.0), ("real_sampled", 1.0)):
            result = evaluate(self.policy, self.format, self.world, self.validation, temperature, self.cfg,
                              derive_seed(self.cfg.run.seed, self.stage, self.iteration, name))
            out[name] = result["success"]
            if self.run:
                self.run.ledger.add("validation", result["transitions"], result["tasks"])
        return out

    def state(self) -> dict:
        """All that the next iteration depends on; randomness derives from the iteration's number."""
        dreams = self.folder / "dream.jsonl"
        return {"real": self.real, "weights": self.policy.weights(), "optimizer": self.optimizer.state_dict(),
                "value": self.value.state() if self.value else None, "curriculum": self.curriculum.state(),
                "dream_bytes": dreams.stat().st_size if self.dreaming and dreams.exists() else 0}

    def resume(self) -> None:
        """Continue from the newest checkpoint of this stage, if there is one.  The first process also puts metrics
        and ledger back; the replay buffer is filled again with the dreams of the finished iterations, in their order."""
        if self.run:
            step, state = self.run.resume(self.stage)
        else:
            step, state = Run.newest(self.folder, self.stage)
        if self.dreaming and parallel.rank() == 0:
            cut(self.folder / "dream.jsonl", state["dream_bytes"] if state else 0)
        parallel.agree(False)                                  # nobody reads the file before it is cut
        if not state:
            return
        self.iteration, self.real = step, state["real"]
        self.policy.load_weights(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.value:
            self.value.restore(state["value"])
        self.curriculum.load_state(state["curriculum"])
        if self.dreaming:
            dreams = report.read_lines(self.folder / "dream.jsonl")
            for _, group in itertools.groupby(dreams, key=lambda t: report.iteration([t])):
                self.remember(list(group))


# ------------------------------------------------------------------------------------------------ the whole run
def gate_episodes(cfg: Config) -> dict[str, int]:
    """Real episodes on validation tasks that fidelity rests on, by scripted policy; the curious one if it collects."""
    return {name: int(share * cfg.eval.validation_tasks) for name, share in GATE_EPISODES.items()
            if name != "curious" or cfg.collect.curious}


def measure_fidelity(cfg: Config, run: Run) -> None:
    """Stage ``fidelity``: the experience model on real transitions of validation tasks."""
    world, offline = open_world(cfg.env), read_transitions(run.path("offline.jsonl"))
    grammar = training_grammar(world, offline)
    lm = experience_lm(cfg, run.folder)
    model = new_mexp(cfg, lm, grammar, new_buffer(cfg, grammar, world, offline))
    episodes = gate_episodes(cfg)
    held_out = fidelity.held_out_transitions(world, grammar, "validation", episodes, cfg.run.seed, cfg.env.max_steps)
    run.ledger.add("validation", len(held_out), sum(episodes.values()))
    found = fidelity.teacher_forced(model, held_out)
    for renamed in (None, "unseen") if grammar.open_vocabulary else (None,):
        found |= fidelity.balanced_purchases(model, held_out, GATE_PURCHASES,
                                             random.Random(derive_seed(cfg.run.seed, "gate")), renamed)
    write_whole(run.path("fidelity.json"), json.dumps(found, indent=1) + "\n")
    if isinstance(lm, EndpointLM):
        print(keep_account(run, lm.endpoint))
    else:
        run.export("mexp", lm)
    print(fidelity.table(found))
    run.mark_done("fidelity")


def gate(cfg: Config, run: Run) -> None:
    """A dream that misjudges the end of episodes teaches the wrong thing: refuse it, with an explanation."""
    found = report.read_json(run.path("fidelity.json"), report.Gate)
    bad = []
    for name, limit in (("false_success", cfg.mexp.gate_false_success), ("false_failure", cfg.mexp.gate_false_failure)):
        value, what = found[name]["value"], name.replace("_", "-")
        if value is None and limit < 1:
            bad.append(f"its {what} rate is unknown, no such episode was among the real ones (eval.validation_tasks)")
        elif value is not None and value > limit:
            bad.append(f"{what} rate {value:.1%} is above mexp.gate_{name} = {limit:.1%}")
    if bad:
        raise UserError(f"the experience model judges too badly to learn in: {'; '.join(bad)}. Train it longer "
                        f"(mexp.steps), give it more data (collect.*), or go on all the same with --force")


def final_evaluation(cfg: Config, folder: Path, run: Run | None = None, interrupt: Interrupt | None = None) -> None:
    """Stage ``eval``: every policy of this run on the test tasks, in the real environment alone; resumable.

    Leaves results.json, the policies as other programs load them, and some of their episodes in real.jsonl.
    """
    world = open_world(cfg.env)
    tasks = spread(world.tasks["test"], cfg.eval.tasks)
    labels = {"cloned": "policy", "dream": "dream", "s2r": "s2r", "real": "real"}
    plan = [(label, stage, name, temperature) for label, stage in labels.items() if Run.newest(folder, stage)[1]
            for name, temperature in (("greedy", 0.0), ("sampled", cfg.eval.temperature), ("t1", 1.0))]
    done, state = run.resume("eval") if run else Run.newest(folder, "eval")
    state = state or {"policies": {}, "episodes": []}
    with Progress("eval", len(plan), start=done) as progress:
        for number, (label, stage, name, temperature) in enumerate(plan[done:], done + 1):
            if number == done + 1 or name == "greedy":
                policy = trained_lm(cfg, "policy", folder, stage)
                fmt = formats.PolicyFormat(policy, cfg.policy.history)
            kept: list[rollouts.Episode] = []
            found = evaluate(policy, fmt, world, tasks, temperature, cfg, derive_seed(cfg.run.seed, "test", name), kept)
            if world.kind:
                kinds = {t.id: world.kind(t) for t in tasks}
                found["by_kind"] = {kind: fidelity.share([found["outcomes"][i][0] for i in kinds if kinds[i] == kind])
                                    for kind in dict.fromkeys(kinds.values())}
            state["policies"].setdefault(label, {})[name] = found
            if run:
                run.ledger.add("evaluation", found["transitions"], found["tasks"])
                if name == "greedy":
                    run.export(stage, policy)
                    state["episodes"] += [t.to_json() for t in report.transitions_of(kept, f"eval-{label}")]
                run.checkpoint("eval", number, state)
                progress.update(1, success=found["success"])
            if parallel.agree(bool(interrupt)) and number < len(plan):
                raise Stopped
    if run:
        results = {"policies": state["policies"], "tasks": len(tasks), "rules": world.rules("test")}
        write_whole(run.path("real.jsonl"), "".join(line + "\n" for line in state["episodes"]))
        run.write_results(results)
        print(results_table(results, run))


def run_all(cfg: Config, reason: str, args: argparse.Namespace) -> None:
    """The whole method, or what of it is not done yet."""
    started = time.time()
    if not (Path(cfg.run.out).expanduser() / "config.yaml").exists():
        commands.preflight(cfg)
    with Interrupt() as interrupt, Run.open(cfg, reason, sys.argv, STAGES, restart=args.restart) as run:
        report.read_account(run.folder)                        # refused before anything more is paid for
        print(f"run folder {run.folder}; {reason}")
        print(commands.estimate(cfg))
        torch.set_num_threads(cfg.run.threads)
        if not run.stage_done("collect"):
            run.resume("collect")
            collect(cfg, run, lambda: bool(interrupt))
        pretrain(cfg, run, interrupt)
        if "dream" in RL_STAGES[cfg.run.method]:
            if not run.stage_done("fidelity"):
                run.resume("fidelity")
                measure_fidelity(cfg, run)
            if interrupt:
                raise Stopped
            if not args.force:
                gate(cfg, run)
        for stage in RL_STAGES[cfg.run.method]:
            if not run.stage_done(stage) and (stage != "s2r" or cfg.s2r.transitions):
                parallel.spmd(train_rl, cfg.run.processes, cfg.run.threads, (cfg, stage, run.folder), (run, interrupt))
                run.mark_done(stage)
        if not run.stage_done("eval"):
            parallel.spmd(final_evaluation, cfg.run.processes, cfg.run.threads, (cfg, run.folder), (run, interrupt))
            run.mark_done("eval")
        else:
            print(results_table(report.read_json(run.path("results.json"), report.Results), run))
        print(f"{run.ledger}; {time.time() - started:.0f} s")


def results_table(results: dict, run: Run) -> str:
    """The table that the run ends with: real success on the test tasks, Wilson 95 % intervals, real transitions."""
    ledger = run.ledger.transitions
    spent = {"cloned": ledger["offline"], "dream": ledger["offline"], "real": ledger["offline"] + ledger["rl"],
             "s2r": ledger["offline"] + ledger["s2r"]}

    def cell(share: float, low: float, high: float) -> str:
        return f"{100 * share:.1f} [{100 * low:.0f}, {100 * high:.0f}]".rjust(18)

    names = report.POLICIES
    lines = [f"real success on {results['tasks']} held-out test tasks, % [95 % interval]",
             f"{'':28}{'greedy':>18}{'T = ' + format(run.config.eval.temperature, 'g'):>18}{'T = 1':>18}{'real transitions':>18}"]
    for label, found in results["policies"].items():
        cells = "".join(cell(one["success"], *one["interval"]) for one in found.values())
        lines.append(f"{names[label]:28}{cells}{spent[label]:>18,}")
    lines += [f"{name:28}{100 * rate:>13.1f}" for name, rate in results["rules"].items()]
    kinds = [(names[label], one["by_kind"]) for label, found in results["policies"].items()
             if "by_kind" in (one := found["sampled"])]
    if kinds:
        heads = [f"{kind} ({one['n']})" for kind, one in kinds[0][1].items()]
        lines += ["", f"by task type, T = {run.config.eval.temperature:g}".ljust(28) + "".join(f"{h:>18}" for h in heads)]
    for name, by_kind in kinds:
        cells = "".join(cell(one["value"], one["low"], one["high"]) for one in by_kind.values())
        lines.append(f"{name:28}{cells}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ command line
class Parser(argparse.ArgumentParser):
    """Mistakes on the command line are one line, too."""

    def error(self, message: str):
        raise UserError(f"{message} (see {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="python dreamgym.py", description=__doc__.split("\n\n")[0])
    run = p.add_argument_group("the whole method")
    run.add_argument("--config", metavar="FILE", help="configuration, e.g. configs/webshop.yaml")
    run.add_argument("--profile", metavar="NAME", help="profile of the configuration (default: chosen by hardware)")
    run.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
                     help="override one value, e.g. --set rl.lr=1e-5; repeatable")
    run.add_argument("--method", choices=tuple(RL_STAGES), help="short for --set run.method=..")
    run.add_argument("--from", metavar="STAGE", dest="restart", help=f"repeat from this stage on ({', '.join(STAGES)})")
    run.add_argument("--force", action="store_true", help="go on though the experience model fails its gate")
    run.add_argument("--dry-run", action="store_true", help="build everything, print sizes and the first prompts, stop")
    commands.add_parsers(p.add_subparsers(title="small commands", metavar="COMMAND"))
    return p


def main() -> int:
    args = parser().parse_args()
    if hasattr(args, "run"):
        if sys.argv[1].startswith("-"):                        # argparse would forget it in silence
            raise UserError(f"{sys.argv[1]}: options follow the command, e.g. python dreamgym.py play --config FILE")
        return args.run(args)
    if not args.config:
        raise UserError("no --config; for example: python dreamgym.py --config configs/webshop.yaml")
    overrides = args.overrides + ([f"run.method={args.method}"] if args.method else [])
    cfg, reason = config.load(args.config, args.profile, overrides)
    if args.dry_run:
        print(f"run folder {cfg.run.out}; {reason}\n{commands.estimate(cfg)}", flush=True)
        commands.dry_run(cfg)
        return 0
    try:
        run_all(cfg, reason, args)
    except Stopped:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(config.run_main(main))
