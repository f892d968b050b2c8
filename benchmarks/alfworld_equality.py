"""Plays games side by side on textworld's own engine and on ours; reports whether they agree, and the speed of both.

    python benchmarks/alfworld_equality.py                              # 24 generated games
    python benchmarks/alfworld_equality.py --data games.jsonl.xz        # 24 official ones (or: official, a folder)
    python benchmarks/alfworld_equality.py --memory 5000                # memory of ours over 5,000 episodes

Compared after every step: feedback, admissible commands, reward and done.  Commands are drawn from the explorer (so
games are won), at random (half of them not "go to") and from a list of impossible ones.  Times are processor time, so
that a busy machine does not blur them.  The exit code is 1 on the first difference.  Needs the packages of
requirements-alfworld.txt; the stock engine takes some minutes.
"""
from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config import UserError                                                        # noqa: E402
from envs import alfworld_games                                                     # noqa: E402
from envs.alfworld import ALFWorldEnv, RuleEngine, StockEngine                       # noqa: E402
from envs.alfworld_text import explorer, first_page, observe, policy, render, task_text            # noqa: E402


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


def compare(game, stock: StockEngine, ours: RuleEngine, steps: int, rng: random.Random, clock: dict) -> list[str]:
    """Plays ``steps`` steps, also beyond a win.  Returns what differs (nothing, if all is well)."""
    def timed(name, call, *args):
        start = time.process_time()
        result = call(*args)
        clock[name] = clock.get(name, 0.0) + time.process_time() - start
        return result

    raw = timed("stock reset", stock.reset, game)
    if timed("our reset", ours.reset, game) != raw:
        return [f"{game.name}: introduction"]
    page, task, won_at = first_page(raw), task_text(game.sentence), None
    for i in range(steps):
        if list(stock.admissible) != ours.admissible:
            return [f"{game.name}, step {i}: admissible: {sorted(set(stock.admissible) ^ set(ours.admissible))}"]
        if stock.won != ours.won:
            return [f"{game.name}, step {i}: done: {stock.won} against {ours.won}"]
        clock["won"] = clock.get("won", 0) + (stock.won and won_at is None)
        won_at = i if stock.won and won_at is None else won_at
        if won_at is not None and i - won_at > 3:
            break
        command = choose(page, task, ours.admissible, rng)
        raw = timed("stock step", stock.step, command)
        mine = timed("our step", ours.step, command)
        clock["steps"] = clock.get("steps", 0) + 1
        clock["invalid"] = clock.get("invalid", 0) + (raw == "Nothing happens.")
        if raw != mine:
            return [f"{game.name}, step {i}, {command!r}: {raw!r} against {mine!r}"]
        page = observe(page, command.strip(), raw, ours.admissible)
    return []


def memory(games, episodes: int) -> None:
    """Random episodes one after the other in one process; resident memory after each fifth of them."""
    env, act = ALFWorldEnv(games, max_steps=20), policy("random")
    tasks, rng, start = env.tasks("train"), random.Random(0), time.process_time()
    for i in range(episodes):
        state, over, task = env.reset(tasks[i % len(tasks)]), False, tasks[i % len(tasks)]
        while not over:
            state, _, won, cut, _ = env.step(act(task.text, state, [], rng))
            over = won or cut
        if (i + 1) % max(1, episodes // 5) == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            print(f"{i + 1} episodes: {pages * resource.getpagesize() / 2**20:.1f} MiB", flush=True)
    print(f"{20 * episodes / (time.process_time() - start):.0f} steps/s with states and policy")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="official games (default: generated ones)")
    parser.add_argument("--games", type=int, default=24, help="how many, spread over the splits and task types")
    parser.add_argument("--steps", type=int, default=30, help="at most so many steps a game")
    parser.add_argument("--memory", type=int, default=0, metavar="EPISODES", help="measure memory instead")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()                    # before textworld, which overwrites sys.argv
    try:
        games = alfworld_games.load(options.data, options.seed, train=600 if options.memory else max(60, options.games))
        if options.memory:
            memory(games, options.memory)
            return 0
        pool = [g for split in ("train", "test") for g in games.by_split[split]]
        rng = random.Random(options.seed)
        chosen = rng.sample(pool, min(options.games, len(pool)))
        stock, ours, clock, wrong = StockEngine(), RuleEngine(), {}, []
        for i, game in enumerate(chosen):
            print(f"{i} games, {clock.get('steps', 0)} steps", end="\r", file=sys.stderr, flush=True)
            wrong += compare(game, stock, ours, options.steps, rng, clock)
            if wrong:
                break
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    n, steps = len(chosen), clock["steps"]
    print(f"{n} games, {steps} steps, {clock['invalid']} of them impossible, {clock['won']} games won: "
          f"{'identical' if not wrong else wrong[0]}")
    for what, count in (("reset", n), ("step", steps)):
        slow, fast = clock[f"stock {what}"] / count, clock[f"our {what}"] / count
        print(f"{what}: stock {slow * 1e3:.1f} ms, ours {fast * 1e3:.3f} ms, {slow / fast:.0f} times faster")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
