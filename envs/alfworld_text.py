"""ALFWorld as text: the abstract state, what it means (Grammar), and experts that read nothing else.

State.  One line, rebuilt from the observations (feedback and admissible commands, as verl-agent shows them), never
from the engine:

    [at] countertop @1 : mug hot two @1 2 , knife @1 , [by] drawer closed @3 : [hold] apple clean *1 ,
    [seen] bread |cabinet 3 1 , [visited] cabinet shut !3 , sinkbasin !1 , [new] fridge ?1 , drawer ?1 2 ,

``[at]`` is where the agent went last, ``[by]`` receptacles at the same spot, then what they visibly hold, what the
agent holds, what it remembers of other places, and the receptacles it has and has not been to.  Before the first
move it reads ``[room] [new] ..``.  Every class is followed by its condition (hot cool clean sliced on; two = two or
more alike; closed = never opened, shut = closed again, open, new = not looked at) or at once by the separator of
where it is: ``@`` here, ``*`` in hand, ``|`` seen elsewhere (place, then numbers), ``!`` visited, ``?`` not visited.
In the task the separator is ``,``.  The separator is one word with what follows it, so one look-up of a class tells
where and which it is: apart, "the number after ``@``" had as many answers as the page has things.  ``[new]`` is in an
order worth following (``_turn``), so what stands after it is where to look next.

What an experience model can and cannot know.  Every effect follows from state and action, so nearly every edit is
one word.  The exception is what a place holds that this episode has not seen: that is hidden in the game, no model
can infer it.  It is copied from a retrieved transition (``[mem]``) or written out, plausibly at best; scores on
arrivals at new places and on first openings must be read with that in mind.  The same holds for which receptacles
share a spot.

What the words of an official game do not tell, and the state therefore has wrong or not at all:
- what was cool from the start;
- that a thing lies in a second receptacle (it can be sliced at only one of them) or in none (266 games; offered to a
  knife, it is noted as lying in a receptacle of that spot until the hand is free);
- that the bathtubbasin of scene 420 (28 training games) is of the type of a sinkbasin.  The engine offers to clean
  things with it, ``ALFWorldGrammar.admissible`` does not; to the grammar that command does ``nothing``, and its edit is
  the full state.  The effect is in the state all the same: ``observe`` takes it from the engine's words.
"""
from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Iterable, Iterator, Sequence

# ------------------------------------------------------------------------------------------------ what things are

# class of receptacle -> classes of objects that the games' (canContain ..) facts let it hold
_CAN_HOLD = """
armchair: book box cellphone cloth creditcard keychain laptop newspaper pillow remotecontrol
bathtubbasin: cloth dishsponge handtowel soapbar
bed: baseballbat basketball book cellphone laptop pillow tennisracket
cabinet: book bowl box candle cd cloth cup dishsponge glassbottle handtowel kettle ladle mug
    newspaper pan peppershaker plate plunger pot saltshaker soapbar soapbottle spraybottle
    tissuebox toiletpaper vase wateringcan winebottle
cart: candle cloth dishsponge handtowel plunger soapbar soapbottle spraybottle tissuebox
    toiletpaper
coffeemachine: mug
coffeetable: book bowl box candle cellphone creditcard keychain laptop newspaper pen pencil plate
    remotecontrol statue tissuebox vase watch wateringcan
countertop: alarmclock apple book bowl bread butterknife candle cd cellphone cloth creditcard cup
    dishsponge egg fork glassbottle handtowel kettle keychain knife ladle laptop lettuce mug pan
    pen pencil peppershaker plate pot potato remotecontrol saltshaker soapbar soapbottle spatula
    spoon spraybottle statue tissuebox toiletpaper tomato vase winebottle
desk: alarmclock basketball book bowl box cd cellphone cloth creditcard keychain laptop mug pen
    pencil remotecontrol statue tennisracket tissuebox vase watch wateringcan
diningtable: alarmclock apple baseballbat basketball book bowl box bread butterknife candle cd cellphone
    cloth creditcard cup dishsponge egg fork glassbottle kettle keychain knife ladle laptop
    lettuce mug newspaper pan pen pencil peppershaker plate pot potato remotecontrol saltshaker
    soapbottle spatula spoon spraybottle statue tennisracket tissuebox tomato vase watch
    wateringcan winebottle
drawer: book butterknife candle cd cellphone cloth creditcard dishsponge fork handtowel keychain
    knife ladle newspaper pen pencil peppershaker remotecontrol saltshaker soapbar soapbottle
    spatula spoon spraybottle tissuebox toiletpaper watch wateringcan
dresser: alarmclock basketball book bowl box candle cd cellphone cloth creditcard keychain laptop mug
    newspaper pen pencil plate remotecontrol spraybottle statue tennisracket tissuebox
    toiletpaper vase watch wateringcan
fridge: apple bowl bread cup egg glassbottle lettuce mug pan plate pot potato tomato winebottle
garbagecan: apple bread cd cloth dishsponge egg handtowel lettuce newspaper pen pencil potato soapbar
    soapbottle spraybottle tissuebox toiletpaper tomato winebottle
handtowelholder: handtowel
laundryhamper: cloth
microwave: apple bowl bread cup egg glassbottle mug plate potato tomato
ottoman: book box cellphone creditcard keychain laptop newspaper pillow remotecontrol
safe: cd cellphone creditcard keychain statue vase watch
shelf: alarmclock book bowl box candle cd cellphone cloth creditcard cup dishsponge glassbottle
    handtowel kettle keychain mug newspaper pen pencil peppershaker plate pot remotecontrol
    saltshaker soapbar soapbottle spraybottle statue tissuebox toiletpaper vase watch
    wateringcan winebottle
sidetable: alarmclock apple baseballbat basketball book bowl box bread butterknife candle cd cellphone
    cloth creditcard cup dishsponge egg fork handtowel kettle keychain knife laptop lettuce mug
    newspaper pan pen pencil peppershaker plate pot potato remotecontrol saltshaker soapbar
    soapbottle spatula spoon spraybottle statue tennisracket tissuebox toiletpaper tomato vase
    watch wateringcan winebottle
sinkbasin: apple bowl butterknife cloth cup dishsponge egg fork glassbottle handtowel kettle knife
    ladle lettuce mug pan plate pot potato soapbar spatula spoon tomato
sofa: book box cellphone creditcard keychain laptop newspaper pillow remotecontrol
stoveburner: kettle pan pot
tvstand: tissuebox
toilet: candle cloth dishsponge handtowel soapbar soapbottle spraybottle tissuebox toiletpaper
toiletpaperhanger: toiletpaper
towelholder: towel
"""
CAN_HOLD: dict[str, frozenset[str]] = {
    line.split(":")[0]: frozenset(line.split(":")[1].split())
    for line in _CAN_HOLD.replace("\n    ", " ").strip().split("\n")}
OPENABLE = frozenset("fridge cabinet microwave drawer safe".split())
PICKUPABLE = frozenset.union(*CAN_HOLD.values()) | {"boots", "scrubbrush", "teddybear", "papertowelroll"}
CLEANABLE = frozenset("apple bowl butterknife cloth cup dishsponge egg fork kettle knife ladle lettuce mug pan plate "
                      "pot potato soapbar spatula spoon tomato".split())
HEATABLE = frozenset("apple bread cup egg mug plate potato tomato".split())
COOLABLE = frozenset("apple bowl bread cup egg lettuce mug pan plate pot potato tomato winebottle".split())
SLICEABLE = frozenset("apple bread egg lettuce potato tomato".split())
CONTAINERS = frozenset("bowl box cup mug pan plate pot".split())        # objects that could hold others
KNIVES = frozenset("knife butterknife".split())
LAMPS = frozenset("desklamp floorlamp".split())
LAMP_STANDS = ("sidetable", "desk", "dresser", "shelf", "coffeetable")
# task kind -> (condition it asks for, where the object gets it, which objects can)
STATION = {"clean": ("clean", "sinkbasin", CLEANABLE), "heat": ("hot", "microwave", HEATABLE),
           "cool": ("cool", "fridge", COOLABLE)}
KINDS = ("place", "light", "clean", "heat", "cool", "two")
CONDITIONS = ("hot", "cool", "clean", "sliced", "on")
MARKS = frozenset("@*|!?,")


def cls(name: str) -> str:
    """"mug 1" -> "mug"."""
    return name.split(" ")[0]


@lru_cache(maxsize=4096)
def _order(name: str) -> tuple[str, int]:
    word, number = name.split(" ")
    return word, int(number)


# ------------------------------------------------------------------------------------------------ the task

# the two official sentences of each task type
TEMPLATES = {"two": ("put two {obj} in {recep}", "find two {obj} and put them in {recep}"),
             "clean": ("put a clean {obj} in {recep}", "clean some {obj} and put it in {recep}"),
             "heat": ("put a hot {obj} in {recep}", "heat some {obj} and put it in {recep}"),
             "cool": ("put a cool {obj} in {recep}", "cool some {obj} and put it in {recep}"),
             "place": ("put a {obj} in {recep}", "put some {obj} on {recep}"),
             "light": ("look at {obj} under the {recep}", "examine the {obj} with the {recep}")}
_TEXTS = {"place": "put {obj} , in {recep} ,", "two": "put two {obj} , in {recep} ,",
          "clean": "put clean {obj} , in {recep} ,", "heat": "put hot {obj} , in {recep} ,",
          "cool": "put cool {obj} , in {recep} ,", "light": "look at {obj} , under {recep} ,"}


def _pattern(template: str) -> re.Pattern:
    return re.compile(template.format(obj="(?P<obj>[a-z]+)", recep="(?P<recep>[a-z]+)"))


_SENTENCE_PATTERNS = [(kind, _pattern(t)) for kind, templates in TEMPLATES.items() for t in templates]
_TEXT_PATTERNS = [(kind, _pattern(t)) for kind, t in _TEXTS.items()]


@dataclass(frozen=True)
class Wish:
    """What a task asks: ``kind`` is one of KINDS; ``recep`` is the lamp for kind ``light``."""
    kind: str
    obj: str
    recep: str

    @property
    def text(self) -> str:
        return _TEXTS[self.kind].format(obj=self.obj, recep=self.recep)


def task_text(sentence: str) -> str:
    """Official sentence -> task text for look-ups.  Raises ValueError where it is of none of the twelve templates."""
    for kind, pattern in _SENTENCE_PATTERNS:
        if match := pattern.fullmatch(sentence.strip().rstrip(".").lower()):
            return Wish(kind, match["obj"], match["recep"]).text
    raise ValueError(f"not an ALFWorld task sentence: {sentence!r}")


def parse_task(text: str) -> Wish:
    """Inverse of ``Wish.text``.  Raises ValueError on any other text."""
    for kind, pattern in _TEXT_PATTERNS:
        if match := pattern.fullmatch(text):
            return Wish(kind, match["obj"], match["recep"])
    raise ValueError(f"not an ALFWorld task: {text!r}")


# ------------------------------------------------------------------------------------------------ the state

_IN_SIGHT = ("seen", "open", "new")                  # statuses of a receptacle at hand whose contents lie open


@dataclass(frozen=True)
class Page:
    """What the observations of an episode have shown so far.  Names are the game's ("mug 1").

    ``here``: receptacles at the agent's spot, the one it went to first, none before the first move;
    ``status``: receptacle -> new | seen | closed | shut | open; ``inside``: receptacle -> objects known to be in it;
    ``conditions``: object -> conditions, only objects that have any.
    """
    here: tuple[str, ...] = ()
    status: dict[str, str] = field(default_factory=dict)
    inside: dict[str, frozenset[str]] = field(default_factory=dict)
    held: str | None = None
    conditions: dict[str, frozenset[str]] = field(default_factory=dict)

    def visible(self, r: str) -> bool:
        """Its contents lie open before the agent."""
        return r in self.here and self.status[r] in _IN_SIGHT


def _group(names: Iterable[str], conditions: dict[str, frozenset[str]]) -> list[tuple[str, list[str], list[str]]]:
    """Names -> (class, conditions in order, numbers), one entry for all that are alike."""
    groups: dict[tuple, list[str]] = {}
    for name in sorted(names, key=_order):
        word, number = name.split(" ")
        had = conditions.get(name, ())
        groups.setdefault((word, *(c for c in CONDITIONS if c in had)), []).append(number)
    return [(word, had, numbers) for (word, *had), numbers in sorted(groups.items())]


def _items(names: Iterable[str], conditions: dict[str, frozenset[str]], mark: str) -> list[str]:
    words = []
    for word, had, numbers in _group(names, conditions):
        words += [word, *had, *(["two"] if len(numbers) > 1 else []), mark, *numbers, ","]
    return words


def _spot(page: Page) -> list[str]:
    """The ``[at] .. [by] ..`` part, without the leading ``[at]``."""
    words = []
    for i, r in enumerate(page.here):
        word, number = r.split(" ")
        status = [] if page.status[r] == "seen" else [page.status[r]]
        words += ["[by]"] * (i > 0) + [word, *status, "@", number, ":"]
        if page.visible(r):
            words += _items(page.inside.get(r, ()), page.conditions, "@")
    return words


def _out_of_sight(page: Page) -> list[tuple[str, list[str], str, list[str]]]:
    """(class, conditions, receptacle, numbers) of what was seen and does not lie open before the agent, as listed."""
    found = [(word, had, r, numbers) for r, names in page.inside.items() if not page.visible(r)
             for word, had, numbers in _group(names, page.conditions)]
    return sorted(found, key=lambda one: (one[0], one[1], _order(one[2])))


def _elsewhere(page: Page) -> list[str]:
    """The ``[seen] ..`` part, without its head."""
    return [w for word, had, r, numbers in _out_of_sight(page) for w in (word, *had, "|", *r.split(" "), *numbers, ",")]


def _turn(page: Page):
    """Sort key of classes of receptacles for a search: those of which fewest were visited, what must be opened counting
    as one more; then those that can hold most kinds of things; then by name."""
    tried = Counter(cls(r) for r, status in page.status.items() if status != "new")
    return lambda word: (tried[word] + (word in OPENABLE), -len(CAN_HOLD.get(word, ())), word)


_APART, _TOGETHER = re.compile(r" ([@*|!?]) (?=\S)"), re.compile(r" ([@*|!?])(?=\S)")


def joined(words: Iterable[str]) -> str:
    """Words -> text, every separator in one word with what follows it: one look-up of a class tells both."""
    return _APART.sub(r" \1", " ".join(words))


def split(text: str) -> list[str]:
    """Inverse of ``joined``."""
    return _TOGETHER.sub(r" \1 ", text).split(" ")


def render(page: Page) -> str:
    """Page -> abstract state."""
    return joined(_words(page))


def _words(page: Page) -> list[str]:
    words = ["[at]", *_spot(page)] if page.here else ["[room]"]
    if page.held:
        words += ["[hold]", *_items([page.held], page.conditions, "*")]
    if seen := _elsewhere(page):
        words += ["[seen]", *seen]
    away = [r for r in page.status if r not in page.here]
    turn = _turn(page)
    for section, mark, chosen, order in (
            ("[visited]", "!", [r for r in away if page.status[r] != "new"], lambda group: group),
            ("[new]", "?", [r for r in away if page.status[r] == "new"], lambda group: turn(group[0]))):
        groups: dict[tuple[str, str], list[str]] = {}
        for r in sorted(chosen, key=_order):
            groups.setdefault((cls(r), page.status[r]), []).append(r.split(" ")[1])
        if groups:
            words.append(section)
            for word, status in sorted(groups, key=order):
                words += [word, *([status] if status not in ("seen", "new") else []), mark, *groups[word, status], ","]
    return words


_WORD, _NUMBER = re.compile(r"[a-z]+"), re.compile(r"[1-9][0-9]{0,2}")
_STATUS = {"new", "seen", "closed", "shut", "open"}
_SECTION = re.compile(r"\[(?:at|by|room|hold|seen|visited|new)\]")


def _entries(words: Sequence[str], mark: str) -> list[tuple[str, list[str], list[str]]]:
    """``class conditions.. mark rest.. ,`` repeated -> (class, conditions, rest)."""
    out, entry = [], []
    for w in words:
        if w != ",":
            entry.append(w)
            continue
        if mark not in entry[1:-1]:
            raise ValueError(f"not an entry with {mark!r}: {' '.join(entry)!r}")
        cut = entry.index(mark)
        out.append((entry[0], entry[1:cut], entry[cut + 1:]))
        entry = []
    if entry:
        raise ValueError(f"an entry without its comma: {' '.join(entry)!r}")
    return out


def _named(name: str) -> bool:
    word, _, number = name.partition(" ")
    return bool(_WORD.fullmatch(word) and _NUMBER.fullmatch(number))


def _parse(words: list[str]) -> Page:
    here, status, inside, conditions, held = [], {}, {}, {}, None
    cuts = [i for i, w in enumerate(words) if _SECTION.fullmatch(w)] + [len(words)]
    if not words or cuts[0] != 0:
        raise ValueError("a state starts with [at] or [room]")

    def names(word: str, had: list[str], numbers: list[str]) -> frozenset[str]:
        found = frozenset(f"{word} {n}" for n in numbers)
        had = frozenset(had) - {"two"}
        if not found or not had <= set(CONDITIONS) or not all(map(_named, found)):
            raise ValueError(f"not an item: {word} {sorted(had)} {numbers}")
        for name in found if had else ():
            conditions[name] = had
        return found

    for start, end in zip(cuts, cuts[1:]):
        section, body = words[start], words[start + 1:end]
        if section in ("[at]", "[by]"):
            if ":" not in body or len(place := body[:body.index(":")]) not in (3, 4):
                raise ValueError(f"not a place: {' '.join(body)!r}")
            r = f"{place[0]} {place[-1]}"
            here.append(r)
            status[r] = place[1] if len(place) == 4 else "seen"
            for entry in _entries(body[len(place) + 1:], "@"):
                inside[r] = inside.get(r, frozenset()) | names(*entry)
        elif section == "[hold]":
            held, = (name for entry in _entries(body, "*") for name in names(*entry))
        elif section == "[seen]":
            for word, had, rest in _entries(body, "|"):
                r = " ".join(rest[:2])
                inside[r] = inside.get(r, frozenset()) | names(word, had, rest[2:])
        elif section in ("[visited]", "[new]"):
            for word, state, numbers in _entries(body, "!" if section == "[visited]" else "?"):
                for n in numbers:
                    status[f"{word} {n}"] = state[0] if state else "seen" if section == "[visited]" else "new"
    if not (set(status.values()) <= _STATUS and set(inside) <= set(status) and all(map(_named, status))):
        raise ValueError("unknown places or conditions of places")
    return Page(tuple(here), status, inside, held, conditions)


@lru_cache(maxsize=1024)
def parse(state: str) -> Page:
    """Inverse of ``render``; pages are shared, so never change one.  Raises ValueError on text that ``render`` cannot
    have written."""
    try:
        page = _parse(split(state))
        if render(page) == state:
            return page
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"not an ALFWorld state ({error!r}): {state[:80]!r}") from None
    raise ValueError(f"not an ALFWorld state: {state[:80]!r}")


# ------------------------------------------------------------------------------------------------ what actions do

def commands(page: Page) -> dict[str, tuple[str, ...]]:
    """Admissible command -> (verb, arguments), as far as the page tells; without ``help``."""
    c: dict[str, tuple[str, ...]] = {"look": ("look",), "inventory": ("inventory",)}
    held = page.held
    for r in page.status:
        if r not in page.here:
            c[f"go to {r}"] = ("go", r)
    for r in page.here:
        c[f"examine {r}"] = ("examine", r)
        if page.status[r] in ("closed", "shut"):
            c[f"open {r}"] = ("open", r)
        elif page.status[r] == "open":
            c[f"close {r}"] = ("close", r)
        for o in page.inside.get(r, ()):
            if cls(o) in LAMPS:
                c[f"use {o}"] = ("use", o)
            if held is None and cls(o) in PICKUPABLE and page.visible(r):
                c[f"take {o} from {r}"] = ("take", o, r)
            if held is not None and cls(held) in KNIVES and cls(o) in SLICEABLE:
                c[f"slice {o} with {held}"] = ("slice", o)
        if held is not None:
            if cls(held) in CAN_HOLD.get(cls(r), ()) and page.visible(r):
                c[f"move {held} to {r}"] = ("move", held, r)
            for verb, (_, station, fit) in STATION.items():
                if cls(r) == station and cls(held) in fit:
                    c[f"{verb} {held} with {r}"] = (verb, held)
    if held is not None:
        c[f"examine {held}"] = ("inspect", held)
    return c


@lru_cache(maxsize=1024)
def offered(state: str) -> dict[str, tuple[str, ...]]:
    """``commands`` of a state's text; shared, so never change it."""
    return commands(parse(state))


def _gain(had: frozenset[str], gained: str) -> frozenset[str]:
    """The conditions of a thing with one more: what gets hot is no longer cool, and the other way."""
    return had - ({"hot", "cool"} if gained in ("hot", "cool") else set()) | {gained}


def apply(page: Page, action: str, past: Sequence[Page] = ()) -> tuple[str, Page] | None:
    """(verb, page after the action) with nothing hidden coming to light; None where the action does nothing.

    A place not seen before is taken to be closed if its class opens, else empty.  ``past`` are earlier pages of the
    episode: they tell which receptacles share a spot.
    """
    known = commands(page).get(action)
    if known is None:
        return None
    verb, *rest = known
    status, inside, conditions = dict(page.status), dict(page.inside), dict(page.conditions)
    here, held = page.here, page.held
    if verb == "go":
        r = rest[0]
        others = next((p.here for p in past if r in p.here), ())
        here = (r, *sorted((x for x in others if x != r), key=_order))
    if verb in ("go", "examine") and status[rest[0]] == "new":
        status[rest[0]] = "closed" if cls(rest[0]) in OPENABLE else "seen"
    elif verb == "open":
        status[rest[0]] = "open"
    elif verb == "close":
        status[rest[0]] = "shut"
    elif verb == "take":
        held = rest[0]
        inside[rest[1]] = inside[rest[1]] - {held}
    elif verb == "move":
        inside[rest[1]] = inside.get(rest[1], frozenset()) | {held}
        held = None
    elif verb in ("use", "slice", *STATION):
        gained = STATION[verb][0] if verb in STATION else {"use": "on", "slice": "sliced"}[verb]
        conditions[rest[0]] = _gain(conditions.get(rest[0], frozenset()), gained)
    return verb, Page(here, status, inside, held, conditions)


_NAME = r"([a-z]+ [0-9]+)"
_SHOWN = (re.compile(rf"The {_NAME} is (closed)\.()"), re.compile(rf"The {_NAME} is (open)\. In it, you see (.*?)\."),
          re.compile(rf"On the {_NAME}, you (see) (.*?)\."))
_TAKE = re.compile(rf"take {_NAME} from {_NAME}")
_BLINDLY = re.compile(rf"(?:use|slice) {_NAME}(?: with {_NAME})?")            # offered also for what is not in sight
_TREATED = re.compile(rf"You (heat|clean|cool) the {_NAME} using the {_NAME}\.")
_INSPECTED = re.compile(rf"This is a ((?:(?:hot|cold|cool|clean|sliced|and) )+){_NAME}\.")


def first_page(raw: str) -> Page:
    """The introduction -> page."""
    line = raw.split("Looking quickly around you, you see ", 1)[1].split("\n", 1)[0]
    return Page(status={r: "new" for r in re.findall(_NAME, line)})


def _may_hide(r: str, status: str, name: str) -> bool:
    """May a receptacle that was not looked into hold this thing?  Lamps stand on what does not open."""
    return status == "new" if cls(name) in LAMPS else (
        status in ("new", "closed") and cls(name) in CAN_HOLD.get(cls(r), ()))


def observe(page: Page, action: str, raw: str, admissible: Sequence[str]) -> Page:
    """Page, action, and what the engine said and offered afterwards -> page.  The only door from engine to state."""
    if raw == "Nothing happens.":
        return page
    done = apply(page, action)
    page = done[1] if done else page
    status, inside, conditions = dict(page.status), dict(page.inside), dict(page.conditions)
    for pattern in _SHOWN:
        for r, state, names in pattern.findall(raw):
            if state == "closed":
                status[r] = "shut" if status[r] in ("shut", "open") else "closed"
            else:
                status[r] = "open" if state == "open" else "seen"
                inside[r] = frozenset(re.findall(_NAME, names))
    for words, name in _INSPECTED.findall(raw):
        conditions[name] = frozenset("cool" if w == "cold" else w for w in words.split() if w != "and")
    for verb, name, _ in _TREATED.findall(raw):      # the rules know it already, but for a station of another name
        conditions[name] = _gain(conditions.get(name, frozenset()), STATION[verb][0])
    # Receptacles that "go to" is not offered for are at the agent's spot; what is offered there tells what is in them.
    elsewhere = {c[6:] for c in admissible if c.startswith("go to ")}
    here = [r for r in status if r not in elsewhere]
    here.sort(key=lambda r: (r not in page.here[:1], *_order(r)))
    for command in admissible:
        if command.startswith("open ") and status[command[5:]] == "new":
            status[command[5:]] = "closed"
        elif match := _TAKE.fullmatch(command):
            inside[match[2]] = inside.get(match[2], frozenset()) | {match[1]}
    for command in admissible:
        if match := _BLINDLY.fullmatch(command):
            if not any(match[1] in inside.get(r, ()) for r in here):
                r = next((r for r in here if _may_hide(r, status[r], match[1])), here[0])
                inside[r] = inside.get(r, frozenset()) | {match[1]}
    if page.held is None:                            # all that lies open and can be taken is offered: so no guess stays
        takes = {c for c in admissible if c.startswith("take ")}
        for r in here:
            if status[r] in _IN_SIGHT:
                inside[r] = frozenset(o for o in inside.get(r, ())
                                      if cls(o) not in PICKUPABLE or f"take {o} from {r}" in takes)
    return Page(tuple(here), status, inside, page.held, conditions)


# ------------------------------------------------------------------------------------------------ the grammar

_EDITS = {"go": "[arrive]", "open": "[open]", "close": "[close]", "take": "[take]", "move": "[put]", "use": "[use]",
          "heat": "[heat]", "clean": "[clean]", "cool": "[cool]", "slice": "[slice]", "examine": "[look]",
          "inspect": "[look]", "look": "[look]", "inventory": "[look]"}


def _with_spot(page: Page, spot: str) -> Page:
    """The page with another ``[at] .. [by] ..`` part: places, their status, and what they visibly hold."""
    shown = _parse(["[at]", *split(spot)])
    if shown.here[:1] != page.here[:1] or not set(shown.here) <= set(page.status):
        raise ValueError(f"not the place that the action leads to: {spot[:80]!r}")
    status = page.status | shown.status
    new = replace(page, here=shown.here, status=status)
    inside = page.inside | {r: shown.inside.get(r, frozenset()) for r in shown.here if new.visible(r)}
    told = {o for names in shown.inside.values() for o in names}
    conditions = {o: c for o, c in page.conditions.items() if o not in told} | shown.conditions
    return replace(new, inside=inside, conditions=conditions)


def _shared(past: Sequence[str]) -> list[Page]:
    """The earlier pages on which several receptacles shared the agent's spot."""
    return [parse(p) for p in past if " [by] " in p]


def _from_memory(page: Page, r: str, memory: Sequence[str]) -> str | None:
    """The agent's spot with r, one of its receptacles, as a retrieved page shows it: the first page that shows r in the
    same condition, else the first one with a receptacle of its class in that condition; None where there is none.

    It is made to fit this episode.  A thing that is known to be elsewhere gets a number of its own, nothing of another
    episode is hot or clean, and receptacles beside r only come along where they have not been seen elsewhere.
    """
    shown = [(x != r, i, x, other) for i, other in enumerate(map(parse, memory)) for x in other.here
             if cls(x) == cls(r) and other.status[x] == page.status[r]]
    if not shown:
        return None
    _, _, source, other = min(shown, key=lambda s: s[:2])
    beside = [x for x in other.here if source == r == other.here[0] == page.here[0]
              and x not in page.here and page.status.get(x) == "new"]
    taken = {o for x, names in page.inside.items() if x != r and x not in beside for o in names} | {page.held}
    status, inside = dict(page.status), dict(page.inside)
    for x, like in [(r, source)] + [(x, x) for x in beside]:
        status[x], names = other.status[like], set(inside.get(x, ()))
        for o in sorted(other.inside.get(like, ()), key=_order) if other.visible(like) else ():
            word, number = _order(o)
            while f"{word} {number}" in taken:
                number += 1
            names.add(f"{word} {number}")
            taken.add(f"{word} {number}")
        inside[x] = frozenset(names)
    return joined(_spot(Page((*page.here, *beside), status, inside, conditions=page.conditions)))


def _room(page: Page) -> str:
    """Kind of room, by what stands in it."""
    present = {cls(r) for r in page.status}
    for kind, sign in (("kitchen", "fridge"), ("bathroom", "toilet"), ("bedroom", "bed")):
        if sign in present:
            return kind
    return "living room"


class ALFWorldGrammar:
    """The text side of ALFWorld (protocol ``envs.Grammar``).  States of the training data teach it which things are
    found in which kind of room; all else follows from the rules.

    A step changes the world by rule, so what a step earns is read on the page it leads to: ``judge`` takes that page,
    ``outcome`` says what it means, ``decides`` which steps may end an episode.
    """
    verdict_words = MARKS | {"ok", "no", "two", *CONDITIONS}
    open_vocabulary = False
    parse = staticmethod(parse)
    render = staticmethod(render)

    def __init__(self, texts: Iterable[str] = ()):
        self.found: dict[str, set[str]] = {}         # kind of room -> classes of things seen there
        for text in texts:
            if text.startswith("[at] "):
                page = parse(text)
                things = {cls(o) for names in page.inside.values() for o in names}
                self.found.setdefault(_room(page), set()).update(things)

    def task_parts(self, task: str, start: str) -> tuple[frozenset[str], frozenset[str]]:
        """(action types, parts) of a task for the room of its first state; for the curriculum.

        Raises ValueError with the reason in a word where the text is no task or the room cannot carry it: as far as
        the room's receptacles and the training data tell, what lies in this very room is hidden.
        """
        try:
            wish = parse_task(task)
        except ValueError:
            raise ValueError("malformed") from None
        page = parse(start)
        present, known = {cls(r) for r in page.status}, self.found.get(_room(page), PICKUPABLE | LAMPS)
        if wish.obj not in PICKUPABLE & known:
            raise ValueError("object")
        if wish.kind == "light":
            if wish.recep not in LAMPS & known:
                raise ValueError("lamp")
        elif wish.recep not in present or wish.obj not in CAN_HOLD.get(wish.recep, ()):
            raise ValueError("receptacle")
        if wish.kind in STATION and (STATION[wish.kind][1] not in present or wish.obj not in STATION[wish.kind][2]):
            raise ValueError("station")
        verbs = {"light": {"use"}, "place": {"move"}, "two": {"move", "again"}}.get(wish.kind, {"move", wish.kind})
        return frozenset({"go", "take"} | verbs), frozenset({wish.obj, wish.recep})

    def admissible(self, state: str) -> list[str]:
        return sorted(offered(state))

    def kind(self, state: str) -> str:
        """``room`` | ``at`` | ``at new`` | ``at open`` | ``at closed`` | ``at shut``."""
        page = parse(state)
        if not page.here:
            return "room"
        status = page.status[page.here[0]]
        return "at" if status == "seen" else f"at {status}"

    def move(self, state: str, action: str) -> str:
        """What a step does, for tables: its verb; ``nothing``; ``hidden: go``, ``hidden: open`` where it ``reveals``."""
        verb = offered(state).get(action, ("nothing",))[0]
        return f"hidden: {verb}" if self.reveals(state, action) else "look" if _EDITS.get(verb) == "[look]" else verb

    def reveals(self, state: str, action: str) -> bool:
        """Does the action show what this episode has not seen: a place for the first time, or what a closed one
        holds?  No model can know that (docstring of this file)."""
        page = parse(state)
        verb, *rest = offered(state).get(action, ("nothing",))
        return (verb, page.status.get(rest[0]) if rest else None) in (("go", "new"), ("examine", "new"), ("open", "closed"))

    def key(self, state: str, action: str) -> str:
        """The action's verb, or ``nothing`` where it cannot be done: these do the same everywhere.  Where something
        hidden comes to light (``reveals``), the whole action and the kind of room (its receptacles): the same place of the
        same room is what a memory can help with."""
        if action not in offered(state):
            return "nothing"
        if not self.reveals(state, action):
            return offered(state)[action][0]
        status = parse(state).status
        rooms = [f"{word} {len(numbers)}" for word, _, numbers in _group(status, {})]
        return " ".join([action, status[offered(state)[action][1]], *rooms])

    def diff(self, state: str, action: str, next_state: str, memory: Sequence[str] = (),
             past: Sequence[str] = ()) -> str:
        """``[same]``; ``[arrive]``, ``[open]``, ``[take]``, ``[put]`` .. for what the rules make of the action; with
        ``[mem]`` the place looks as in the nearest retrieved page; with a place, as written; else the full state.

        Lossy where something hidden comes to light (``reveals``): ``[mem]`` then stands for whatever is there, if
        memory has a place of that kind."""
        if next_state == state:
            return "[same]"
        if done := apply(parse(state), action, _shared(past)):
            verb, page = done
            if self.reveals(state, action) and _from_memory(page, offered(state)[action][1], memory):
                return f"{_EDITS[verb]} [mem]"
            if render(page) == next_state:
                return _EDITS[verb]
            spot = joined(_spot(parse(next_state)))
            try:
                if render(_with_spot(page, spot)) == next_state:
                    return f"{_EDITS[verb]} {spot}"
            except ValueError:
                pass
        return next_state

    def patch(self, state: str, action: str, edit: str, memory: Sequence[str] = (), past: Sequence[str] = ()) -> str:
        """Inverse of ``diff``.  Raises ValueError on text that is neither an edit that fits the action nor a state."""
        if edit == "[same]":
            return state
        word, _, spot = edit.partition(" ")
        if word not in _EDITS.values():
            parse(edit)
            return edit
        done = apply(parse(state), action, _shared(past))
        if done is None or _EDITS[done[0]] != word:
            raise ValueError(f"{word} is not what {action[:40]!r} does here")
        page = done[1]
        if spot == "[mem]":
            spot = self.reveals(state, action) and _from_memory(page, offered(state)[action][1], memory)
            if not spot:
                raise ValueError("[mem] where nothing new is seen, or without a retrieved page of such a place")
        if spot:
            page = _with_spot(page, spot)
        text = render(page)
        parse(text)
        return text

    def judge(self, task: str, state: str) -> list[tuple[str, str, bool]]:
        """The wishes of a task on the page that an action has led to: the object as wanted and where it is wanted, then
        the agent at such a receptacle; for the lamp: the object in hand, then the lamp at hand and on.

        Success is all met.  Exact but for what no observation shows (docstring of this file): an object that was cool
        from the start, one that the game has lying in a second receptacle the agent has not looked into, and one that
        it has in none, while a knife is in hand.
        """
        page = parse(state)
        return [(word, joined([word, *_entry(page, word)]).split(" ")[1], met)
                for word, met in self._checks(parse_task(task), page)]

    @staticmethod
    def _checks(wish: Wish, page: Page) -> list[tuple[str, bool]]:
        if wish.kind == "light":
            lamps = [o for r in page.here for o in page.inside.get(r, ()) if cls(o) == wish.recep]
            return [(wish.obj, page.held is not None and cls(page.held) == wish.obj),
                    (wish.recep, any("on" in page.conditions.get(o, ()) for o in lamps))]
        condition = STATION[wish.kind][0] if wish.kind in STATION else None
        most = max((sum(cls(o) == wish.obj and (condition is None or condition in page.conditions.get(o, ()))
                        for o in names) for r, names in page.inside.items() if cls(r) == wish.recep), default=0)
        there = most >= (2 if wish.kind == "two" else 1)
        return [(wish.obj, there), (wish.recep, there or any(cls(r) == wish.recep for r in page.here))]

    def outcome(self, task: str, state: str, action: str, next_state: str) -> tuple[bool, bool]:
        """(done, success) by rule on the text: an ALFWorld episode ends when, and only when, its task is fulfilled."""
        won = next_state != state and all(met for *_, met in self.judge(task, next_state))
        return won, won

    def decisive(self, state: str, next_state: str) -> str:
        """The page that decides: the one after the step."""
        return next_state

    def decides(self, state: str, action: str) -> bool:
        """May this step fulfil a task?  Nearly all tasks end with an object put down or a lamp switched on."""
        return offered(state).get(action, ("nothing",))[0] in ("move", "use")

    def explain(self, task: str, state: str, action: str, next_state: str) -> str:
        """What the action does and, where it could fulfil the task, what that takes, one look-up after the other up to
        the first that fails; all are made in the state *before* the action, which is what the model reads."""
        page = parse(state)
        verb, *rest = offered(state).get(action, ("nothing",))
        words = [verb]
        if verb in ("go", "open"):
            words.append("unknown" if page.status[rest[0]] in ("new", "closed") else "known")
        for look_up, met in self._chain(parse_task(task), page, verb, rest, next_state):
            words += [*look_up, "ok" if met else "no"]
            if not met:
                break
        return joined(words)

    @staticmethod
    def _chain(wish: Wish, page: Page, verb: str, rest: Sequence[str],
               next_state: str) -> Iterator[tuple[list[str], bool]]:
        """(look-up, does it speak for success?) of a step; nothing for a step that cannot end the episode."""
        held = bool(page.held) and cls(page.held) == wish.obj
        if verb == "move" and wish.kind == "two":
            yield [wish.obj, *_place_of(page, wish.obj)], any(cls(o) == wish.obj for o in page.inside.get(rest[1], ()))
            yield [wish.obj, "[hold]", cls(rest[0])], held
        elif verb in (("use", "go") if wish.kind == "light" else ("move",)):
            yield [wish.obj, *_place_of(page, wish.obj, held_first=True)], held
        if verb == "move" and wish.kind in STATION:
            condition, had = STATION[wish.kind][0], _items([page.held], page.conditions, "*")
            after = had[had.index(condition) + 1:had.index("*") + 2] if condition in had else [wish.obj]
            yield [condition, *after], condition in had
        if verb == "move" and wish.kind != "light":
            yield ["in", wish.recep, "to", cls(rest[1])], cls(rest[1]) == wish.recep
        if wish.kind == "light" and verb in ("use", "take"):
            asked = ["under", wish.recep] if verb == "use" else [wish.obj]
            yield [*asked, verb, cls(rest[0])], cls(rest[0]) == asked[-1]
        if wish.kind == "light" and verb in ("take", "go"):
            there = page.here if verb == "take" else parse(next_state).here
            lamps = [(o, r) for o, r in _lamps(page, wish.recep) if r in there and "on" in page.conditions.get(o, ())]
            shown = _as_seen(page, *lamps[0]) if lamps else _place_of(page, wish.recep)
            yield [wish.recep, *shown], bool(lamps)

    def consider(self, task: str, state: str, history: Sequence[str] = ()) -> str:
        """What an agent should look at before it acts, in look-up form, much as the state has it; at the end, the command
        that follows from it (``advice``).

        With a wrong thing in hand: that thing, and where to put it.  With the right one: the station that it still
        needs, or the goal, or the lamp.  With none: where it is; of a pair, what is found first may be ``placed``.  What
        was not seen yet is followed by ``,``, as in the task, and where to look next.
        """
        page, wish = parse(state), parse_task(task)
        step = _next_step(wish, page)
        return joined([*self._looked_up(wish, page), *([step] if step else [])])

    @staticmethod
    def _looked_up(wish: Wish, page: Page) -> list[str]:
        held = _items([page.held], page.conditions, "*")[:-1] if page.held else []
        if not held:
            o, r = _source(wish, page) or (None, None)
            done, p = [], _placed(wish, page)
            if p and (o is None or _listing(page, p) < _listing(page, r)):     # of a pair: what is found first is there
                done = [*_found(wish, page, _one_of(page, p, wish.obj), p), "placed"]
            return [*done, *(_found(wish, page, o, r) if o else [wish.obj, ",", *_search_words(page)])]
        if held[0] != wish.obj:
            r = _aside(page)
            return ["[hold]", *held, *(_at(page, r) if r else [])]
        if wish.kind != "light":
            return [*held, *_listed(page, _goal(wish, page))]
        o, r = next(iter(_lamps(page, wish.recep)), (None, None))
        if o is None:
            return [*held, wish.recep, ",", *_search_words(page)]
        return [*held, wish.recep, *_as_seen(page, o, r)]

    def advice(self, task: str, state: str, history: Sequence[str] = ()) -> str | None:
        """The command that the thought ends with: the explorer's; None where nothing is left to look into."""
        return _next_step(parse_task(task), parse(state))

    def varied(self, task: str, state: str, action: str, history: Sequence[str],
               rng: random.Random) -> tuple[str, list[str]]:
        """Another task for a step that followed its thought: about the thing in hand, or about one that the state shows,
        here or elsewhere, of a pair also one that is placed.  Explorers fetch what they see, so demonstrations hold few
        steps where the wanted thing was seen before; the history stays as it is."""
        page = parse(state)
        wish = self._other_wish(page, rng) if action == self.advice(task, state) else None
        if wish is None or all(met for _, met in self._checks(wish, page)) or _next_step(wish, page) is None:
            return task, list(history)                         # there the episode had ended, or nothing can be done
        return wish.text, list(history)

    @staticmethod
    def _other_wish(page: Page, rng: random.Random) -> Wish | None:
        places, things = sorted({cls(r) for r in page.status}), {cls(o) for names in page.inside.values() for o in names}
        lamps, seen = sorted(things & LAMPS or LAMPS), sorted(things & PICKUPABLE)
        obj = cls(page.held) if page.held and rng.random() < 0.7 else rng.choice(seen) if seen else None
        kind = rng.choice([k for k in KINDS if k not in STATION or (obj in STATION[k][2] and STATION[k][1] in places)])
        if kind == "light":
            return Wish(kind, obj, rng.choice(lamps)) if obj else None
        if kind == "two" and rng.random() < 0.5:               # where one may be placed already
            places = sorted({cls(r) for r, names in page.inside.items() if any(cls(o) == obj for o in names)})
        fitting = [r for r in places if obj in CAN_HOLD.get(r, ())]
        return Wish(kind, obj, rng.choice(fitting)) if fitting else None

    def counterfactual(self, task: str, state: str, action: str, next_state: str, rng: random.Random) -> str | None:
        """Another task for the same step, where there are such: half of the time one that it fulfils, else one of the
        wrong kind, object or receptacle.  Tasks that were fulfilled before are left out: there the episode had ended."""
        page, after = parse(state), parse(next_state)
        verb, *rest = offered(state)[action]
        held, recep = page.held and cls(page.held), cls(rest[-1])
        lamps = verb == "use"

        def kinds(obj: str) -> list[str]:
            return ["light"] if lamps else ["place", "two", *(k for k, (_, _, fit) in STATION.items() if obj in fit)]

        def fits(obj: str, where: str) -> bool:
            return lamps or obj in CAN_HOLD.get(where, ())

        objects = sorted({cls(o) for names in after.inside.values() for o in names} & PICKUPABLE - {held})
        places = sorted((LAMPS if lamps else {cls(r) for r in page.status}) - {recep})
        near = [[Wish(kind, held, recep) for kind in kinds(held)] if held else [],
                [Wish(rng.choice(kinds(o)), o, recep) for o in objects if fits(o, recep)],
                [Wish(rng.choice(kinds(held)), held, place) for place in places if held and fits(held, place)]]
        right, wrong = [], []
        for group in near:
            failed = []
            for wish in group:
                before, now = (all(met for _, met in self._checks(wish, p)) for p in (page, after))
                told = all(met for _, met in self._chain(wish, page, verb, rest, next_state))
                if wish.text != task and not before and now == told:       # else something came to light by chance
                    (right if now else failed).append(wish)
            wrong += [failed] if failed else []
        if right and (rng.random() < 0.5 or not wrong):
            rare = [w for w in right if w.kind in (*STATION, "two")]
            return rng.choice(rare if rare and rng.random() < 2 / 3 else right).text
        return rng.choice(rng.choice(wrong)).text if wrong else None

    def content_words(self, text: str) -> set[str]:
        """Things to carry; no lamps, knives or receptacles.  Exchanged, they must be read off the page, not remembered;
        what can be heated, cleaned or put where is learned from the rows as they are."""
        return {w for w in text.split(" ") if w in PICKUPABLE} - KNIVES - LAMPS


def _entry(page: Page, word: str, held_first: bool = False) -> list[str]:
    """What follows a class in the state, up to the end of its entry: in sight before in hand (or the other way) before
    elsewhere; the task's own ``,`` if the state lacks it.  A receptacle that only tells where a thing was seen is none."""
    spot = _spot(page)
    held = _items([page.held], page.conditions, "*") if page.held else []
    for words in ((held, spot) if held_first else (spot, held)) + (_words(page),):
        for i, w in enumerate(words):
            if w == word and words[i - 1] != "|":
                return words[i + 1:next(j for j in range(i, len(words)) if words[j] in (",", ":"))]
    return [","]


def _place_of(page: Page, word: str, held_first: bool = False) -> list[str]:
    """``_entry`` up to the word of the separator: the conditions, and whether it is here, in hand or elsewhere."""
    entry = _entry(page, word, held_first)
    return entry[:next(i for i, w in enumerate(entry) if w in MARKS) + 2]


def _listed(page: Page, r: str) -> list[str]:
    """A receptacle as the state lists it: ``drawer open @3``, ``drawer closed !2``, ``desk ?1``; in words for ``joined``."""
    word, number = r.split(" ")
    mark = "@" if r in page.here else "?" if page.status[r] == "new" else "!"
    return [word, *([page.status[r]] if page.status[r] != "seen" and mark != "?" else []), mark, number]


def _at(page: Page, r: str) -> list[str]:
    """The same behind its section's head, where that is what to look up: ``[at] drawer open @3``, ``[new] desk ?1``."""
    head = ["[at]" if r == page.here[0] else "[by]"] if r in page.here else ["[new]"] if page.status[r] == "new" else []
    return [*head, *_listed(page, r)]


def _as_seen(page: Page, o: str, r: str) -> list[str]:
    """What follows the class of an object in a receptacle: ``on @1``, or elsewhere ``|desk 2``."""
    had = [c for c in CONDITIONS if c in page.conditions.get(o, ())]
    return [*had, "@", o.split(" ")[1]] if page.visible(r) else [*had, "|", r]


def _listing(page: Page, r: str) -> tuple:
    """Sort key of receptacles by where the state lists what is in them: at hand, then elsewhere by name."""
    return (0, page.here.index(r), ()) if page.visible(r) else (1, 0, _order(r))


def _first(page: Page, word: str) -> str:
    """The first receptacle of a class that the state lists: at hand, else visited, else new."""
    return min((r for r in page.status if cls(r) == word), key=lambda r: (
        page.here.index(r) if r in page.here else len(page.here), page.status[r] == "new", page.status[r], _order(r)))


def _placed(wish: Wish, page: Page) -> str | None:
    """Where the first of a pair lies already: the receptacle of the wanted class that holds most of them."""
    there = {r: sum(cls(o) == wish.obj for o in names) for r, names in page.inside.items() if cls(r) == wish.recep}
    found = [r for r, n in there.items() if n and wish.kind == "two"]
    return min(found, key=lambda r: (-there[r], _order(r))) if found else None


def _one_of(page: Page, r: str, word: str) -> str | None:
    """The object of a class that is listed first in a receptacle."""
    return next((f"{word} {numbers[0]}" for other, _, numbers in _group(page.inside.get(r, ()), page.conditions)
                 if other == word), None)


def _found(wish: Wish, page: Page, o: str, r: str) -> list[str]:
    """The look-up of an object in a receptacle; for a pair, also that of where it shall be, against where it is."""
    if page.visible(r):
        alike = [x for x in page.inside[r] if cls(x) == wish.obj and page.conditions.get(x) == page.conditions.get(o)]
        item = _items(alike, page.conditions, "@")
        words = item[:item.index("@") + 2]
    else:
        words = [wish.obj, *_as_seen(page, o, r)]
    words += _at(page, r) if r in page.here else []
    return words + (["in", wish.recep, "to", cls(r)] if wish.kind == "two" else [])


def _source(wish: Wish, page: Page) -> tuple[str, str] | None:
    """(object to fetch, its receptacle), the first that the state lists; not from where a pair grows."""
    placed = _placed(wish, page)
    for r in page.here:
        if page.visible(r) and r != placed and (o := _one_of(page, r, wish.obj)):
            return o, r
    return next(((f"{word} {numbers[0]}", r) for word, _, r, numbers in _out_of_sight(page)
                 if word == wish.obj and r != placed), None)


def _untreated(wish: Wish, page: Page) -> bool:
    """Must the object in hand still be heated, cooled or cleaned?"""
    return wish.kind in STATION and STATION[wish.kind][0] not in page.conditions.get(page.held, ())


def _goal(wish: Wish, page: Page) -> str:
    """Where the object in hand must go next: to the station that the task asks for, then to its receptacle."""
    return _first(page, STATION[wish.kind][1]) if _untreated(wish, page) else (
        _placed(wish, page) or _first(page, wish.recep))


def _lamps(page: Page, word: str) -> list[tuple[str, str]]:
    """(lamp, its receptacle), those at hand first, then those that are on."""
    return sorted(((o, r) for r, names in page.inside.items() for o in names if cls(o) == word), key=lambda one: (
        one[1] not in page.here, "on" not in page.conditions.get(one[0], ()), _order(one[1]), _order(one[0])))


def _aside(page: Page) -> str | None:
    """Where the thing in hand may be put down, the nearest such place."""
    spots = [r for r in page.status if cls(page.held) in CAN_HOLD.get(cls(r), ())]
    return min(spots, key=lambda r: (r not in page.here, page.status[r] == "new", _order(r)), default=None)


def _hidden(page: Page) -> str | None:
    """The receptacle to look into next: a closed one at hand, the first new one, a closed one passed by."""
    new = [r for r, status in page.status.items() if status == "new" and r not in page.here]
    closed = sorted((r for r, status in page.status.items() if status == "closed"),
                    key=lambda r: (r not in page.here, *_order(r)))
    if new and not (closed and closed[0] in page.here):
        turn = _turn(page)
        return min(new, key=lambda r: (turn(cls(r)), _order(r)))
    return closed[0] if closed else None


def _search_words(page: Page) -> list[str]:
    """``_hidden`` as the state shows it."""
    r = _hidden(page)
    return _at(page, r) if r else []


# ------------------------------------------------------------------------------------------------ who acts on it

NOISY_MIX = (30, 45, 25)    # of 100 actions of the noisy policy: by the explorer, the careless one, slips


def _next_step(wish: Wish, page: Page) -> str | None:
    """The command of one who fetches what the task asks for, and searches place by place until it is found; None where
    nothing is left to look into."""
    held = page.held

    def reach(r: str) -> str | None:
        """The command that brings r's contents nearer; None when they lie open before the agent."""
        if r not in page.here:
            return f"go to {r}"
        return f"open {r}" if page.status[r] in ("closed", "shut") else None

    def search() -> str | None:
        r = _hidden(page)
        return reach(r) if r else None

    if not held:
        o, r = _source(wish, page) or (None, None)
        return search() if o is None else reach(r) or f"take {o} from {r}"
    if cls(held) != wish.obj:
        r = _aside(page)
        return (reach(r) or f"move {held} to {r}") if r else None
    if wish.kind == "light":
        o, r = next(iter(_lamps(page, wish.recep)), (None, None))
        return search() if o is None else f"use {o}" if r in page.here else f"go to {r}"
    r = _goal(wish, page)
    if _untreated(wish, page):
        return f"{wish.kind} {held} with {r}" if r in page.here else f"go to {r}"
    return reach(r) or f"move {held} to {r}"


def explorer(task: str, state: str, rng: random.Random) -> str:
    """Expert on the state's text alone: does what its thought (``ALFWorldGrammar.consider``) ends with, or anything."""
    page = parse(state)
    return _next_step(parse_task(task), page) or rng.choice(sorted(commands(page)))


def _anything(task: str, state: str, rng: random.Random) -> str:
    """Any admissible command, each verb as likely as the others (most commands are "go to")."""
    by_verb: dict[str, list[str]] = {}
    for command, (verb, *_) in sorted(offered(state).items()):
        by_verb.setdefault(verb, []).append(command)
    return rng.choice(by_verb[rng.choice(sorted(by_verb))])


def _slipping(share: float):
    """The explorer, who in a share of the steps does something else: mostly what changes something, each verb as likely
    as the others; sometimes what does not, or cannot be done."""
    def act(task: str, state: str, rng: random.Random) -> str:
        if rng.random() >= share:
            return explorer(task, state, rng)
        if rng.random() < 0.7:
            by_verb: dict[str, list[str]] = {}
            for command, (verb, *_) in sorted(offered(state).items()):
                if _EDITS[verb] != "[look]":
                    by_verb.setdefault(verb, []).append(command)
            return rng.choice(by_verb[rng.choice(sorted(by_verb))])
        if rng.random() < 0.5:
            return _anything(task, state, rng)
        places, obj = sorted(parse(state).status), parse_task(task).obj
        return rng.choice([f"open {r}" for r in places] + [f"take {obj} 1 from {r}" for r in places])
    return act


def _careless(task: str, state: str, rng: random.Random) -> str:
    """The explorer, who forgets what must be done to a thing before it is put down."""
    wish = parse_task(task)
    return explorer(Wish("place", wish.obj, wish.recep).text if wish.kind in STATION else task, state, rng)


def _noisy(task: str, state: str, rng: random.Random) -> str:
    (act,) = rng.choices((explorer, _careless, _slipping(1.0)), NOISY_MIX)
    return act(task, state, rng)


def _curious(task: str, state: str, rng: random.Random) -> str:
    """Looks into one place after the other and touches nothing: what a memory of the room needs."""
    page = parse(state)
    closed = [r for r in page.here if page.status[r] == "closed"]
    new = sorted(r for r, s in page.status.items() if s == "new")
    if closed or not new:
        return f"open {closed[0]}" if closed else _anything(task, state, rng)
    r = rng.choice(new)
    return f"examine {r}" if r in page.here else f"go to {r}"


POLICIES = {"expert": explorer, "noisy": _noisy, "mediocre": _slipping(0.85), "random": _anything,
            "curious": _curious}


def policy(name: str):
    """A scripted policy ``(task, state, earlier actions, rng) -> action`` that reads text alone.

    ``expert`` is the explorer; ``noisy`` mixes it, action by action, with one who forgets to heat, cool or clean and
    with slips; ``mediocre`` slips in 85 % of its steps; ``random`` draws a verb, then a command; ``curious`` looks
    everywhere.  Raises ValueError on an unknown name.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown scripted policy {name!r}; known: {', '.join(POLICIES)}")
    return lambda task, state, history, rng: POLICIES[name](task, state, rng)
