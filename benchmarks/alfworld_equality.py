"""Plays games side by side on textworld's own engine and on ours; reports whether they agree, and the speed of both.

    python benchmarks/alfworld_equality.py                                     # 24 generated games
    python benchmarks/alfworld_equality.py --data generated games.jsonl.xz     # and 24 official ones
    python benchmarks/alfworld_equality.py --memory 5000                       # memory of ours over 5,000 episodes

Compared after every step: feedback, admissible commands, whether the goal holds, and textworld's score and done, which
are our reward and done.  Commands are drawn from the explorer (so games are won), at random (half of them not "go to")
and from a list of impossible ones.  Times are processor time, so that a busy machine does not blur them.

The exit code is 1 after a difference, the first of which ends the comparison; where a step is not 15 times or a reset
not 30 times faster than textworld's; and where memory at the end is over 10 % above that after the first fifth of the
episodes.  Needs the packages of requirements-alfworld.txt (``--memory`` only alfworld); the stock engine takes minutes.
"""
from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections import Counter, defaultdict
from itertools import zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config import UserError                                                        # noqa: E402
from envs.alfworld import ALFWorldEnv, RuleEngine, StockEngine                       # noqa: E402
from envs.alfworld_games import Game, Games, load                                    # noqa: E402
from envs.alfworld_text import explorer, first_page, observe, policy, render, task_text            # noqa: E402

FASTER = {"reset": 30, "step": 15}                   # times faster than textworld that ours must be
GROWTH = 1.1                                         # memory at the end over that after a fifth of the episodes


def drawn(games: Games, n: int, rng: random.Random) -> list[Game]:
    """n of the games (all, if there are fewer), in turn from each split and task type."""
    groups = defaultdict(list)
    for split, of_split in games.by_split.items():
        for game in rng.sample(of_split, len(of_split)):
            groups[split, game.name.split("-", 1)[0]].append(game)
    turns = rng.sample(list(groups.values()), len(groups))
    return [game for row in zip_longest(*turns) for game in row if game][:n]


def choose(page, task: str, offered: list[str], rng: random.Random) -> str:
    """The next command: 45 % explorer, 30 % any but go to, 10 % any, 15 % impossible or oddly written."""
    draw = rng.random()
    if draw < 0.45:
        return explorer(task, render(page), rng)
    if draw < 0.75:
        return rng.choice([c for c in offered if not c.startswith("go to ")])
    if draw < 0.85:
        return rng.choice(offered)
    command = rng.choice(offered)
    place = rng.choice(sorted(page.status))
    return rng.choice(["fly", "", "put mug 1 in/on desk 1", "use desklamp 1", "heat egg 1 with microwave 1",
                       "go to nowhere 1", command.upper(), f"  {command} ", command.replace(" ", "  "), f"open {place}",
                       f"close {place}", f"examine {place}", f"take mug 1 from {place}", f"move apple 1 to {place}"])


def differing(*pairs: tuple[str, object, object]) -> str:
    """The first of (what, textworld's, ours) that are not the same, in words; "" if there is none."""
    return next((f"{what}: {theirs!r} against {our!r}" for what, theirs, our in pairs if theirs != our), "")


def compare(game: Game, stock: StockEngine, ours: RuleEngine, steps: int, rng: random.Random, clock: Counter) -> str:
    """Plays ``steps`` steps at most, four of them beyond a win.  Returns the first difference, "" if there is none.

    ``clock`` gets the seconds of both engines and counts steps, impossible commands and games won.
    """
    def timed(name, call, *args):
        start = time.process_time()
        result = call(*args)
        clock[name] += time.process_time() - start
        return result

    raw, mine = timed("stock reset", stock.reset, game), timed("our reset", ours.reset, game)
    if wrong := differing(("introduction", raw, mine), ("admissible", stock.admissible, ours.admissible),
                          ("won", stock.won, ours.won)):
        return f"{game.name}: {wrong}"
    page, task, beyond = first_page(raw), task_text(game.sentence), 0
    for i in range(steps):
        command = choose(page, task, ours.admissible, rng)
        raw, mine = timed("stock step", stock.step, command), timed("our step", ours.step, command)
        if wrong := differing(("feedback", raw, mine), ("admissible", stock.admissible, ours.admissible),
                              ("won", stock.won, ours.won), ("score", stock.score, float(ours.won)),
                              ("done", stock.done, ours.won)):
            return f"{game.name}, step {i}, {command!r}: {wrong}"
        clock.update(steps=1, impossible=raw == "Nothing happens.", won=ours.won and not beyond)
        beyond += bool(ours.won or beyond)
        if beyond > 4:
            break
        page = observe(page, command.strip(), raw, ours.admissible)
    return ""


def equality(name: str, games: Games, options, stock: StockEngine) -> bool:
    """Compares as many games as the options say, prints the result, and returns whether it is good enough."""
    rng, clock, played = random.Random(options.seed), Counter(), Counter()
    for game in drawn(games, options.games, rng):
        print(f"{name}: {played.total()} games, {clock['steps']} steps", end="\r", file=sys.stderr, flush=True)
        played[game.split] += 1
        if difference := compare(game, stock, RuleEngine(), options.steps, rng, clock):
            print(f"{name}: {difference}")
            return False
    splits = ", ".join(f"{n} {split}" for split, n in played.items())
    print(f"{name}: {played.total()} games ({splits}), {clock['won']} of them won, {clock['steps']} steps, "
          f"{clock['impossible']} of them impossible: identical")
    fast = True
    for what, count in (("reset", played.total()), ("step", clock["steps"])):
        theirs, our = clock[f"stock {what}"] / count, clock[f"our {what}"] / count
        fast &= theirs >= FASTER[what] * our
        print(f"{name}: {what}: stock {theirs * 1e3:.1f} ms, ours {our * 1e3:.3f} ms, {theirs / our:.0f} times faster "
              f"(at least {FASTER[what]})")
    return fast


def resident() -> float:
    """Memory of this process [MiB]."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def memory(name: str, games: Games, episodes: int) -> bool:
    """Random episodes one after the other in one process; prints the memory after each fifth of them, and returns
    whether it stays what it is after the first."""
    env, act, used = ALFWorldEnv(games, max_steps=20), policy("random"), []
    tasks, rng, start, steps = env.tasks("train"), random.Random(0), time.process_time(), 0
    for i in range(episodes):
        task = tasks[i % len(tasks)]
        state, over = env.reset(task), False
        while not over:
            state, _, won, cut, _ = env.step(act(task.text, state, [], rng))
            over = won or cut
        steps += env.steps
        if (i + 1) * 5 // episodes > i * 5 // episodes:
            used.append(resident())
            print(f"{name}: {i + 1} episodes: {used[-1]:.1f} MiB", flush=True)
    print(f"{name}: {steps / (time.process_time() - start):.0f} steps/s with states and policy; memory grew by "
          f"{used[-1] / used[0] - 1:.1%} (at most {GROWTH - 1:.0%})")
    return used[-1] <= GROWTH * used[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["generated"], help="generated, official, a folder, a packed file")
    parser.add_argument("--games", type=int, default=24, help="how many of each, in turn from each split and task type")
    parser.add_argument("--steps", type=int, default=30, help="at most so many steps a game")
    parser.add_argument("--memory", type=int, default=0, metavar="EPISODES",
                        help="measure memory instead; some thousands, for the first fifth fills the caches")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()                    # before textworld, which overwrites sys.argv
    if min(options.games, options.steps) < 1 or options.memory < 0:
        parser.error("--games and --steps must be at least 1, --memory at least 0")
    good = True
    try:
        stock = None if options.memory else StockEngine()
        for name in options.data:
            games = load(None if name == "generated" else name, options.seed)
            good &= memory(name, games, options.memory) if options.memory else equality(name, games, options, stock)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
