"""Fidelity of an experience model, measured against the real environment (definitions: paper section numbers below).

    python fidelity.py runs/webshop-cpu-s0                      along the policy of the newest stage, on test tasks
    python fidelity.py runs/webshop-cpu-s0 --after policy --split validation --tasks 50
    python fidelity.py runs/webshop-cpu-s0 --checkpoint FILE    along the policy of a checkpoint or an exported folder

Four questions, each with its own function; ``measure`` asks them all and ``table`` prints the answers:

1. ``teacher_forced``      Given a real state and action of a held-out task, does it predict the real next state?
2. ``balanced_purchases``  Does it tell success from failure on real final steps, as many of the one as of the other?
3. ``imagined``            Do action lists that succeed in the dream succeed in the real environment (WM2Real)?
4. ``on_policy_errors``    How wrong is it where the policy really goes, and what does theory make of that?

The last one is the finite-horizon form of the simulation lemma (return in [0, 1], at most H steps, no discount):

    |J_M(pi) - J_Mhat(pi)|  <=  sum_{t<H} E_{(s,a) ~ d_t^{pi,M}} [ |R - Rhat|(s,a) + TV(P, Phat)(s,a) ]

where, in a deterministic environment, TV(P, Phat)(s,a) = 1 - Phat(s'_real | s,a): the probability of a wrong next
state.  The expectation is over the policy's own real rollouts, so both sides can be measured.

Every real transition that a measurement makes is counted.  The run's own stage ``fidelity`` puts its transitions into
the ledger; the command above, which may be used beside the run and after it, writes its count into its own file and
the ledger stays as it is.  Nothing measured here ever enters the replay buffer, and the buffer returns nothing of
held-out tasks (``ReplayBuffer.banned_tasks``).
"""
from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Callable, Hashable, Sequence

import numpy as np
import torch

import config
import formats
import llm
import rollouts
from buffer import Transition
from config import UserError
from envs import Env, Grammar, Task, World, open_world
from mexp import (DreamEnv, ExperienceModel, Prediction, Query, action_kind, content_words, invented_words, queries_of,
                  rename)
from runs import Progress, derive_seed, write_whole

Z = 1.959964                    # two-sided 95 %
BATCH = 256                     # predictions, episodes side by side
RARE = 0.01                     # kinds of action below this share of the steps are counted together


# ------------------------------------------------------------------------------------------------ intervals
def wilson(successes: float, n: float) -> tuple[float, float]:
    """95 % score interval of a share (Wilson 1927); (0, 1) where nothing was observed."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def share(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> dict[str, float | None]:
    """Mean of values in [0, 1] with its 95 % interval: ``value`` (None for no values), ``low``, ``high``, ``n``.

    ``clusters`` names the episode of each value.  Steps of one episode go wrong together; the interval is that of
    n / deff independent values, where the design effect deff >= 1 compares the variance between episodes with the
    one that independent values would have (Kish 1965).
    """
    x = np.asarray(values, float)
    n = len(x)
    if n == 0:
        return {"value": None, "low": 0.0, "high": 1.0, "n": 0}
    p, deff = float(x.mean()), 1.0
    if clusters is not None and x.var() > 0:
        _, number = np.unique(np.asarray(clusters, str), return_inverse=True)
        residuals = np.bincount(number, weights=x - p)         # sum of the deviations of each episode
        deff = max(1.0, float((residuals ** 2).sum() / ((x - p) ** 2).sum()))
    low, high = wilson(p * n / deff, n / deff)
    return {"value": p, "low": low, "high": high, "n": n}


def paired(statistic: Callable[[float, float], float], first: Sequence[bool], second: Sequence[bool], seed: int = 0,
           draws: int = 2000) -> dict[str, float | None]:
    """``statistic(share of first, share of second)`` of two outcomes per task, with a 95 % bootstrap interval.

    Tasks are resampled from the 2 x 2 table with half a task added to each cell (Agresti and Min 2005): that no task
    of a hundred differed does not mean that none ever will.  Resamples on which the statistic is NaN are left out; the
    value is None where it is NaN itself.
    """
    x, y = np.asarray(first, bool), np.asarray(second, bool)
    n = len(x)
    if n == 0:
        return {"value": None, "low": None, "high": None, "n": 0}
    cells = np.bincount(2 * x + y, minlength=4)                # (0, 0), (0, 1), (1, 0), (1, 1)
    drawn = np.random.default_rng(seed).multinomial(n, (cells + 0.5) / (n + 2), draws) / n
    found = [statistic(c[2] + c[3], c[1] + c[3]) for c in drawn.tolist()]
    low, high = np.percentile([f for f in found if not math.isnan(f)], [2.5, 97.5]).tolist()
    value = statistic(float(x.mean()), float(y.mean()))
    return {"value": None if math.isnan(value) else value, "low": low, "high": high, "n": n}


def bootstrap_mean(values: Sequence[float], seed: int = 0, draws: int = 2000) -> dict[str, float | None]:
    """Mean of one number per episode with the 2.5 and 97.5 percentiles over resampled episodes."""
    x = np.asarray(values, float)
    if len(x) == 0:
        return {"value": None, "low": None, "high": None, "n": 0}
    means = x[np.random.default_rng(seed).integers(0, len(x), (draws, len(x)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5]).tolist()
    return {"value": float(x.mean()), "low": low, "high": high, "n": len(x)}


def ratio(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan


# ------------------------------------------------------------------------------------------------ real transitions
def play_scripted(env: Env, task: Task, policy: Callable, grammar: Grammar, episode: str,
                  rng: random.Random) -> list[Transition]:
    """One real episode of a scripted policy (``World.scripted``) as offline data, with the trace R* of teacher
    ``rules``."""
    state, over, transitions = env.reset(task), False, []
    history: list[str] = []
    while not over:
        action = policy(task.text, state, history, rng)
        after, reward, terminated, truncated, info = env.step(action)
        transitions.append(Transition(state, action, after, reward, terminated, info["success"], task.id, task.text,
                                      episode, len(history), "real", list(history),
                                      grammar.explain(task.text, state, action, after)))
        history.append(action)
        state, over = after, terminated or truncated
    return transitions


def held_out_transitions(world: World, grammar: Grammar, split: str, episodes_by_policy: dict[str, int],
                         seed: int, max_steps: int) -> list[Transition]:
    """Real transitions on tasks of ``split`` (drawn with replacement) by scripted policies, name -> episodes; of each
    episode the first ``max_steps`` at most."""
    rng, env = random.Random(f"held out/{split}/{seed}"), world.make()
    transitions: list[Transition] = []
    for name, count in episodes_by_policy.items():
        policy = world.scripted(name)
        for number in range(count):
            task = rng.choice(world.tasks[split])
            transitions += play_scripted(env, task, policy, grammar, f"{split}-{name}-{number:06d}", rng)[:max_steps]
    return transitions


def predictions(model: ExperienceModel, queries: Sequence[Query]) -> list[Prediction | None]:
    out: list[Prediction | None] = []
    with Progress("fidelity", len(queries)) as progress:
        for start in range(0, len(queries), BATCH):
            out += model.predict(queries[start:start + BATCH])
            progress.update(len(out) - start)
    return out


# ------------------------------------------------------------------------------------------------ 1: single steps
def page_fields(grammar: Grammar, state: str) -> dict[str, Hashable]:
    """What a state says, by field: single values, and sets of parts (from collections, maps and options)."""
    page = grammar.parse(state)
    fields: dict[str, Hashable] = {"kind": grammar.kind(state), "clickable": frozenset(grammar.admissible(state))}
    for field in dataclasses.fields(page):
        value = getattr(page, field.name)
        if field.name == "options":
            fields["options"] = frozenset((o.name, v) for o in value for v in o.values)
            fields["chosen"] = frozenset((o.name, o.chosen) for o in value if o.chosen is not None)
        elif isinstance(value, dict):
            fields[field.name] = frozenset((k, part) for k, v in value.items()
                                           for part in (v if isinstance(v, (set, frozenset, tuple)) else [v]))
        elif isinstance(value, (tuple, set, frozenset)):
            fields[field.name] = frozenset(value)
        else:
            fields.setdefault(field.name, value)
    return fields


def field_scores(grammar: Grammar, real: str, predicted: str | None) -> dict[str, float]:
    """Per field that either page fills: 1 or 0 for a single value, share of common parts (Jaccard) for a set."""
    truth = page_fields(grammar, real)
    guess = page_fields(grammar, predicted) if predicted is not None else {}
    scores = {}
    for name, true in truth.items():
        said = guess.get(name, frozenset() if isinstance(true, frozenset) else None)
        if not true and not said:
            continue
        if isinstance(true, frozenset):
            scores[name] = len(true & said) / len(true | said)
        else:
            scores[name] = float(true == said)
    return scores


def action_kinds(grammar: Grammar, transitions: Sequence[Transition]) -> list[str]:
    """``mexp.action_kind`` of each step; the rare ones together."""
    found = [action_kind(grammar, t.state, t.action) for t in transitions]
    count = Counter(found)
    return [kind if count[kind] >= RARE * len(found) else "other actions" for kind in found]


def teacher_forced(model: ExperienceModel, transitions: Sequence[Transition]) -> dict:
    """Single-step fidelity on real transitions, whole episodes in order (section 11.1 and 11.2).

    ``exact``: next state equal to the real one (rendering has normalised both); ``by_move``: the same by (page kind ->
    page kind), ``by_action``: by ``action_kinds``; ``exact_known``: over the steps that show nothing hidden, where the
    grammar knows of such (``reveals``); ``fields``: see ``field_scores``; ``done``: accuracy of the flag;
    ``done_precision``, ``done_recall``, ``success_precision`` and ``success_recall`` over single steps; ``unparsed``:
    share of the steps for which no well-formed text came, which count as wrong everywhere and declare nothing.
    """
    grammar = model.codec.grammar
    found = predictions(model, queries_of(transitions))
    episodes = [t.episode for t in transitions]
    exact = [p is not None and p.next_state == t.next_state for p, t in zip(found, transitions)]
    moves = [f"{grammar.kind(t.state)} -> {grammar.kind(t.next_state)}" for t in transitions]
    fields: dict[str, list[tuple[float, str]]] = {}
    for p, t in zip(found, transitions):
        for name, score in field_scores(grammar, t.next_state, p.next_state if p else None).items():
            fields.setdefault(name, []).append((score, t.episode))
    ended, declared = [p is not None and p.done for p in found], [p is not None and p.success for p in found]

    def by(kinds: Sequence[str]) -> dict[str, dict]:
        """Exact next states by kind, the most frequent kind first."""
        rows = {kind: [i for i, one in enumerate(kinds) if one == kind] for kind, _ in Counter(kinds).most_common()}
        return {kind: share([exact[i] for i in own], [episodes[i] for i in own]) for kind, own in rows.items()}

    reveals = getattr(grammar, "reveals", lambda state, action: False)
    known = [i for i, t in enumerate(transitions) if not reveals(t.state, t.action)]
    knowable = {"exact_known": share([exact[i] for i in known], [episodes[i] for i in known])}
    return (knowable if len(known) < len(exact) else {}) | {
        "exact": share(exact, episodes), "by_move": by(moves), "by_action": by(action_kinds(grammar, transitions)),
        "fields": {name: share(*zip(*scores)) for name, scores in fields.items()},
        "done": share([p is not None and p.done == t.done for p, t in zip(found, transitions)], episodes),
        "done_precision": share([t.done for t, said in zip(transitions, ended) if said]),
        "done_recall": share([said for t, said in zip(transitions, ended) if t.done]),
        "success_precision": share([t.success for t, said in zip(transitions, declared) if said]),
        "success_recall": share([said for t, said in zip(transitions, declared) if t.success]),
        "unparsed": share([p is None for p in found], episodes)}


# ------------------------------------------------------------------------------------------------ 2: the judge
def rename_query(q: Query, names: dict[str, str]) -> Query:
    return dataclasses.replace(q, task=rename(q.task, names), history=[rename(a, names) for a in q.history],
                               past=[rename(s, names) for s in q.past], state=rename(q.state, names),
                               action=rename(q.action, names))


def balanced_purchases(model: ExperienceModel, transitions: Sequence[Transition], n: int, rng: random.Random,
                       renamed: str | None = None) -> dict:
    """Does it judge final steps right?  On ``n`` real successes and ``n`` real failures, or as many as there are.

    ``false_success``: share of the failures that it declares successful; ``false_failure``: share of the successes
    that it does not.  Balanced, because on steps as they come a judge that always says no looks good.  A failure is a
    final step without success, or a step that may decide (``Grammar.decides``) and did not.  ``renamed`` = ``"unseen"``:
    all content words replaced by invented words that no training text holds, the same for the same word; the names of
    the results then begin with ``unseen_``.
    """
    grammar = model.codec.grammar
    steps = [(q, t) for q, t in zip(queries_of(transitions), transitions)
             if t.done or grammar.decides(t.state, t.action)]
    won, lost = [s for s in steps if s[1].success], [s for s in steps if not s[1].success]
    chosen = rng.sample(won, min(n, len(won))) + rng.sample(lost, min(n, len(lost)))
    queries = [q for q, _ in chosen]
    if renamed:
        words = content_words(grammar, transitions)
        names = dict(zip(words, unseen_words(len(words), model.codec.buffer.rows())))
        queries = [rename_query(q, names) for q in queries]
    said = [p is not None and p.success for p in predictions(model, queries)]
    prefix = f"{renamed}_" if renamed else ""
    return {f"{prefix}false_success": share([s for s, (_, t) in zip(said, chosen) if not t.success]),
            f"{prefix}false_failure": share([not s for s, (_, t) in zip(said, chosen) if t.success])}


def unseen_words(count: int, known: Sequence[Transition]) -> list[str]:
    """Distinct invented words, always the same, none of which the texts of ``known`` contain."""
    taken = {w for t in known for text in (t.task, t.state, t.next_state) for w in text.split(" ")}
    return invented_words(count, random.Random("unseen"), True, taken)


# ------------------------------------------------------------------------------------------------ 3: whole episodes
def episodes_in(make_batch: Callable[[int], rollouts.Batch], policy: llm.LM, fmt: rollouts.PromptFormat,
                grammar: Grammar, tasks: Sequence[Task], **play) -> list[rollouts.Episode]:
    """One episode per task; ``play``: the other arguments of ``rollouts.rollout``."""
    out: list[rollouts.Episode] = []
    for start in range(0, len(tasks), BATCH):
        part = tasks[start:start + BATCH]
        out += rollouts.rollout(policy, make_batch(len(part)), part, [str(start + i) for i in range(len(part))], fmt,
                                grammar.admissible, **play)
    return out


def imagined(policy: llm.LM, fmt: rollouts.PromptFormat, dream: DreamEnv, world: World, tasks: Sequence[Task],
             **play) -> dict:
    """The policy dreams one episode per task; each list of actions is replayed unchanged in the real environment.

    ``imagined_success``; ``wm2real``: success of the replays; ``consistency``: the ratio of the two (section 11.5);
    ``imagined_false_success``: share of the imagined successes whose replay fails; ``failed_declared``: share of the
    really failed action lists that the dream declares successful.  ``dreamed`` and ``replayed`` hold the outcomes in
    the order of the tasks, ``replay_transitions`` the real transitions used.
    """
    episodes = episodes_in(lambda n: dream, policy, fmt, dream.grammar, tasks, **play)
    env, replayed, used = world.make(), [], 0
    for task, episode in zip(tasks, episodes):
        env.reset(task)
        success = False
        for turn in episode.turns:
            _, _, terminated, truncated, info = env.step(turn.action)
            used, success = used + 1, info["success"]
            if terminated or truncated:
                break
        replayed.append(success)
    dreamed = [e.success for e in episodes]
    return {"imagined_success": share(dreamed), "wm2real": share(replayed),
            "consistency": paired(ratio, replayed, dreamed),
            "imagined_false_success": share([not real for real, said in zip(replayed, dreamed) if said]),
            "failed_declared": share([said for real, said in zip(replayed, dreamed) if not real]),
            "dreamed": dreamed, "replayed": replayed, "replay_transitions": used}


# ------------------------------------------------------------------------------------------------ 4: along the policy
def on_policy_errors(policy: llm.LM, fmt: rollouts.PromptFormat, dream: DreamEnv, world: World, tasks: Sequence[Task],
                     **play) -> dict:
    """The policy plays one real episode per task; at every step the experience model predicts the next one.

    ``eps_P``: share of the steps with a wrong next state or a wrong end, the expected TV term; ``eps_R``: mean of
    |R - Rhat|.  ``bound``: mean over the episodes of their sum, the right side of the bound in this file's docstring.
    ``coupled_bound``: share of the episodes with any error, a tighter bound of the same kind (until the first error
    real and dreamed episode are the same).  ``real``: outcomes in the order of the tasks.
    """
    used = [0]

    def spend(n: int) -> None:
        used[0] += n

    episodes = episodes_in(lambda n: rollouts.RealBatch([world.make() for _ in range(n)], spend), policy, fmt,
                           dream.grammar, tasks, **play)
    queries, steps = [], []                                    # steps: (episode, turn, done)
    for number, (task, episode) in enumerate(zip(tasks, episodes)):
        actions, states = [turn.action for turn in episode.turns], [turn.state for turn in episode.turns]
        for i, turn in enumerate(episode.turns):
            queries.append(Query(task.text, task.id, f"fidelity/{number}", actions[:i], states[:i], turn.state,
                                 turn.action))
            steps.append((number, turn, episode.terminated and i == len(episode.turns) - 1))
    wrong, off = [], []
    sums, any_error = np.zeros(len(tasks)), np.zeros(len(tasks))
    for q, (number, turn, done), p in zip(queries, steps, predictions(dream.model, queries)):
        said, _ = dream.outcome(q, p)
        wrong.append(said.next_state != turn.next_state or said.done != done)
        off.append(abs(turn.reward - float(said.success)))
        sums[number] += wrong[-1] + off[-1]
        any_error[number] = max(any_error[number], wrong[-1], off[-1])
    numbers = [number for number, *_ in steps]
    bound, coupled = bootstrap_mean(sums), share(any_error)
    if tasks:
        bound["high"] = max(bound["high"], coupled["high"])    # never below it, though zeros resample to zeros
    return {"real_success": share([e.success for e in episodes]), "eps_P": share(wrong, numbers),
            "eps_R": share(off, numbers), "bound": bound, "coupled_bound": coupled,
            "real": [e.success for e in episodes], "rollout_transitions": used[0]}


def measure(policy: llm.LM, fmt: rollouts.PromptFormat, dream: DreamEnv, world: World, tasks: Sequence[Task],
            transitions: Sequence[Transition], purchases: int = 240, seed: int = 0, **play) -> dict:
    """Everything: ``transitions`` are real ones of held-out tasks, ``tasks`` the held-out tasks that the policy plays.

    Adds ``wm2real_over_real`` (section 11.5), ``gap`` = J_Mhat - J_M, and the real interactions: ``real_transitions``
    and ``real_episodes``, those of ``transitions`` not counted.
    """
    rng = random.Random(f"fidelity/{seed}")
    found = teacher_forced(dream.model, transitions)
    found |= balanced_purchases(dream.model, transitions, purchases, rng)
    if dream.grammar.open_vocabulary:
        found |= balanced_purchases(dream.model, transitions, purchases, rng, renamed="unseen")
    found |= imagined(policy, fmt, dream, world, tasks, **play)
    found |= on_policy_errors(policy, fmt, dream, world, tasks, **play)
    found["wm2real_over_real"] = paired(ratio, found["replayed"], found["real"])
    found["gap"] = paired(lambda dreamed, real: dreamed - real, found["dreamed"], found["real"])
    found["real_transitions"] = found["replay_transitions"] + found["rollout_transitions"]
    found["real_episodes"] = 2 * len(tasks)
    return found


# ------------------------------------------------------------------------------------------------ the table
ROWS = (                                                       # (result, what the table calls it, as per cent?)
    ("", "single steps on held-out tasks", True),
    ("exact", "next state exact", True), ("exact_known", "next state exact where nothing hidden is shown", True),
    ("done", "done flag right", True), ("done_precision", "done flag, precision", True),
    ("done_recall", "done flag, recall", True),
    ("success_precision", "success flag, precision", True), ("success_recall", "success flag, recall", True),
    ("unparsed", "no well-formed answer", True), ("by_move", "next state exact", True),
    ("by_action", "next state exact", True), ("fields", "field", True),
    ("", "balanced final steps", True),
    ("false_success", "failures declared successful", True), ("false_failure", "successes declared failed", True),
    ("unseen_false_success", "failures declared successful, unseen words", True),
    ("unseen_false_failure", "successes declared failed, unseen words", True),
    ("", "whole episodes of the policy on held-out tasks", True),
    ("imagined_success", "success in the dream", True), ("wm2real", "success of its action lists, replayed", True),
    ("real_success", "success in the real environment", True),
    ("imagined_false_success", "dreamed successes that fail", True),
    ("failed_declared", "real failures declared successful", True),
    ("consistency", "replayed / dreamed success", False), ("wm2real_over_real", "replayed / real success", False),
    ("", "along the policy's real episodes", True),
    ("eps_P", "eps_P: next state wrong (TV)", True), ("eps_R", "eps_R: |R - Rhat|", True),
    ("gap", "dreamed - real success", False), ("bound", "bound: sum of eps_P + eps_R", False),
    ("coupled_bound", "bound: episodes with any error", False))
NESTED = ("by_move", "by_action", "fields")                    # results that are themselves named results


def table(results: dict) -> str:
    """The measures that ``results`` holds, one a line, with 95 % intervals and how many cases they rest on."""
    lines, heading = [], ""
    for name, label, per_cent in ROWS:
        if not name:
            heading = f"{label:52}{'value':>8}   95 % interval        n"
        elif name in results:
            found = {label: results[name]}
            if name in NESTED:
                found = {f"  {label}: {key}": one for key, one in results[name].items()}
            lines += [heading] if heading else []
            lines += [_line(*item, per_cent) for item in found.items()]
            heading = ""
    return "\n".join(lines)


def _line(label: str, one: dict, per_cent: bool) -> str:
    scale, digits = (100, 1) if per_cent else (1, 3)
    if one["value"] is None:
        return f"  {label:50}{'-':>8}{one['n']:>27}"
    low, high = scale * one["low"], scale * one["high"]
    interval = f"[{low:.{digits}f}, {high:.{digits}f}]"
    return f"  {label:50}{scale * one['value']:>8.{digits}f}   {interval:17}{one['n']:>7}"


# ------------------------------------------------------------------------------------------------ command line
def main() -> int:
    import commands                                            # here, because both import this module
    import dreamgym
    p = dreamgym.Parser(prog="python fidelity.py", description=__doc__.split("\n\n")[0])
    p.add_argument("folder", type=Path, help="run folder")
    p.add_argument("--after", choices=commands.POLICY_STAGES[::-1],
                   help="measure along the policy of this stage (default: the newest that the run has)")
    p.add_argument("--checkpoint", type=Path, metavar="PATH",
                   help="along this policy: a checkpoint file, or a folder that transformers or peft wrote")
    p.add_argument("--split", choices=("validation", "test"), default="test", help="held-out tasks (default: test)")
    p.add_argument("--tasks", type=int, default=100, help="tasks that the policy plays (default: 100)")
    p.add_argument("--temperature", type=float, help="of the policy (default: eval.temperature of the run)")
    args = p.parse_args()
    cfg = commands.run_config(args.folder)
    name, what, origin = commands.chosen_policy(args.folder, args.after, args.checkpoint, "--after")
    temperature = commands.policy_temperature(cfg, args.temperature)
    if args.tasks < 1:
        raise UserError("--tasks must be at least 1")
    world = open_world(cfg.env)
    policy, lm = dreamgym.policy_and_world(cfg, args.folder, origin.get("stage", "policy"))
    if args.checkpoint:
        commands.load_checkpoint(policy, args.checkpoint, args.folder)
    dream = commands.dream_world(cfg, args.folder, world, lm)
    fmt = formats.PolicyFormat(policy, cfg.policy.history)
    episodes = dreamgym.gate_episodes(cfg)
    transitions = held_out_transitions(world, dream.grammar, args.split, episodes, cfg.run.seed, cfg.env.max_steps)
    generator = torch.Generator(policy.device).manual_seed(derive_seed(cfg.run.seed, "fidelity", name))
    found = measure(policy, fmt, dream, world, world.tasks[args.split][:args.tasks], transitions,
                    temperature=temperature, generator=generator, **dreamgym.limits(cfg, cfg.env.max_steps))
    found["real_transitions"] += len(transitions)
    found["real_episodes"] += sum(episodes.values())
    about = origin | {"split": args.split, "temperature": temperature, "reward_source": cfg.rl.reward_source}
    path = args.folder / f"fidelity-{name}-{args.split}.json"
    write_whole(path, json.dumps(about | found, indent=1) + "\n")
    print(f"experience model of {args.folder} along the {what} at temperature {temperature:g}, {args.split} tasks\n"
          f"{table(found)}\nreal transitions for this table: {found['real_transitions']:,} (evaluation); "
          f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(config.run_main(main))
