"""ALFWorld (text): the rules of its PDDL domain as a small engine, checked step by step against textworld, and the Env.

Why an engine of our own, and not textworld made faster.  The stock engine takes 50 ms a step and 0.7 s a reset
(every load translates the PDDL problem four times, every step parses a template per possible command).  Memoising
its parsers brings 3 ms a step, but a game that comes up for the first time still costs a translation of 0.3 s,
each engine holds its own copy of the planner library (4 MB, 2 MB of which leak when it is dropped), and its parser
state is global, so hundreds of interleaved episodes need hundreds of copies.  All effects of the domain are local
(design: one agent, one hand, flags), so the rules fit on a page; an episode is a few Python sets, reset is a
shallow copy, memory stays flat, and neither a C++ build nor a planner stands between the user and training.
The real engine stays in the repository as ``StockEngine`` (``ALFWorldEnv(.., engine="textworld")`` plays on it): the
oracle of ``benchmarks/alfworld_equality.py`` and of the tests, which compare feedback, admissible commands, reward
and done after every step.  The facts still come from the game's PDDL problem, and ``alfworld_games.checked`` refuses
rules or texts that were never compared.

    env = ALFWorldEnv(alfworld_games.load(None))
    state = env.reset(env.tasks("train")[0])
    state, reward, terminated, truncated, info = env.step("go to cabinet 1")      # info["raw"]: the official text
"""
from __future__ import annotations

import random
import sys

from config import UserError
from envs import Task, World
from envs.alfworld_games import INSTALL, Game, Games, Room, load, room_of
from envs.alfworld_text import ALFWorldGrammar, first_page, observe, parse_task, policy, render

HELP = """Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""
TREATMENTS = {"heat": ("heatable", "microwave"), "clean": ("cleanable", "sinkbasin"), "cool": ("coolable", "fridge")}
# What ``examine`` says of a held object that is no container: the first line whose flags all hold.
LOOKS = (("isclean ishot issliced", "hot and clean sliced"), ("isclean iscool issliced", "cool and clean sliced"),
         ("isclean issliced", "clean sliced"), ("ishot issliced", "hot sliced"), ("iscool issliced", "cool sliced"),
         ("isclean ishot", "hot and clean"), ("isclean iscool", "cool and clean"), ("ishot", "hot"),
         ("isclean", "clean"), ("iscool", "cold"))


def listing(names: list[str], article: str = "a ") -> str:
    """The engine's lists: "a x 1, and a y 2", with the comma also between two."""
    names = [article + n for n in names]
    return ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0] if names else "nothing"


class RuleEngine:
    """One episode of a game; commands and texts are literally those of textworld.

    ``reset(game)`` and ``step(command)`` return the feedback; ``admissible`` is the sorted list of commands and ``won``
    whether the goal holds now.  A command that is not literally in the list changes nothing: "Nothing happens.".
    """

    def reset(self, game: Game) -> str:
        self.room: Room = room_of(game)
        room = self.room
        self.place = room.start                                      # the agent's location
        self.held: str | None = None
        self.inside = {r: set(o) for r, o in room.inside.items()}
        self.at = set(room.at)
        self.flags = {f: set(room.flags[f]) for f in ("opened", "isclean", "ishot", "iscool", "issliced", "istoggled")}
        self.taken: set[tuple[str, str]] = set()                     # (object, receptacle) it was taken out of
        self._offer()
        around = listing([room.name[r] for r in room.places])
        first = self._look() if self.here else (
            f"You are in the middle of a room. Looking quickly around you, you see {around}.")
        return f"-= Welcome to TextWorld, ALFRED! =-\n\n{first}\n\nYour task is to: {game.sentence}."

    def step(self, command: str) -> str:
        effect = self.commands.get(command.strip())
        if effect is None:
            return "Nothing happens."
        verb, *things = effect
        feedback = getattr(self, "_" + verb)(*things)
        self._offer()
        return feedback

    @property
    def admissible(self) -> list[str]:
        return sorted(self.commands)

    @property
    def won(self) -> bool:
        room, wanted = self.room, self.room.obj
        if room.kind == "light":
            lamps = {o for o in self.flags["istoggled"] if room.classes[o] == room.recep}
            return (self.held is not None and room.classes[self.held] == wanted
                    and any(lamps & self.inside[r] for r in self.here))
        fit = room.flags.get(f"{room.kind}able"), self.flags.get(
            {"clean": "isclean", "heat": "ishot", "cool": "iscool"}.get(room.kind))
        for r, objects in self.inside.items():
            if room.classes[r] == room.recep:
                found = [o for o in objects if room.classes[o] == wanted and all(f is None or o in f for f in fit)]
                if len(found) >= (2 if room.kind == "two" else 1):
                    return True
        return False

    # ---------------------------------------------------------------- what is possible now

    def _reachable(self, r: str) -> bool:
        """Not openable, or open."""
        return r not in self.room.flags["openable"] or r in self.flags["opened"]

    def _offer(self) -> None:
        """Sets ``here`` (the receptacles at the agent's location) and ``commands`` (text -> effect)."""
        room, name, flags = self.room, self.room.name, self.room.flags
        self.here = [r for r, place in room.places.items() if place == self.place]
        held = self.held
        c: dict[str, tuple] = {"look": ("look",), "inventory": ("inventory",), "help": ("help",)}
        for r, place in room.places.items():
            if place != self.place:
                c[f"go to {name[r]}"] = ("go", r)
        for r in self.here:
            c[f"examine {name[r]}"] = ("examine", r)
            if r in flags["openable"]:
                c[f"{'close' if r in self.flags['opened'] else 'open'} {name[r]}"] = (
                    "close" if r in self.flags["opened"] else "open", r)
            for o in self.inside[r]:
                if o in flags["toggleable"]:
                    c[f"use {name[o]}"] = ("use", o)
                if held is None and o in flags["pickupable"] and self._reachable(r):
                    c[f"take {name[o]} from {name[r]}"] = ("take", o, r)
            if held is not None:
                if (r, held) in room.can and self._reachable(r):
                    c[f"move {name[held]} to {name[r]}"] = ("move", held, r)
                for verb, (able, station) in TREATMENTS.items():
                    if room.classes[r] == station and held in flags[able]:
                        c[f"{verb} {name[held]} with {name[r]}"] = (verb, held, r)
        if held is not None:
            c[f"examine {name[held]}"] = ("inspect", held)
            if room.classes[held] in ("knife", "butterknife"):
                for o, place in self.at:
                    if place == self.place and o in flags["sliceable"]:
                        c[f"slice {name[o]} with {name[held]}"] = ("slice", o, held)
        self.commands = c

    # ---------------------------------------------------------------- effects and texts

    def _go(self, r: str) -> str:
        self.place = self.room.places[r]
        return f"You arrive at {self.room.name[r]}. {self._examine(r)}"

    def _open(self, r: str) -> str:
        self.flags["opened"].add(r)
        return f"You open the {self.room.name[r]}. {self._examine(r)}"

    def _close(self, r: str) -> str:
        self.flags["opened"].discard(r)
        return f"You close the {self.room.name[r]}."

    def _take(self, o: str, r: str) -> str:
        self.inside[r].discard(o)
        self.at.discard((o, self.place))
        self.taken.add((o, r))
        self.held = o
        return f"You pick up the {self.room.name[o]} from the {self.room.name[r]}."

    def _move(self, o: str, r: str) -> str:
        self.inside[r].add(o)
        self.at.add((o, self.place))
        self.taken.discard((o, r))
        self.held = None
        return f"You move the {self.room.name[o]} to the {self.room.name[r]}."

    def _use(self, o: str) -> str:
        self.flags["istoggled"].add(o)
        return f"You turn on the {self.room.name[o]}."

    def _heat(self, o: str, r: str) -> str:
        self.flags["ishot"].add(o)
        self.flags["iscool"].discard(o)
        return f"You heat the {self.room.name[o]} using the {self.room.name[r]}."

    def _cool(self, o: str, r: str) -> str:
        self.flags["iscool"].add(o)
        self.flags["ishot"].discard(o)
        return f"You cool the {self.room.name[o]} using the {self.room.name[r]}."

    def _clean(self, o: str, r: str) -> str:
        self.flags["isclean"].add(o)
        return f"You clean the {self.room.name[o]} using the {self.room.name[r]}."

    def _slice(self, o: str, knife: str) -> str:
        self.flags["issliced"].add(o)
        return f"You sliced the {self.room.name[o]} with the {self.room.name[knife]}."

    def _inventory(self) -> str:
        return f"You are carrying: a {self.room.name[self.held]}." if self.held else "You are not carrying anything."

    def _help(self) -> str:
        return HELP

    def _look(self) -> str:
        name = self.room.name
        if not self.here:                            # at the start; the list of the introduction is not repeated
            return "You are in the middle of a room. Looking quickly around you, you see nothing."
        facing = listing([name[r] for r in self.here], article="")
        # An object put down at the spot it was taken from, but into another receptacle, also shows "on the floor".
        floor = [name[o] for o, place in sorted(self.at) if place == self.place
                 for r in self.here if (o, r) in self.taken]
        return f"You are facing the {facing}. Next to it, you see {listing(floor)}."

    def _examine(self, r: str) -> str:
        name = self.room.name
        if r in self.room.flags["openable"] and r not in self.flags["opened"]:
            return f"The {name[r]} is closed."
        inside = listing([name[o] for o in sorted(self.inside[r])])
        return (f"The {name[r]} is open. In it, you see {inside}." if r in self.flags["opened"] else
                f"On the {name[r]}, you see {inside}.")

    def _inspect(self, o: str) -> str:
        name, flags = self.room.name, self.room.flags
        if o in flags["isreceptacleobject"]:         # the text of a container hides whether it is hot, cool or clean
            inner = listing([name[i] for i in self.room.contents.get(o, ())])
            return f"This is a normal {name[o]}. In it, you see {inner}."
        for needed, words in LOOKS:
            if all(o in self.flags[f] for f in needed.split()):
                return f"This is a {words} {name[o]}."
        if o in flags["toggleable"] and o in self.flags["istoggled"]:
            return f"This {name[o]} is on."
        if o in flags["sliceable"] and o in self.flags["issliced"]:
            return f"This is a sliced {name[o]}."
        return f"There's nothing special about {name[o]}."


class StockEngine:
    """The same interface on textworld's own PddlEnv: the oracle.  Keep one per process: each new one leaks 2 MB.

    ``score`` and ``done`` are what textworld said of the last step.
    """

    def __init__(self):
        argv = sys.argv
        try:
            import textworld
            import textworld.envs.pddl.textgen as textgen
            from alfworld.agents.utils.misc import Demangler
            from textworld.envs.pddl.pddl import PddlEnv
        except ImportError as error:
            raise UserError(f"playing on textworld's own engine needs its packages ({error}); run: {INSTALL}") from None
        if sys.version_info >= (3, 13):              # PEP 667: textworld's eval no longer sees what locals() was given
            def derive(symbol, context=None):
                return [textgen.TerminalSymbol(eval(symbol.expression, {}, (context or symbol.context)["variables"]))]
            textgen.EvalSymbol.derive = derive
        self._demangler = Demangler
        self._env = PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))
        sys.argv = argv

    def reset(self, game: Game) -> str:
        argv = sys.argv                              # the translator overwrites it
        self._env.load(game.document())
        infos = self._env._entity_infos
        names = self._demangler(game_infos=infos)
        for info in infos.values():
            info.name = names.demangle_alfred_name(info.id)
        self._state = self._env.reset()
        sys.argv = argv
        return self._state.feedback

    def step(self, command: str) -> str:
        self._state, self.score, self.done = self._env.step(command)
        return self._state.feedback

    @property
    def admissible(self) -> list[str]:
        return self._state["admissible_commands"]

    @property
    def won(self) -> bool:
        return bool(self._state["won"])


class ALFWorldEnv:
    """The protocol ``envs.Env`` on either engine.  Many may play the same ``Games`` side by side in one process (on
    ``rules``; ``textworld`` has global state: one at a time, and never threads)."""

    def __init__(self, games: Games, max_steps: int = 50, engine: str = "rules"):
        self.games, self.max_steps = games, max_steps
        self.engine = {"rules": RuleEngine, "textworld": StockEngine}[engine]()

    def tasks(self, split: str) -> list[Task]:
        return self.games.tasks(split)

    def reset(self, task: Task) -> str:
        self.steps = 0
        self.raw = self.engine.reset(task.goal)
        self.page = first_page(self.raw)
        return render(self.page)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """``info["raw"]`` is the engine's own text.  Nothing else of the engine leaves: no facts, no path, no plan."""
        self.steps += 1
        self.raw = self.engine.step(action)
        self.page = observe(self.page, action.strip(), self.raw, self.engine.admissible)
        won = self.engine.won
        info = {"success": won, "score": float(won), "invalid": self.raw == "Nothing happens.", "raw": self.raw}
        return render(self.page), float(won), won, not won and self.steps >= self.max_steps, info

    def admissible(self) -> list[str]:
        """As verl-agent lists them: all that textworld offers, except ``help``."""
        return [c for c in self.engine.admissible if c != "help"]


def open_world(cfg) -> World:
    """ALFWorld as section ``env`` of the configuration describes it (see ``alfworld_games.load`` for ``cfg.data``)."""
    games = load(cfg.data, cfg.catalog_seed, cfg.train_tasks)
    return World(make=lambda: ALFWorldEnv(games, cfg.max_steps),
                 tasks={split: games.tasks(split) for split in ("train", "validation", "test")},
                 grammar=ALFWorldGrammar, scripted=policy,
                 rules=lambda split: rule_baselines(games, split, cfg.max_steps),
                 kind=lambda task: parse_task(task.text).kind)


def rule_baselines(games: Games, split: str, max_steps: int) -> dict[str, float]:
    """Success over all tasks of a split: the explorer, and random commands."""
    env, success = ALFWorldEnv(games, max_steps), {}
    for rule, name in (("explorer", "expert"), ("random commands", "random")):
        act, won = policy(name), 0
        for task in games.tasks(split):
            state, rng, over = env.reset(task), random.Random(task.id), False
            while not over:
                state, _, terminated, truncated, _ = env.step(act(task.text, state, [], rng))
                over = terminated or truncated
            won += terminated
        success[rule] = won / max(1, len(games.tasks(split)))
    return success
