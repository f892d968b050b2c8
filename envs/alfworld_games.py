"""ALFWorld games: the official ones as they come, and our own, generated on the room layouts of the alfworld package.

A game is one PDDL problem (objects, first facts, goal) under one domain (rules) and one grammar (texts).  Official
games are read from a folder in the official layout or from one packed file; generated games need only the layouts,
which the alfworld package ships without any game.  Both end up as the same kind of document, so the same engine,
or textworld's own, plays both.

    games = load(None, seed=0)                                   # generated: scenes 10, 219, 308, 424 only in ``test``
    games = load("official")                                     # $ALFWORLD_DATA
    games = load("data/json_2.1.1")  /  load("official_games.jsonl.xz")

Splits.  Official train -> train, valid_seen -> validation (known rooms), valid_unseen -> test (four rooms that no
training game has); valid_train is not used: it shares rooms and tasks with train.
"""
from __future__ import annotations

import hashlib
import importlib.util
import json
import lzma
import os
import random
import re
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from config import UserError
from envs import Task
from envs.alfworld_text import (CAN_HOLD, CLEANABLE, CONTAINERS, COOLABLE, HEATABLE, KINDS, LAMP_STANDS, LAMPS,
                                OPENABLE, PICKUPABLE, SLICEABLE, STATION, TEMPLATES, Page, render, task_text)

INSTALL = "pip install --no-deps -r requirements-alfworld.txt"         # to play on textworld's own engine, too
PACKAGE = "pip install --no-deps alfworld==0.4.2"
OFFICIAL_SPLITS = {"train": "train", "valid_seen": "validation", "valid_unseen": "test"}
UNSEEN_SCENES = (10, 219, 308, 424)                 # one kitchen, living room, bedroom, bathroom: as in valid_unseen
# Rules and texts that the rule engine was checked against, as ``fingerprint`` sees them.  Official release 2.1.2 and
# the files inside alfworld 0.4.2 agree but for a condition that no receptacle meets and the place of the help text.
CHECKED_RULES = "220c15626e31ada5"


# ------------------------------------------------------------------------------------------------ one game

@dataclass(frozen=True)
class Game:
    """``name`` and ``split`` identify it; ``sentence`` is the official task sentence; the problem is kept packed."""
    name: str
    split: str
    sentence: str
    packed: bytes = field(repr=False)                # zlib of the PDDL problem
    logic: "Logic" = field(repr=False)

    @property
    def problem(self) -> str:
        return zlib.decompress(self.packed).decode()

    def document(self) -> dict[str, str]:
        """What textworld's PddlEnv.load takes."""
        return {"pddl_domain": self.logic.domain, "pddl_problem": self.problem,
                "grammar": self.logic.grammar.replace("UNKNOWN GOAL", self.sentence)}


@dataclass(frozen=True)
class Logic:
    """Rules and texts that a set of games shares; ``grammar`` says UNKNOWN GOAL where the task sentence goes."""
    domain: str
    grammar: str


def checked(domain: str, grammar: str, source: str) -> Logic:
    """Rules and texts of the games of ``source``.  Raises UserError, which names it, where they are of a release that
    the rule engine was never checked against, be it older or newer."""
    if fingerprint(domain, grammar) == CHECKED_RULES:
        return Logic(domain, grammar)
    put = re.search(r"action\s+PutObject\s*\{\s*template\s*::\s*\"([^\"]*)\"", grammar)
    example = f"; objects are put down with '{put[1]}'" if put and put[1] != "move {o} to {r}" else ""
    raise UserError(f"{source}: these ALFWorld games are of another release, older or newer, than the rule engine was "
                    f"checked against{example}. What fits is alfworld 0.4.2 and what its alfworld-download gets "
                    "(requirements-alfworld.txt)")


def fingerprint(domain: str, grammar: str) -> str:
    """Hash of the rules and texts without comments and layout."""
    rules = re.sub(r";[^\n]*", "", domain.lower())
    rules = re.sub(r"\(receptacletype \?r sinktype\)", "", rules)
    texts = re.sub(r"\baction\s+help\s*\{.*", "", grammar, flags=re.DOTALL)
    return hashlib.sha256("".join((rules + texts).split()).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ the problem, parsed

FACT = re.compile(r"\(\s*([\w-]+)((?:\s+[^\s()]+)*)\s*\)")
GOALS = {
    "light": "(:goal (and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and "
             "(objectType ?ot {recep}Type) (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) "
             "(atLocation ?a ?l) (inReceptacle ?ot ?r))) "
             "(exists (?o - object ?a - agent) (and (objectType ?o {obj}Type) (holds ?a ?o)))))",
    "place": "(:goal (and (exists (?r - receptacle) (exists (?o - object) (and (inReceptacle ?o ?r) "
             "(objectType ?o {obj}Type) (receptacleType ?r {recep}Type))))))",
    "two": "(:goal (and (exists (?r - receptacle) (exists (?o1 - object) (and (objectType ?o1 {obj}Type) "
           "(receptacleType ?r {recep}Type) (inReceptacle ?o1 ?r) (exists (?o2 - object) (and (not (= ?o1 ?o2)) "
           "(objectType ?o2 {obj}Type) (receptacleType ?r {recep}Type) (inReceptacle ?o2 ?r))))))))",
} | {kind: "(:goal (and (exists (?r - receptacle) (exists (?o - object) (and "
           f"({kind}able ?o) (objectType ?o {{obj}}Type) (receptacleType ?r {{recep}}Type) ({flag} ?o) "
           "(inReceptacle ?o ?r))))))" for kind, flag in (("clean", "isClean"), ("heat", "isHot"), ("cool", "isCool"))}


def _squeeze(text: str) -> str:
    return re.sub(r"\s*([()])\s*", r"\1", " ".join(text.lower().split()))


def _pattern(goal: str) -> re.Pattern:
    """A goal as a pattern; where a class stands twice it must be the same (back reference)."""
    text = re.escape(_squeeze(goal))
    for slot in ("obj", "recep"):
        mark = re.escape(f"{{{slot}}}")
        text = text.replace(mark, f"(?P<{slot}>[a-z]+)", 1).replace(mark, f"(?P={slot})")
    return re.compile(text)


_GOAL_PATTERNS = {kind: _pattern(goal) for kind, goal in GOALS.items()}


@dataclass(frozen=True)
class Room:
    """One problem as the engine wants it.  Ids are the problem's, in lower case; ``name`` is what the player reads.

    ``places``: receptacle -> location; ``inside``: receptacle -> objects, an object may lie in several; ``at``: pairs
    (object, location); ``can``: pairs (receptacle, object) that fit by class.
    """
    kind: str
    obj: str
    recep: str
    name: dict[str, str]
    start: str
    places: dict[str, str]
    classes: dict[str, str]
    inside: dict[str, frozenset[str]]
    contents: dict[str, tuple[str, ...]]
    at: frozenset[tuple[str, str]]
    can: frozenset[tuple[str, str]]
    flags: dict[str, frozenset[str]]


def names_of(ids: set[str]) -> dict[str, str]:
    """Ids -> "class number", as alfworld numbers them: sorted ids get the numbers of their class downwards."""
    classes = {i: i.split("_bar_", 1)[0] + ("basin" if "basin" in i else "") for i in ids if "_bar_" in i}
    left = Counter(classes.values())
    names = {}
    for i in sorted(classes):
        names[i] = f"{classes[i]} {left[classes[i]]}"
        left[classes[i]] -= 1
    return names


@lru_cache(maxsize=128)
def room_of(game: Game) -> Room:
    """Facts and goal of a problem.  Raises UserError where the problem or its rules are not ones that we know."""
    problem = game.problem.lower()
    first, goal = problem.find("(:init"), problem.find("(:goal")
    if not 0 <= first < goal:
        raise UserError(f"ALFWorld game {game.name}: its pddl_problem has no (:init ..) followed by (:goal ..)")
    facts: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for predicate, arguments in FACT.findall(problem, first, goal):
        facts[predicate].add(tuple(arguments.split()))
    goal = _squeeze(problem[goal:])
    for kind, pattern in _GOAL_PATTERNS.items():
        if match := pattern.match(goal):
            break
    else:
        raise UserError(f"ALFWorld game {game.name}: its goal is of none of the six task types")
    unary = {p: frozenset(a for a, in facts[p]) for p in (
        "openable", "opened", "pickupable", "isreceptacleobject", "cleanable", "heatable", "coolable", "toggleable",
        "sliceable", "isclean", "ishot", "iscool", "issliced", "istoggled")}
    inside = defaultdict(set)
    for o, r in facts["inreceptacle"]:
        inside[r].add(o)
    contents = defaultdict(list)
    for inner, outer in sorted(facts["inreceptacleobject"]):
        contents[outer].append(inner)
    fits = defaultdict(set)
    for r, o in facts["cancontain"]:
        fits[r].add(o)
    of_type = defaultdict(set)
    for o, t in facts["objecttype"]:
        of_type[t].add(o)
    types = dict(facts["receptacletype"]) | dict(facts["objecttype"])
    return Room(
        kind=kind, obj=match["obj"], recep=match["recep"],
        name=names_of({a for rows in facts.values() for row in rows for a in row}),
        start=next(l for _, l in facts["atlocation"]),
        places=dict(sorted(facts["receptacleatlocation"])),
        classes={i: t.removesuffix("type") for i, t in types.items()},
        inside={r: frozenset(inside[r]) for r, _ in facts["receptacleatlocation"]},
        contents={o: tuple(c) for o, c in contents.items()},
        at=frozenset(facts["objectatlocation"]),
        can=frozenset((r, o) for r, t in facts["receptacletype"] for ot in fits[t] for o in of_type[ot]),
        flags=unary)


# ------------------------------------------------------------------------------------------------ many games

class Games:
    """All games of a world by split, each list in a fixed order."""

    def __init__(self, games: list[Game]):
        self.by_split: dict[str, list[Game]] = {"train": [], "validation": [], "test": []}
        for game in games:
            self.by_split[game.split].append(game)
        self._tasks: dict[str, list[Task]] = {}

    def tasks(self, split: str) -> list[Task]:
        """The games as tasks; made once and shared by all environments that play them."""
        if split not in self._tasks:
            self._tasks[split] = [Task(f"alfworld/{g.name}", _text(g), split, _start(g), goal=g)
                                  for g in self.by_split[split]]
        return self._tasks[split]


def _text(game: Game) -> str:
    try:
        return task_text(game.sentence)
    except ValueError as error:
        raise UserError(f"ALFWorld game {game.name}: {error}; only the official templates are understood") from None


def _start(game: Game) -> str:
    """First abstract state, every receptacle still unvisited; read off without parsing the whole problem."""
    ids = set(re.findall(r"\(\s*receptacleatlocation\s+(\S+)", game.problem.lower()))
    return render(Page(status={name: "new" for name in names_of(ids).values()}))


def load(data: str | None, seed: int = 0, train: int | None = None, validation: int = 60, test: int = 120) -> Games:
    """``data``: None = generated; "official" = $ALFWORLD_DATA; a folder; the packed file (.jsonl.xz).

    ``seed``, ``validation`` and ``test`` (numbers of games) are for generated games only; ``train`` limits the
    training games of either kind (official ones are drawn evenly over the six task types; None: all, or 600 generated).
    Raises UserError with what is missing and how to get it.
    """
    if data is None:
        sizes = {"train": 600 if train is None else train, "validation": validation, "test": test}
        return Games([g for split, n in sizes.items() for g in generate(split, n, seed)])
    if data == "official":
        if not os.environ.get("ALFWORLD_DATA"):
            raise UserError("env.data: official needs $ALFWORLD_DATA, the folder that holds json_2.1.1; get the games "
                            "with alfworld-download (into ~/.cache/alfworld unless told otherwise)")
        data = os.environ["ALFWORLD_DATA"]
    path = Path(data).expanduser()
    if not path.exists():
        raise UserError(f"env.data: {data} does not exist; official games come with: alfworld-download")
    games = _folder(path) if path.is_dir() else _packed(path)
    if train is not None:
        games = _spread([g for g in games if g.split == "train"], train) + [g for g in games if g.split != "train"]
    return Games(games)


def _spread(games: list[Game], n: int) -> list[Game]:
    """n of the games, taken in turn from each task type, in their old order."""
    by_kind: dict[str, list[Game]] = defaultdict(list)
    for g in games:
        by_kind[g.name.split("-", 1)[0]].append(g)
    rng = random.Random(0)
    for group in by_kind.values():
        rng.shuffle(group)
    turns = sorted((i, kind, g.name) for kind, group in by_kind.items() for i, g in enumerate(group))
    chosen = {name for _, _, name in turns[:n]}
    return [g for g in games if g.name in chosen]


def _packed(path: Path) -> list[Game]:
    """Line 1: {pddl_domain, grammar with UNKNOWN GOAL}; then {split, game, task, pddl_problem, ..} per line."""
    games = []
    try:
        with lzma.open(path, "rb") as lines:
            head = json.loads(next(lines))
            logic = checked(head["pddl_domain"], head["grammar"], f"env.data: {path}")
            for line in lines:
                row = json.loads(line)
                if row["split"] in OFFICIAL_SPLITS:
                    games.append(_game(row["game"], row["split"], row["task"], row["pddl_problem"], logic))
    except (OSError, lzma.LZMAError, StopIteration, ValueError, KeyError, TypeError, EOFError) as error:
        raise UserError(f"env.data: {path} is no packed file of ALFWorld games: {error!r}") from None
    if not games:
        raise UserError(f"env.data: {path} holds no game of the splits {', '.join(OFFICIAL_SPLITS)}")
    return games


def _folder(path: Path) -> list[Game]:
    """The official layout: [json_2.1.1/]split/task-folder/trial_T../game.tw-pddl."""
    roots = [path / "json_2.1.1", path]
    root = next((r for r in roots if any((r / s).is_dir() for s in OFFICIAL_SPLITS)), None)
    if root is None:
        raise UserError(f"env.data: {path} has none of the folders {', '.join(OFFICIAL_SPLITS)} (nor json_2.1.1 with "
                        "them); the official layout is json_2.1.1/train/<task>/<trial>/game.tw-pddl")
    games, logics = [], {}
    for split in OFFICIAL_SPLITS:
        for file in sorted((root / split).glob("*/*/game.tw-pddl")):
            name = f"{file.parent.parent.name}/{file.parent.name}"
            if "movable" in name or "Sliced" in name:                  # not among the playable games
                continue
            try:
                document = json.loads(file.read_text(encoding="utf-8"))
                grammar, domain, problem = (document[k] for k in ("grammar", "pddl_domain", "pddl_problem"))
                sentence = re.search(r"Your task is to: (.*?)\.\"", grammar)[1]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UserError(f"env.data: {file} is no ALFWorld game: {error!r}") from None
            if not document.get("solvable", True):
                continue
            grammar = grammar.replace(sentence, "UNKNOWN GOAL")
            if (domain, grammar) not in logics:
                logics[domain, grammar] = checked(domain, grammar, f"env.data: {file}")
            games.append(_game(name, split, sentence, problem, logics[domain, grammar]))
    if not games:
        raise UserError(f"env.data: no game.tw-pddl below {root}; get the games with: alfworld-download")
    return games


def _game(name: str, split: str, sentence: str, problem: str, logic: Logic) -> Game:
    return Game(name, OFFICIAL_SPLITS[split], sentence, zlib.compress(problem.encode(), 1), logic)


# ------------------------------------------------------------------------------------------------ our own games

FULLNESS = (1.15, 1.5)                               # portable objects per receptacle; official rooms: 1.26 to 1.67
MOST = 4                                             # objects of one class in a room
SEARCH = 38                                          # steps of the 50 that finding the target may take at worst
GRID = 0.25                                          # metres between neighbouring points of a layout
FITTINGS = {"garbagecan": 1, "toaster": 1, "coffeemachine": 1, "stoveburner": 4, "toiletpaperhanger": 1,
            "towelholder": 1, "handtowelholder": 2, "laundryhamper": 1, "toilet": 1}
TYPES = {"place": "pick_and_place_simple", "light": "look_at_obj_in_light", "clean": "pick_clean_then_place_in_recep",
         "heat": "pick_heat_then_place_in_recep", "cool": "pick_cool_then_place_in_recep",
         "two": "pick_two_obj_and_place"}


def generate(split: str, n: int, seed: int = 0) -> list[Game]:
    """n solvable games, the six task types in turn, on the scenes of the split.

    Solvable by construction: the target exists, lies in some receptacle, its goal receptacle takes its class, the
    station it needs is in the room, nothing fulfils the goal at the start, and a search of all places where the target
    could be leaves enough of 50 steps for the rest.
    """
    scenes = [s for s in _scenes() if (s in UNSEEN_SCENES) == (split == "test")]
    weights = [len(_layout(s)[0]) for s in scenes]   # large rooms more often: as full as the official ones
    logic = _shipped_logic()
    games = []
    for i in range(n):
        rng, kind, made = random.Random(f"alfworld/{seed}/{split}/{i}"), KINDS[i % len(KINDS)], None
        while made is None:                          # until a room is found that can carry the task type
            scene = rng.choices(scenes, weights)[0]
            made = _make(kind, scene, rng)
        obj, recep, problem = made
        sentence = rng.choice(TEMPLATES[kind]).format(obj=obj, recep=recep)
        games.append(Game(f"{TYPES[kind]}-{obj}-{recep}-{scene}/{split}_{i:05d}", split, sentence,
                          zlib.compress(problem.encode(), 1), logic))
    return games


def _package() -> Path:
    """Folder of the installed alfworld package; it is not imported (importing it creates a folder in $HOME)."""
    spec = importlib.util.find_spec("alfworld")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"ALFWorld needs the alfworld package; run: {PACKAGE}")
    return Path(next(iter(spec.submodule_search_locations)))


@lru_cache(maxsize=1)
def _shipped_logic() -> Logic:
    data = _package() / "data"
    return checked(*((data / name).read_text(encoding="utf-8") for name in ("alfred.pddl", "alfred.twl2")), str(data))


@lru_cache(maxsize=1)
def _scenes() -> list[int]:
    found = (_package() / "gen" / "layouts").glob("FloorPlan*-openable.json")
    return sorted(int(re.search(r"FloorPlan(\d+)-", f.name)[1]) for f in found)


@lru_cache(maxsize=None)
def _layout(scene: int) -> tuple[dict[str, tuple[str, str]], frozenset[str], list[tuple[int, int]]]:
    """One room of the package: receptacle id -> (class, location), classes of things in it, free grid points.

    The shipped layouts hold the receptacles that open or were given a standing point; ``FITTINGS`` that the room's
    list of things names besides them get free points of their own, in a fixed way.
    """
    import numpy
    stem = str(_package() / "gen" / "layouts" / f"FloorPlan{scene}")
    places = json.loads(Path(stem + "-openable.json").read_text())
    things = frozenset(t.lower() for t in json.loads(Path(stem + "-objects.json").read_text()))
    points = sorted({(round(x / GRID), round(z / GRID)) for x, z in numpy.load(stem + "-layout.npy").tolist()})
    rng = random.Random(f"layout/{scene}")
    receptacles = {}
    for key, (x, z, rotation, horizon) in sorted(places.items()):
        name = key.split("|")[0].lower() + ("basin" if "basin" in key.lower() else "")
        receptacles[_id(key)] = (name, _location(round(x / GRID), round(z / GRID), rotation // 90, horizon))
    present = {c for c, _ in receptacles.values()}
    used = {l for _, l in receptacles.values()}
    taken = {l.rsplit("_bar_", 2)[0] for l in used}  # without rotation and horizon
    free = [p for p in points if f"loc{_mark(p[0])}{_mark(p[1])}" not in taken] or points
    for name, count in FITTINGS.items():
        if name in things and name not in present:
            for i in range(count):
                if i % 2 == 0:                       # burners, and the two towel holders, share a spot in pairs
                    x, z = rng.choice(free)
                    location = _location(x, z, rng.randrange(4), 45)
                receptacles[_id(f"{name}|{x * GRID:+06.2f}|+00.90|{z * GRID + i * 0.01:+06.2f}")] = (name, location)
    return receptacles, things, points


@lru_cache(maxsize=4096)
def _mark(value: int) -> str:
    """Official spelling of a number in an id: -3 -> _bar__minus_3, 4 -> _bar_4."""
    return f"_bar_{value}".replace("-", "_minus_")


def _location(x: int, z: int, rotation: int, horizon: int) -> str:
    return "loc" + "".join(_mark(int(v)) for v in (x, z, rotation, horizon))


def _id(key: str) -> str:
    """Official spelling of a thing's id: Cabinet|+00.65|.. -> cabinet_bar__plus_00_dot_65_bar_.."""
    for mark, word in (("|", "_bar_"), ("+", "_plus_"), ("-", "_minus_"), (".", "_dot_")):
        key = key.replace(mark, word)
    return key.lower()


def _make(kind: str, scene: int, rng: random.Random) -> tuple[str, str, str] | None:
    """(object class, receptacle or lamp class, PDDL problem) of a new game; None where the room cannot carry it."""
    receptacles, things, points = _layout(scene)
    by_class: dict[str, list[str]] = defaultdict(list)
    for r, (c, _) in receptacles.items():
        by_class[c].append(r)
    homes = {o: [c for c in sorted(by_class) if o in CAN_HOLD.get(c, ())] for o in sorted(things & PICKUPABLE)}
    homes = {o: cs for o, cs in homes.items() if cs}
    stands = [r for c in LAMP_STANDS for r in by_class.get(c, ())]

    def search(o: str) -> int:
        """Steps to look into every receptacle that could hold o (or the lamp): what opens takes two."""
        could = {r for c in homes[o] for r in by_class[c]} | set(stands if kind == "light" else ())
        return sum(1 + (receptacles[r][0] in OPENABLE) for r in could)

    if kind == "light":
        wishes = [(o, "desklamp") for o in homes] if "desklamp" in things and stands else []
    else:
        _, station, fit = STATION.get(kind, (None, None, PICKUPABLE))
        wishes = [(o, c) for o, cs in homes.items() for c in cs if o in fit and c != station and len(cs) > 1]
        if station and station not in by_class:
            wishes = []
    wishes = [(o, c) for o, c in wishes if search(o) <= SEARCH]
    if not wishes:
        return None
    obj, recep = rng.choice(wishes)

    number = round(len(receptacles) * rng.uniform(*FULLNESS))
    count = Counter(list(homes)) + Counter({obj: 1 if kind == "two" else 0})
    extra = [o for o in homes for _ in range(MOST - count[o])]
    count += Counter(rng.sample(extra, min(len(extra), max(0, number - count.total()))))

    def mint(name: str) -> str:
        return _id(f"{name}|{rng.uniform(-9, 9):+06.2f}|{rng.uniform(0, 2):+06.2f}|{rng.uniform(-9, 9):+06.2f}")

    objects, lies = {}, {}                           # id -> class, id -> receptacle
    for o, n in sorted(count.items()):
        for _ in range(n):
            classes = [c for c in homes[o] if not (o == obj and c == recep)]
            i = mint(o)
            objects[i], lies[i] = o, rng.choice(by_class[rng.choice(classes)])
    if "desklamp" in things and stands:
        i = mint("desklamp")
        objects[i], lies[i] = "desklamp", rng.choice(stands)
    if len(objects) != count.total() + ("desklamp" in things and bool(stands)):
        return None                                  # two ids fell on the same spot
    taken = {l for _, l in receptacles.values()}
    start = rng.choice([l for p in points if (l := _location(*p, 0, 30)) not in taken])
    return obj, recep, _problem(kind, obj, recep, scene, receptacles, objects, lies, start)


def _problem(kind, obj, recep, scene, receptacles, objects, lies, start) -> str:
    """PDDL problem of a room: ``receptacles`` id -> (class, location), ``objects`` id -> class, ``lies`` id -> id."""
    rtypes = sorted({c for c, _ in receptacles.values()} | {"sinkbasin", "microwave", "fridge"})
    otypes = sorted(set(objects.values()) | {"sink", "knife", "butterknife"})
    declared = (["agent1 - agent"] + [f"{i} - object" for i in sorted(objects)] + [f"{t}Type - otype" for t in otypes]
                + [f"{t}Type - rtype" for t in rtypes] + [f"{r} - receptacle" for r in sorted(receptacles)]
                + [f"{l} - location" for l in sorted({start} | {l for _, l in receptacles.values()})])
    facts = [f"atLocation agent1 {start}"]
    for r, (c, location) in receptacles.items():
        facts += [f"receptacleType {r} {c}Type", f"receptacleAtLocation {r} {location}"]
        facts += [f"openable {r}"] if c in OPENABLE else []
    facts += [f"canContain {r}Type {o}Type" for r in rtypes for o in otypes if o in CAN_HOLD.get(r, ())]
    able = {"pickupable": PICKUPABLE, "isReceptacleObject": CONTAINERS, "cleanable": CLEANABLE, "heatable": HEATABLE,
            "coolable": COOLABLE, "toggleable": LAMPS, "sliceable": SLICEABLE}
    for i, o in objects.items():
        facts += [f"objectType {i} {o}Type", f"inReceptacle {i} {lies[i]}",
                  f"objectAtLocation {i} {receptacles[lies[i]][1]}"]
        facts += [f"{flag} {i}" for flag, classes in able.items() if o in classes]
    goal = GOALS[kind].replace("{obj}", obj).replace("{recep}", recep)
    lines = "\n    ".join(declared), "\n    ".join(f"({f})" for f in facts)
    return (f"(define (problem generated_{scene})\n(:domain alfred)\n(:objects\n    {lines[0]})\n"
            f"(:init\n    {lines[1]})\n{goal})\n")
