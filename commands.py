"""The small commands around a run, the dry run, and the expected time of a run.

    python dreamgym.py report RUN..            one HTML file: curves, tables, a browser of trajectories
    python dreamgym.py show RUN --episode 3    one trajectory in the terminal
    python dreamgym.py tasks RUN               the task pool of the curriculum
    python dreamgym.py validate FILE           what is wrong with offline data
    python dreamgym.py eval RUN                real success of a checkpoint on the fixed panel
    python dreamgym.py play --config FILE      act yourself, in the real environment or (--dream) in the run's dream

Every command reads finished parts of a run folder and may be used while the run goes on.
"""
from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterable, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import backbones
import buffer
import config
import formats
import llm
import parallel
import report
import rollouts
from buffer import make_encoder, read_transitions
from config import CollectSection, Config, UserError
from curriculum import Curriculum
from endpoint import EndpointLM
from envs import World, open_world
from mexp import DreamEnv, queries_of
from runs import Checkpoints, Run, clock, derive_seed, load_state, write_whole

POLICY_STAGES = ("real", "s2r", "dream", "policy")             # that leave a policy, the last one of a run first


def put(lines: Iterable[str]) -> None:
    """Print; whoever reads may stop early (``| head``)."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())     # or the exit would flush into the pipe


def run_config(folder: Path) -> Config:
    """Configuration of a run whose environment is needed.  Raises UserError where either is missing."""
    cfg, missing = report.run_config(folder)
    if missing:
        raise UserError(missing)
    return cfg


def newest_stage(folder: Path, stages: Sequence[str], wanted: str | None = None) -> str:
    """``wanted``, or the first of ``stages`` with a checkpoint.  Raises UserError where there is none."""
    found = [stage for stage in stages if Checkpoints(folder / "checkpoints" / stage, 1).steps()]
    if wanted in found or (found and wanted is None):
        return wanted or found[0]
    raise UserError(f"{folder}: no checkpoint of stage {wanted or ' or '.join(stages)}"
                    + (f"; it has {', '.join(found)}" if found else " yet"))


def preflight(cfg: Config) -> None:
    """Raises, before a folder is made for the run, what would stop it later: data, packages, models and devices that
    are not there."""
    import dreamgym                                            # here, because dreamgym imports this module
    tasks = open_world(cfg.env).tasks["train"][:cfg.env.train_tasks]
    dreaming, most = "dream" in dreamgym.RL_STAGES[cfg.run.method], max(cfg.rl.tasks_per_step, cfg.s2r.tasks_per_step)
    if dreamgym.RL_STAGES[cfg.run.method] and len(tasks) < most:
        raise UserError(f"env.train_tasks: {len(tasks):,} training tasks are fewer than the {most:,} of an iteration "
                        "(rl.tasks_per_step, s2r.tasks_per_step): raise it, or lower these")
    make_encoder(cfg.retrieval.encoder)
    models = [cfg.policy_model] + ([cfg.mexp_model] if dreaming and not cfg.mexp.endpoint else [])
    if config.is_address(cfg.mexp.endpoint or cfg.mexp.teacher):
        dreamgym.new_server(cfg, cfg.mexp.endpoint or cfg.mexp.teacher)
    elif cfg.mexp.teacher != "rules":
        models.append(dreamgym.teacher_section(cfg))
    for model in models:
        if model.name == "tiny":
            backbones.pick_device(model.device)
        else:
            backbones.open_backbone(model)


# ------------------------------------------------------------------------------------------------ report, show
def report_command(args: argparse.Namespace) -> int:
    if len({os.path.abspath(folder) for folder in args.runs}) < len(args.runs):
        raise UserError("a run is named twice, and would count as two seeds; name each once")
    out = args.out or report.default_out(args.runs)
    print(report.write(args.runs, out))
    return 0


def show_command(args: argparse.Namespace) -> int:
    put([report.episode_text(args.folder, args.episode)])
    return 0


# ------------------------------------------------------------------------------------------------ tasks, validate
def tasks_command(args: argparse.Namespace) -> int:
    """The task pool, highest V first, as the newest checkpoint of the dream (else of real RL) left it."""
    import dreamgym
    cfg = run_config(args.folder)
    step, state = Run.newest(args.folder, newest_stage(args.folder, ("dream", "real")))
    world = open_world(cfg.env)
    grammar = dreamgym.training_grammar(world, read_transitions(args.folder / "offline.jsonl"))
    held_out = [t for split in ("validation", "test") for t in world.tasks[split]]
    pool = Curriculum(cfg, world.tasks["train"][:cfg.env.train_tasks], held_out, grammar,
                      make_encoder(cfg.retrieval.encoder))
    pool.load_state(state["curriculum"])
    rows = pool.table()
    synthetic = sum(row["parent"] is not None for row in rows)
    put(itertools.chain(
        [f"after iteration {step}: {len(rows) - synthetic:,} training tasks and {synthetic:,} synthetic ones; V (Eq. "
         "7) and success are estimates for the policy of now", f"{'task':14} {'parent':14} {'visits':>6} {'V':>6} "
         f"{'success':>7}  text"],
        (report.printable(f"{row['id']:14} {row['parent'] or '-':14} {row['visits']:6} {row['V']:6.3f} "
                          f"{row['success']:7.2f}  {row['text']}") for row in rows)))
    return 0


def validate_command(args: argparse.Namespace) -> int:
    """Raises UserError where something is wrong with the file."""
    report.refuse_no_file(args.file)
    problems = buffer.validate_file(args.file)
    put(report.printable(str(problem)) for problem in problems)
    if problems:
        raise UserError(f"{args.file}: {len(problems):,} problems, the first in line {problems[0].line}")
    transitions = read_transitions(args.file)
    episodes = len({t.episode for t in transitions})
    print(f"{args.file}: {len(transitions):,} transitions in {episodes:,} episodes, all fine")
    return 0


# ------------------------------------------------------------------------------------------------ eval
def read_weights(path: Path) -> dict:
    """The weights of a checkpoint file, or of a folder as transformers or peft write it.  Raises UserError."""
    if not path.is_dir():
        state = load_state(path)["state"]
        if not isinstance(state, dict) or "weights" not in state:
            raise UserError(f"{path}: holds no weights of a model")
        return state["weights"]
    files = [path / name for name in ("adapter_model.safetensors", "model.safetensors") if (path / name).is_file()]
    if not files:
        raise UserError(f"{path}: holds neither adapter_model.safetensors nor model.safetensors")
    try:
        return load_file(files[0])
    except (SafetensorError, OSError) as error:
        raise UserError(f"{files[0]}: damaged: {error}") from None


def load_checkpoint(policy: llm.LM, path: Path, folder: Path) -> None:
    """Gives the policy of a run the weights of a checkpoint file or an exported folder.  Raises UserError."""
    try:
        policy.load_weights(read_weights(path))
    except ValueError:
        raise UserError(f"{path}: its weights do not fit the policy_model of {folder}") from None


def chosen_policy(folder: Path, stage: str | None, checkpoint: Path | None, option: str) -> tuple[str, str, dict]:
    """The policy that ``option`` (a stage, by default the newest) or --checkpoint names.

    Returns its name within a file's name, words for it, and its origin for the file: stage and step, or checkpoint.
    Raises UserError where both are given or the stage has no checkpoint.
    """
    if checkpoint is None:
        stage = newest_stage(folder, POLICY_STAGES, stage)
        step = Checkpoints(folder / "checkpoints" / stage, 1).steps()[-1]
        return stage, f"policy of stage {stage}, step {step},", {"stage": stage, "step": step}
    if stage is not None:
        raise UserError(f"{option} and --checkpoint name two policies; give one of them")
    place = checkpoint.resolve()
    return f"{place.parent.name}-{place.stem}", f"policy {checkpoint}", {"checkpoint": str(checkpoint)}


def policy_temperature(cfg: Config, asked: float | None) -> float:
    """What --temperature asks for, by default eval.temperature.  Raises UserError where it is none."""
    temperature = cfg.eval.temperature if asked is None else asked
    if not 0 <= temperature <= 5:
        raise UserError(f"--temperature {temperature:g}: must lie between 0 and 5")
    return temperature


def measure(cfg: Config, folder: Path, stage: str | None, split: str, temperature: float,
            weights: Path | None = None) -> dict:
    """Greedy and sampled success on the panel of a split, of a stage's policy or of these weights; the same in every
    process."""
    import dreamgym
    world = open_world(cfg.env)
    tasks = dreamgym.spread(world.tasks[split], cfg.eval.tasks if split == "test" else cfg.eval.validation_tasks)
    if weights is None:
        policy = dreamgym.trained_lm(cfg, "policy", folder, stage)
    else:
        policy = dreamgym.new_lm(cfg, "policy", folder)
        load_checkpoint(policy, weights, folder)
    fmt = formats.PolicyFormat(policy, cfg.policy.history)
    found: dict = {}
    for name, t in (("greedy", 0.0), ("sampled", temperature)):
        one = dreamgym.evaluate(policy, fmt, world, tasks, t, cfg, derive_seed(cfg.run.seed, split, name))
        found[name] = one | {"temperature": t}
    return found


def eval_command(args: argparse.Namespace) -> int:
    cfg = run_config(args.folder)
    name, what, origin = chosen_policy(args.folder, args.stage, args.checkpoint, "--stage")
    temperature = policy_temperature(cfg, args.temperature)
    if args.split == "validation" and not cfg.eval.validation_tasks:
        raise UserError("--split validation: the run has eval.validation_tasks = 0")
    torch.set_num_threads(cfg.run.threads)
    found = parallel.spmd(measure, cfg.run.processes, cfg.run.threads,
                          (cfg, args.folder, origin.get("stage"), args.split, temperature, args.checkpoint))
    path = args.folder / f"eval-{name}-{args.split}-T{temperature:g}.json"
    tasks, spent = found["greedy"]["tasks"], sum(one["transitions"] for one in found.values())
    print(f"{what} on {tasks} {args.split} tasks of the real environment")
    for name, one in found.items():
        low, high = one["interval"]
        print(f"  {name + ', T = ' + format(one['temperature'], 'g'):20} {one['success']:6.1%}  "
              f"95 % interval [{low:.1%}, {high:.1%}]  mean score {one['score']:.3f}")
    write_whole(path, json.dumps(origin | {"split": args.split} | found, indent=1) + "\n")     # told before, disk or not
    print(f"per task: {path}; {spent:,} real transitions (evaluation)")
    return 0


# ------------------------------------------------------------------------------------------------ play
def dream_world(cfg: Config, folder: Path, world: World, lm: llm.LM | EndpointLM | None = None) -> DreamEnv:
    """The experience model of a run (``lm`` where it is loaded already) with the replay buffer that its dream left."""
    import dreamgym
    if lm is None and not cfg.mexp.endpoint:
        newest_stage(folder, ("mexp",))
    offline = read_transitions(folder / "offline.jsonl")
    grammar = dreamgym.training_grammar(world, offline)
    memory = dreamgym.last_buffer(cfg, folder, grammar, world, offline)
    model = dreamgym.new_mexp(cfg, lm or dreamgym.experience_lm(cfg, folder), grammar, memory)
    return DreamEnv(model, cfg.env.max_steps, cfg.rl.reward_source)


def played(args: argparse.Namespace) -> tuple[Config, Path | None]:
    """(configuration, run folder whose dream is played in or None for the real environment) that ``play`` is asked for.

    Raises UserError where nothing is named, or two configurations: nothing that was typed is ignored.
    """
    if isinstance(args.dream, Path):
        if args.config or args.profile or args.overrides:
            raise UserError(f"play: the run {args.dream} has its own configuration; leave --config, --profile and "
                            f"--set away, or the folder behind --dream")
        return run_config(args.dream), args.dream
    if not args.config:
        raise UserError("play: name the environment with --config FILE, or a run with --dream RUN")
    cfg, _ = config.load(args.config, args.profile, args.overrides)
    if not args.dream:
        return cfg, None
    folder = Path(cfg.run.out).expanduser()
    if differences := config.describe_differences(run_config(folder), cfg):
        raise UserError(f"play: {folder} holds a run of another configuration: {'; '.join(differences[:5])} (there -> "
                        f"here); play in that run with --dream {folder} alone")
    return cfg, folder


def play_command(args: argparse.Namespace) -> int:
    """A person acts: a number takes one of the listed actions, anything else is the action itself."""
    cfg, folder = played(args)
    world = open_world(cfg.env)
    tasks = {t.id: t for split in ("train", "validation", "test") for t in world.tasks[split]}
    if args.task is not None and args.task not in tasks:
        raise UserError(f"--task {args.task}: no such task; for example {next(iter(tasks))}")
    task = tasks[args.task] if args.task else random.choice(world.tasks["train"])
    batch = dream_world(cfg, folder, world) if folder else rollouts.RealBatch([world.make()], lambda n: None)
    grammar = batch.grammar if folder else world.grammar([])
    say = report.printable
    print(f"{'a dream of ' + str(folder) if folder else 'the real environment'}; an empty line ends it\n"
          f"task {say(task.id)}: {say(task.text)}")
    [state] = batch.reset([task])
    while True:
        choices = grammar.admissible(state)
        print(f"\n{say(state)}\n" + "  ".join(f"{i}: {say(a)}" for i, a in enumerate(choices, 1)))
        try:
            line = input("> ").strip()
        except EOFError:
            line = ""
        if not line:
            return 0
        picked = int(line) if line.isdecimal() and len(line) < 9 else 0
        action = choices[picked - 1] if 1 <= picked <= len(choices) else line
        if action in choices and "<" in action:                # a template
            print(f"type it out: {say(action)}")
            continue
        [(state, reward, done, over, info)] = batch.step([0], [action])
        if folder and batch.transitions[-1].reasoning:
            print(f"reasoning: {say(batch.transitions[-1].reasoning)}")
        if info["invalid"]:
            print("nothing happened")
        if done or over:
            print(f"\n{say(state)}\n{'success' if info['success'] else 'no success'}"
                  f"{'' if done else ', the limit of steps is reached'}; reward {reward:g}, score {info['score']:.2f}")
            return 0


# ------------------------------------------------------------------------------------------------ dry run
SAMPLE = 4                     # episodes of each scripted policy that a dry run plays


def dry_run(cfg: Config) -> None:
    """Build everything in a temporary folder, print sizes and the first prompt of both models.  Nothing is trained.

    Raises what the run itself would raise: missing weights, too little memory, an environment that cannot be opened.
    """
    import dreamgym
    dreaming = "dream" in dreamgym.RL_STAGES[cfg.run.method]
    episodes, turns = cfg.rl.tasks_per_step * cfg.rl.group_size, cfg.rl_turns
    world = open_world(cfg.env)
    counts = dict(cfg.collect)
    print(f"{cfg.env.name}: {', '.join(f'{len(tasks):,} {split} tasks' for split, tasks in world.tasks.items())}\n"
          f"offline data: {sum(counts.values()):,} episodes "
          f"({', '.join(f'{n:,} {name}' for name, n in counts.items())})\n"
          f"supervised training: policy {cfg.policy.steps:,} x {cfg.policy.batch_tokens:,} tokens"
          + (f", experience model {cfg.mexp.steps:,} x {cfg.mexp.batch_tokens:,} tokens"
             if dreaming and not cfg.mexp.endpoint else "") +
          f"\nRL: {cfg.rl.iterations:,} iterations of {cfg.rl.tasks_per_step:,} tasks x {cfg.rl.group_size:,} = "
          f"{episodes:,} episodes of at most {turns:,} turns, {cfg.rl.minibatches:,} optimizer steps each; "
          f"{episodes // cfg.rl.minibatches:,} episodes a step, on {cfg.run.processes} process(es)")
    with tempfile.TemporaryDirectory() as temporary:
        few = CollectSection(**{name: min(n, SAMPLE) for name, n in counts.items()})
        taught = cfg.mexp.model_copy(update={"teacher": "rules"})              # nothing is paid for a dry run
        small = cfg.model_copy(update={"collect": few, "mexp": taught, "run": cfg.run.model_copy(update={"out": temporary,
                                                                                       "tracker": "none"})})
        with Run.open(small, "dry run", [], dreamgym.STAGES) as run:
            dreamgym.collect(small, run)
            _dry_models(cfg, run.folder, world, dreaming, episodes)


def _dry_models(cfg: Config, folder: Path, world: World, dreaming: bool, episodes: int) -> None:
    import dreamgym
    sample = read_transitions(folder / "offline.jsonl")
    grammar = dreamgym.training_grammar(world, sample)
    policy = dreamgym.new_lm(cfg, "policy", folder)
    fmt = formats.PolicyFormat(policy, cfg.policy.history)
    prompts = [fmt.prompt(t.task, t.history, t.state, grammar.admissible(t.state)) for t in sample]
    per_episode = len(sample) / len({t.episode for t in sample})
    _dry_model("policy", policy, cfg.policy_model, cfg, episodes)
    _dry_tokens(prompts, cfg.policy_model, episodes, per_episode, cfg.env.max_steps)
    print(f"first prompt of the policy:\n{report.printable(policy.decode(prompts[0]))}")
    if not dreaming:
        return
    if cfg.mexp.endpoint:
        print(f"\nexperience model: {dreamgym.new_server(cfg, cfg.mexp.endpoint).model} at {cfg.mexp.endpoint}")
        return
    lm = dreamgym.new_lm(cfg, "mexp", folder)
    codec = dreamgym.new_codec(cfg, grammar, dreamgym.new_buffer(cfg, grammar, world, sample))
    queries = queries_of(sample)
    texts = [codec.prompt(q, demos) for q, demos in zip(queries, codec.retrieve(queries))]
    prompts = [lm.prompt(formats.MEXP_SYSTEM, text) for text in texts]
    _dry_model("experience model", lm, cfg.mexp_model, cfg, episodes)
    _dry_tokens(prompts, cfg.mexp_model, episodes, per_episode, cfg.env.max_steps)
    print(f"first prompt of the experience model:\n{report.printable(lm.decode(prompts[0]))}")


def _dry_model(role: str, lm, model_cfg, cfg: Config, episodes: int) -> None:
    parts = backbones.memory_estimate(model_cfg, lm.causal_lm().config, max(1, episodes // cfg.run.processes),
                                      cfg.rl.micro_tokens)
    trained = sum(w.numel() for w in lm.weights().values())
    every = sum(p.numel() for p in lm.model.parameters())
    print(f"\n{role}: {lm.name} on {lm.device}, {every:,} parameters, {trained:,} of them trained; memory "
          f"of a process {sum(parts.values()) / 2**20:,.0f} MiB: "
          + ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in parts.items()))


def _dry_tokens(prompts: list[list[int]], model_cfg, episodes: int, per_episode: float, max_steps: int) -> None:
    mean = sum(map(len, prompts)) / len(prompts)
    longest = model_cfg.max_prompt_tokens + model_cfg.max_new_tokens
    print(f"tokens of an RL iteration: about {episodes * per_episode * mean:,.0f} of prompts ({episodes:,} episodes x "
          f"{per_episode:.1f} turns x {mean:.0f} tokens, from scripted episodes), at most "
          f"{episodes * max_steps * longest:,} with answers (every turn {model_cfg.max_prompt_tokens:,} + "
          f"{model_cfg.max_new_tokens:,})")
    if max(map(len, prompts)) > model_cfg.max_prompt_tokens:
        print(f"warning: a prompt has {max(map(len, prompts)):,} tokens, more than max_prompt_tokens = "
              f"{model_cfg.max_prompt_tokens:,}")


# ------------------------------------------------------------------------------------------------ expected time
# Seconds in each of two processes side by side on a machine of speed REFERENCE, with the default tiny backbone.
REFERENCE = 120e9              # floating point operations a second of a process, see ``speed``
START = 10.0                   # processes that import torch and open the environment
SCRIPTED = 0.0017              # a scripted episode
STEP, PARAMETER, TOKENS = 0.03, 2.5e-8, 0.08                   # of a supervised step: fixed, a parameter, 1,024 tokens
JUDGED = 0.004                 # one prediction of the experience model in a large batch
TURN = 0.017                   # a turn of RL with its share of the update
GROWTH = 1.5                   # writing tasks, an iteration
EVALUATED = 0.0075             # a turn of an evaluation
TURNS = {"webshop": 6, "alfworld": 17}                         # of a usual episode
LONGER = {"webshop": 1.0, "alfworld": 2.7}                     # its texts, in the time that a turn takes


def speed(processes: int) -> float:
    """Floating point operations a second of one of ``processes`` side by side: small products for half a second."""
    a, b = torch.randn(1024, 128), torch.randn(128, 384)
    end = time.perf_counter() + 0.5

    def best(_: int) -> float:
        torch.set_num_threads(1)
        fastest, count = float("inf"), 0
        while count < 50 or time.perf_counter() < end:
            start, count = time.perf_counter(), count + 1
            a @ b
            fastest = min(fastest, time.perf_counter() - start)
        return 2 * 1024 * 128 * 384 / fastest

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(processes) as pool:
        found = list(pool.map(best, range(processes)))
    torch.set_num_threads(threads)
    return sum(found) / processes


def expected(cfg: Config) -> dict[str, float] | None:
    """Seconds by part at REFERENCE speed; None for backbones that were not measured."""
    import dreamgym
    if cfg.policy_model.name != "tiny" or cfg.mexp_model.name != "tiny" or cfg.mexp.endpoint or (
            cfg.mexp.teacher != "rules"):
        return None
    stages, processes = dreamgym.RL_STAGES[cfg.run.method], cfg.run.processes

    def weight(model) -> float:                                # of a token, against the default model
        return model.tiny.layers * (15 + 0.1 * model.tiny.width) / (4 * (15 + 0.1 * 128))

    def supervised(sft, model) -> float:
        tiny = model.tiny
        parameters = tiny.layers * (4 * tiny.width ** 2 + 3 * tiny.width * tiny.mlp) + tiny.vocab * tiny.width
        return sft.steps * (STEP + PARAMETER * parameters + TOKENS * weight(model) * sft.batch_tokens / 1024)

    training = [supervised(cfg.policy, cfg.policy_model)]
    training += [supervised(cfg.mexp, cfg.mexp_model)] if "dream" in stages else []
    longer, turns = LONGER[cfg.env.name], min(TURNS[cfg.env.name], cfg.env.max_steps)
    policy, mexp = longer * weight(cfg.policy_model), longer * weight(cfg.mexp_model)
    parts = {"offline data": SCRIPTED * sum(dict(cfg.collect).values()),
             "supervised training": START + (max(training) if processes > 1 else sum(training))}
    if "dream" in stages:
        cases = turns * sum(dreamgym.gate_episodes(cfg).values()) + 2 * dreamgym.GATE_PURCHASES
        parts["fidelity"] = JUDGED * mexp * cases
    panel = EVALUATED * policy * turns / processes             # a task
    for stage in stages:
        episodes = (cfg.s2r.tasks_per_step if stage == "s2r" else cfg.rl.tasks_per_step) * cfg.rl.group_size
        iterations = cfg.rl.iterations
        if stage == "s2r":                                     # while the fewest tasks fit the budget at their longest
            longest = cfg.s2r_fewest_tasks * cfg.rl.group_size * cfg.rl_turns
            iterations = max(0, (cfg.s2r.transitions - longest) // (episodes * turns) + 1)
        if not iterations:
            continue
        one = TURN * turns * episodes / processes * ((policy + mexp) / 2 if stage == "dream" else policy)
        if stage == "dream" and cfg.curriculum.enabled:
            one += GROWTH * mexp * cfg.curriculum.lambda_syn * cfg.rl.tasks_per_step / 4
        validations = -(-iterations // cfg.rl.eval_every) if cfg.rl.eval_every else 0
        name = {"dream": "RL in the dream", "s2r": "sim-to-real", "real": "RL in the real environment"}[stage]
        parts[name] = START + iterations * one + 2 * validations * panel * cfg.eval.validation_tasks
    parts["evaluation"] = START + 3 * (1 + len(stages)) * panel * cfg.eval.tasks
    return parts


def estimate(cfg: Config) -> str:
    """The expected time of a whole run, for its start; half a second of calibration."""
    parts = expected(cfg)
    if parts is None:
        return "expected time: only known for the tiny models without servers; the progress lines tell after the first steps"
    slower = REFERENCE / speed(cfg.run.processes)
    parts = {name: seconds * slower for name, seconds in parts.items()}
    total = sum(parts.values())
    return (f"expected time: about {clock(total)} on an idle machine ("
            + ", ".join(f"{name} {clock(seconds)}" for name, seconds in parts.items()) + ")")


# ------------------------------------------------------------------------------------------------ command line
def add_parsers(subparsers) -> None:
    """One parser for each command; ``args.run(args)`` returns the exit code."""
    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        p = subparsers.add_parser(name, help=text, description=text)
        p.set_defaults(run=run)
        return p

    p = command("report", report_command, "write one HTML file about one or several runs")
    p.add_argument("runs", type=Path, nargs="+", metavar="RUN",
                   help="run folder; runs that differ in their seed are one curve")
    p.add_argument("--out", type=Path, metavar="FILE", help="default: report.html, in the folder of a single run")
    p = command("show", show_command, "print one trajectory, dreamed beside real")
    p.add_argument("folder", type=Path, metavar="RUN")
    p.add_argument("--episode", default="1", metavar="N", help="number of a dreamed episode (-1: the last), or any id")
    p = command("tasks", tasks_command, "list the tasks of the curriculum, highest V first")
    p.add_argument("folder", type=Path, metavar="RUN")
    p = command("validate", validate_command, "check a file of offline data line by line")
    p.add_argument("file", type=Path, metavar="FILE")
    p = command("eval", eval_command, "real success of a run's policy on its fixed panel of tasks")
    p.add_argument("folder", type=Path, metavar="RUN")
    p.add_argument("--stage", choices=POLICY_STAGES[::-1], help="default: the newest that the run has")
    p.add_argument("--checkpoint", type=Path, metavar="PATH",
                   help="a checkpoint file, or a folder that transformers or peft wrote")
    p.add_argument("--split", choices=("test", "validation"), default="test")
    p.add_argument("--temperature", type=float, metavar="T", help="of the sampled pass (default: eval.temperature)")
    p = command("play", play_command, "act yourself, in the real environment or in a dream")
    p.add_argument("--config", metavar="FILE", help="configuration of the environment")
    p.add_argument("--profile", metavar="NAME")
    p.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides")
    p.add_argument("--dream", type=Path, nargs="?", const=True, metavar="RUN",
                   help="in the experience model of this run (without RUN: of the run folder of --config)")
    p.add_argument("--task", metavar="ID", help="default: a random training task")
