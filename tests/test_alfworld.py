"""ALFWorld: the state's text and grammar, the rule engine (by hand and against textworld), games, experts, errors."""
import json
import lzma
import os
import random
import zlib
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import config
import dreamgym
from benchmarks import alfworld_equality
from buffer import ReplayBuffer, make_encoder
from config import UserError
from envs import alfworld, alfworld_games
from envs.alfworld import ALFWorldEnv, RuleEngine, open_world
from envs.alfworld_games import Game, Games, Logic
from envs.alfworld_text import (_EDITS, ALFWorldGrammar, KINDS, TEMPLATES, Page, Wish, apply, commands, parse, parse_task,
                                offered, policy, render, task_text)
from fidelity import play_scripted
from mexp import Codec, DreamEnv, Prediction

CONFIG = Path(__file__).parents[1] / "configs" / "alfworld.yaml"
SHARED = Path(os.environ.get("DREAMGYM_SHARED", Path(__file__).parents[2] / "shared"))
PACKED = SHARED / "alfworld" / "official_games.jsonl.xz"
needs_package = pytest.mark.skipif(find_spec("alfworld") is None, reason="alfworld is not installed")
needs_textworld = pytest.mark.skipif(not (find_spec("textworld") and find_spec("fast_downward")),
                                     reason="textworld is not installed")
needs_official = pytest.mark.skipif(not PACKED.exists(), reason="the official games are not here")
GRAMMAR = ALFWorldGrammar()
STATE = ("[at] countertop @1 : knife @1 , mug hot two @1 2 , [by] drawer closed @3 : [hold] apple clean *1 , "
         "[seen] bread |cabinet 3 1 , [visited] cabinet shut !3 , sinkbasin !1 , [new] fridge ?1 , drawer ?1 2 ,")
MOVING = "pick_and_place_simple-x-y-1/1"


@pytest.fixture(scope="module")
def generated():
    return alfworld_games.load(None, seed=3, train=36, validation=6, test=12)


@pytest.fixture(scope="module")
def official():
    return alfworld_games.load(str(PACKED))


def play(env, task, act, rng, check=None):
    """One episode; ``check(state, action, next_state, terminated, past)`` after each step.  Returns (won, steps)."""
    state, past, over = env.reset(task), [], False
    while not over:
        action = act(task.text, state, [], rng)
        after, reward, terminated, truncated, info = env.step(action)
        assert reward == info["score"] == float(terminated) == float(info["success"])
        if check:
            check(task, state, action, after, terminated, past)
        past.append(state)
        state, over = after, terminated or truncated
    return terminated, len(past)


# ------------------------------------------------------------------------------------------------ text

def test_state_is_written_and_read_exactly():
    page = parse(STATE)
    assert page.here == ("countertop 1", "drawer 3") and page.held == "apple 1"
    assert [page.status[r] for r in ("cabinet 3", "sinkbasin 1", "drawer 1")] == ["shut", "seen", "new"]
    assert page.inside["countertop 1"] == {"knife 1", "mug 1", "mug 2"} and page.conditions["mug 2"] == {"hot"}
    assert render(page) == STATE
    assert render(Page(status={"desk 1": "new", "bed 1": "new"})) == "[room] [new] desk ?1 , bed ?1 ,"


def test_broken_states_are_refused_with_a_value_error():
    rng = random.Random(0)
    words = STATE.split(" ")
    for text in ("", "[at]", "[room", "nonsense", "[at] desk @1", "[room] [new] desk ?", "[room]  [new] desk ?1 ,"):
        with pytest.raises(ValueError):
            parse(text)
    refused = 0
    for _ in range(1000):
        changed = list(words)
        for _ in range(rng.randint(1, 3)):
            i = rng.randrange(len(changed))
            changed[i:i + rng.randrange(2)] = [rng.choice(words + ["x", "", "0", "[mem]", "mug"])] * rng.randrange(3)
        text = " ".join(changed)
        try:
            assert render(parse(text)) == text
        except ValueError:
            refused += 1
    assert refused > 700


def test_tasks_are_read_from_all_twelve_sentences():
    for kind, templates in TEMPLATES.items():
        for template in templates:
            text = task_text(template.format(obj="mug", recep="desklamp") + ".")
            assert parse_task(text) == Wish(kind, "mug", "desklamp")
            assert GRAMMAR.content_words(text) == {"mug"}
    assert task_text("heat some egg and put it in diningtable") == "put hot egg , in diningtable ,"
    for wrong in ("make coffee", "put a mug", "", "put a very hot mug in desk"):
        with pytest.raises(ValueError):
            task_text(wrong)
    with pytest.raises(ValueError):
        parse_task("put a mug in desk")


def test_what_can_be_done_and_what_it_does():
    offered = GRAMMAR.admissible(STATE)
    assert offered == sorted(offered) and "help" not in offered
    assert {"open drawer 3", "examine drawer 3", "examine apple 1", "move apple 1 to countertop 1", "go to fridge 1",
            "inventory", "look"} < set(offered)
    assert not {"go to drawer 3", "go to countertop 1", "open countertop 1", "move apple 1 to drawer 3",
                "take mug 1 from countertop 1", "clean apple 1 with sinkbasin 1"} & set(offered)
    verb, page = apply(parse(STATE), "move apple 1 to countertop 1")
    assert verb == "move" and page.held is None and "apple 1" in page.inside["countertop 1"]
    assert apply(parse(STATE), "take mug 1 from countertop 1") is None
    at_sink = apply(parse(STATE), "go to sinkbasin 1")[1]
    assert at_sink.here == ("sinkbasin 1",) and "mug hot two |countertop 1 1 2 ," not in render(at_sink)
    assert "mug hot |countertop 1 1 2 ," in render(at_sink)


def test_edits():
    def both(state, action, after, edit, memory=(), past=()):
        assert GRAMMAR.diff(state, action, after, memory, past) == edit
        assert GRAMMAR.patch(state, action, edit, memory, past) == after

    both(STATE, "fly", STATE, "[same]")
    put = render(apply(parse(STATE), "move apple 1 to countertop 1")[1])
    both(STATE, "move apple 1 to countertop 1", put, "[put]")
    start = "[room] [new] desk ?1 , drawer ?1 2 ,"
    closed = "[at] drawer closed @1 : [new] desk ?1 , drawer ?2 ,"
    both(start, "go to drawer 1", closed, "[arrive]")
    opened = "[at] drawer open @1 : pen @1 , [new] desk ?1 , drawer ?2 ,"
    both(closed, "open drawer 1", opened, "[open] drawer open @1 : pen @1 ,")
    other_room = "[at] drawer open @1 : pen @1 , [visited] bed !1 ,"
    both(closed, "open drawer 1", opened, "[open] [mem]", memory=[start, other_room])
    # what is hidden comes from memory whatever it really is: another receptacle of the class, things with new numbers
    other_drawer = "[at] drawer open @2 : pen @1 , [hold] pen *2 , [visited] bed !1 ,"
    has_pen = closed.replace(": [new]", ": [hold] pen *1 , [new]")
    assert GRAMMAR.diff(has_pen, "open drawer 1", opened, [other_drawer]) == "[open] [mem]"
    assert GRAMMAR.patch(has_pen, "open drawer 1", "[open] [mem]", [other_drawer]) == (
        "[at] drawer open @1 : pen @2 , [hold] pen *1 , [new] desk ?1 , drawer ?2 ,")
    shared = "[at] drawer closed @1 : [by] drawer closed @2 : [new] desk ?1 ,"
    both(start, "go to drawer 1", shared, "[arrive] drawer closed @1 : [by] drawer closed @2 :")
    away = "[at] desk @1 : [visited] drawer closed !1 2 ,"
    both(away, "go to drawer 2", "[at] drawer closed @2 : [by] drawer closed @1 : [visited] desk !1 ,", "[arrive]",
         past=[start, shared])
    both(start, "fly", STATE, STATE)                           # nothing fits: the state in full
    for action, edit in (("fly", "[take]"), ("go to drawer 1", "[open]"), ("go to drawer 1", "[arrive] [mem]"),
                         ("go to drawer 1", "[arrive] desk @1 :"), ("go to drawer 1", "[arrive] drawer nonsense"),
                         ("go to drawer 1", "[arrive] drawer odd @1 :"), ("go to drawer 1", "[arrive] bed @9 :"),
                         ("go to drawer 1", "")):
        with pytest.raises(ValueError):
            GRAMMAR.patch(start, action, edit)


def test_judge_trace_and_counterfactuals():
    before = "[at] coffeemachine @1 : [hold] mug hot *1 , [new] desk ?1 ,"
    after = "[at] coffeemachine @1 : mug hot @1 , [new] desk ?1 ,"
    action, task = "move mug 1 to coffeemachine 1", "put hot mug , in coffeemachine ,"
    assert GRAMMAR.judge(task, after) == [("mug", "hot", True), ("coffeemachine", "@1", True)]
    assert GRAMMAR.judge(task, before) == [("mug", "hot", False), ("coffeemachine", "@1", True)]
    assert GRAMMAR.outcome(task, before, action, after) == (True, True) and GRAMMAR.decides(before, action)
    assert GRAMMAR.explain(task, before, action, after) == "move mug hot *1 ok hot *1 ok in coffeemachine to coffeemachine ok"
    for other in ("put cool mug , in coffeemachine ,", "put two mug , in coffeemachine ,", "put hot mug , in desk ,"):
        assert GRAMMAR.outcome(other, before, action, after) == (False, False)
    for other, chain in (("put hot mug , in desk ,", "mug hot *1 ok hot *1 ok in desk to coffeemachine no"),
                         ("put cool mug , in coffeemachine ,", "mug hot *1 ok cool mug no"),
                         ("put two mug , in coffeemachine ,", "mug hot *1 no"),
                         ("put pen , in coffeemachine ,", "pen , no"), ("look at mug , under desklamp ,", "")):
        assert GRAMMAR.explain(other, before, action, after) == f"move {chain}".strip()
    rng = random.Random(0)
    made = Counter((t, GRAMMAR.outcome(t, before, action, after)[1]) for _ in range(600)
                   if (t := GRAMMAR.counterfactual("put mug , in desk ,", before, action, after, rng)))
    assert 0.4 < sum(n for (_, right), n in made.items() if right) / made.total() < 0.6
    assert {t for t, right in made if right} == {f"put {w}mug , in coffeemachine ," for w in ("", "hot ")}
    assert {t for t, right in made if not right} >= {"put two mug , in coffeemachine ,", "put hot mug , in desk ,"}
    lamp = "[at] desk @1 : book @1 , desklamp @1 , [hold] pen *2 , [new] shelf ?1 ,"
    for _ in range(30):                                       # a step by a lamp fulfils tasks about lamps, and no other
        other = GRAMMAR.counterfactual(task, lamp, "use desklamp 1", lamp.replace("desklamp @", "desklamp on @"), rng)
        assert other.startswith("look at ") and ("pen" in other) == ("pen *2 ok" in GRAMMAR.explain(other, lamp, "use desklamp 1", ""))
    stove = "[at] stoveburner @1 : {}[by] stoveburner {}: {}[new] desk ?1 ,"
    before = stove.format("", "new @2 ", "[hold] pot *1 , ")
    after = stove.format("pot @1 , ", "new @2 ", "pan @1 , ")        # with the hand free, the pan next to it is offered
    for _ in range(60):
        other = GRAMMAR.counterfactual("put pot , in desk ,", before, "move pot 1 to stoveburner 1", after, rng)
        won = GRAMMAR.outcome(other, before, "move pot 1 to stoveburner 1", after)[1]
        assert GRAMMAR.explain(other, before, "move pot 1 to stoveburner 1", after).endswith(" ok") == won
    two = "[at] shelf @1 : cd two @1 2 ,"
    assert GRAMMAR.judge("put two cd , in shelf ,", two)[0] == ("cd", "two", True)
    lamp = "[at] desk @1 : desklamp on @1 , [hold] book *1 ,"
    assert [met for *_, met in GRAMMAR.judge("look at book , under desklamp ,", lamp)] == [True, True]
    go, there = "go to shelf 1", "[at] shelf @1 : [by] desk @1 : desklamp on @1 , [hold] book *1 ,"
    for seen, chain in (("desklamp on |desk 1 1", "desklamp on |desk 1 ok"), ("desklamp |desk 1 1", "desklamp |desk no")):
        away = f"[at] bed @1 : [hold] book *1 , [seen] {seen} , [visited] desk !1 , [new] shelf ?1 ,"
        assert GRAMMAR.explain("look at book , under desklamp ,", away, go, there) == f"go unknown book *1 ok {chain}"
    cds = "[at] shelf @1 : cd @1 , [hold] {} *2 ,"                # one lies there: is what comes to it another?
    for held, chain in (("cd", "cd [hold] cd ok in shelf to shelf ok"), ("pen", "cd [hold] pen no")):
        action = f"move {held} 2 to shelf 1"
        assert GRAMMAR.explain("put two cd , in shelf ,", cds.format(held), action, two) == f"move cd @1 ok {chain}"
    assert GRAMMAR.explain("look at pen , under desklamp ,", lamp, "use desklamp 1", lamp) == "use pen , no"
    assert GRAMMAR.explain(task, before, "fly", before) == "nothing"
    for action, chain in (("take pen 1 from desk 1", "take pen take pen ok desklamp on @1 ok"),
                          ("take mug 1 from desk 1", "take pen take mug no")):
        desk = "[at] desk @1 : desklamp on @1 , mug @1 , pen @1 ,"
        assert GRAMMAR.explain("look at pen , under desklamp ,", desk, action, "") == chain


FREE = STATE.replace("[hold] apple clean *1 , ", "")


@pytest.mark.parametrize("task, state, look_ups, command", [
    ("put hot mug , in coffeemachine ,", "[at] shelf @1 : [hold] mug hot *1 , [new] coffeemachine ?1 ,",
     "mug hot *1 coffeemachine ?1", "go to coffeemachine 1"),
    ("put hot mug , in coffeemachine ,", "[at] shelf @1 : [hold] mug *1 , [new] coffeemachine ?1 , microwave ?1 ,",
     "mug *1 microwave ?1", "go to microwave 1"),
    ("put hot mug , in coffeemachine ,", "[at] microwave closed @1 : [hold] mug *1 , [new] coffeemachine ?1 ,",
     "mug *1 microwave closed @1", "heat mug 1 with microwave 1"),
    ("put bread , in sinkbasin ,", STATE, "[hold] apple clean *1 [at] countertop @1", "move apple 1 to countertop 1"),
    ("put apple , in drawer ,", STATE, "apple clean *1 drawer closed @3", "open drawer 3"),
    ("put mug , in drawer ,", FREE, "mug hot two @1 [at] countertop @1", "take mug 1 from countertop 1"),
    ("put bread , in desk ,", FREE, "bread |cabinet 3", "go to cabinet 3"),
    ("put pen , in desk ,", FREE, "pen , [by] drawer closed @3", "open drawer 3"),
    ("put pen , in desk ,", "[at] bed @1 : [new] desk ?1 2 ,", "pen , [new] desk ?1", "go to desk 1"),
    ("put pen , in desk ,", "[at] bed @1 : [visited] desk !1 ,", "pen ,", None),
    ("look at book , under desklamp ,", "[at] bed @1 : [hold] book *1 , [new] desk ?1 ,",
     "book *1 desklamp , [new] desk ?1", "go to desk 1"),
    ("put two cd , in desk ,", "[at] bed @1 : [seen] cd |desk 1 2 , [visited] desk !1 , [new] drawer ?1 2 ,",
     "cd |desk 1 in desk to desk placed cd , [new] drawer ?1", "go to drawer 1"),
    ("put cd , in drawer ,", "[at] bed @1 : [seen] cd |desk 1 2 , [visited] desk !1 , [new] drawer ?1 2 ,",
     "cd |desk 1", "go to desk 1"),
    ("look at book , under desklamp ,", "[at] bed @1 : [hold] book *1 , [seen] desklamp on |desk 2 1 , [visited] desk !2 ,",
     "book *1 desklamp on |desk 2", "go to desk 2"),
    ("look at book , under desklamp ,", "[at] desk @2 : desklamp @1 , [hold] book *1 ,",
     "book *1 desklamp @1", "use desklamp 1"),
    ("look at book , under desklamp ,", "[at] bed @1 : [hold] book *1 , [seen] desklamp |desk 1 1 , desklamp on |desk 2 2 , "
     "[visited] desk !1 2 ,", "book *1 desklamp on |desk 2", "go to desk 2"),
    ("put apple , in desk ,", "[at] cabinet shut @3 : [seen] apple |cabinet 3 1 , [new] desk ?1 ,",
     "apple |cabinet 3 [at] cabinet shut @3", "open cabinet 3"),
    ("put spoon , in desk ,", "[at] bed @1 : [seen] spoon |drawer 2 1 , spoon |drawer 10 2 , spoon clean |desk 1 3 , "
     "[visited] desk !1 , drawer open !2 10 ,", "spoon |drawer 2", "go to drawer 2"),
    ("put two cd , in desk ,", "[at] bed @1 : [seen] cd |desk 1 1 , cd |desk 2 2 , [visited] desk !1 2 ,",
     "cd |desk 1 in desk to desk placed cd |desk 2 in desk to desk", "go to desk 2"),
    ("put two cd , in desk ,", "[at] desk @2 : cd @2 , [seen] cd |desk 1 1 , [visited] desk !1 ,",
     "cd @2 [at] desk @2 in desk to desk", "take cd 2 from desk 2"),         # what is placed is listed later
    ("put two cd , in desk ,", "[at] desk @2 : cd @2 , [seen] cd |shelf 1 1 , [visited] shelf !1 ,",
     "cd @2 [at] desk @2 in desk to desk placed cd |shelf 1 in desk to shelf", "go to shelf 1"),
    ("put two pan , in stoveburner ,", "[at] stoveburner @1 : [by] stoveburner @2 : pan @1 , [hold] pan *2 ,",
     "pan *2 stoveburner @2", "move pan 2 to stoveburner 2"),
    ("put mug , in countertop ,", "[at] shelf @1 : [hold] egg *1 , [visited] countertop !1 , [new] fridge ?1 ,",
     "[hold] egg *1 countertop !1", "go to countertop 1"),
    ("put two cd , in desk ,", "[at] bed @1 : [hold] cd *1 , [seen] cd |desk 2 2 , [visited] desk !1 2 ,",
     "cd *1 desk !2", "go to desk 2"),
    ("put two cd , in desk ,", "[at] desk @2 : cd @2 , [hold] cd *1 , [visited] desk !1 ,", "cd *1 desk @2",
     "move cd 1 to desk 2"),
])
def test_thoughts_end_with_what_to_do(task, state, look_ups, command):
    assert parse(state) and GRAMMAR.advice(task, state) == command
    assert GRAMMAR.consider(task, state) == (f"{look_ups} {command}" if command else look_ups)
    agrees(task, state)


def agrees(task, state):
    """The expert does what its thought ends with."""
    action = policy("expert")(task, state, [], random.Random(0))
    assert GRAMMAR.advice(task, state) in (None, action) and action in offered(state)


@pytest.mark.parametrize("state", [STATE, FREE])
def test_other_tasks_for_a_step_that_followed_its_thought(state):
    task, rng = "put apple , in drawer ,", random.Random(0)
    action = GRAMMAR.advice(task, state)
    others = {GRAMMAR.varied(task, state, action, ["look"], rng)[0] for _ in range(300)} - {task}
    assert len({parse_task(other).obj for other in others}) >= 3 and {parse_task(o).kind for o in others} > {"place", "two"}
    for other in others:
        agrees(other, state)
        thought = GRAMMAR.consider(other, state)
        assert thought.endswith(GRAMMAR.advice(other, state)) and not GRAMMAR.outcome(other, "", "", state)[0]
    assert any(" placed " in GRAMMAR.consider(other, FREE) for other in others)
    assert any(f"{parse_task(other).obj} |" in GRAMMAR.consider(other, FREE) for other in others)
    assert GRAMMAR.varied(task, state, "look", ["look"], rng) == (task, ["look"])           # a slip stays what it was


def test_which_tasks_a_room_can_carry():
    start = "[room] [new] shelf ?1 , coffeemachine ?1 , fridge ?1 , microwave ?1 ,"
    actions, parts = GRAMMAR.task_parts("put hot mug , in coffeemachine ,", start)
    assert actions == {"go", "take", "move", "heat"} and parts == {"mug", "coffeemachine"}
    for task, reason in (("put mug", "malformed"), ("put houseplant , in shelf ,", "object"),
                         ("put mug , in desk ,", "receptacle"), ("put egg , in coffeemachine ,", "receptacle"),
                         ("put clean mug , in shelf ,", "station"), ("look at mug , under shelf ,", "lamp")):
        with pytest.raises(ValueError, match=f"^{reason}$"):
            GRAMMAR.task_parts(task, start)
    taught = ALFWorldGrammar(["put mug , in shelf ,", "[at] fridge open @1 : egg @1 , [new] shelf ?1 ,"])
    with pytest.raises(ValueError, match="^object$"):
        taught.task_parts("put mug , in shelf ,", start)
    room = "[room] [new] bed ?1 , drawer ?1 2 ,"
    assert GRAMMAR.key(room, "go to drawer 1") == "go to drawer 1 new bed 1 drawer 2"
    assert GRAMMAR.key(room, "go to drawer 9") == "nothing" and GRAMMAR.key(STATE, "open drawer 3") == (
        "open drawer 3 closed cabinet 1 countertop 1 drawer 3 fridge 1 sinkbasin 1")
    assert GRAMMAR.key(STATE, "go to cabinet 3") == "go"
    assert [GRAMMAR.move(STATE, a) for a in ("go to cabinet 3", "go to drawer 1", "open drawer 3", "inventory", "fly")] == [
        "go", "hidden: go", "hidden: open", "look", "nothing"]


# ------------------------------------------------------------------------------------------------ engine, by hand

KITCHEN = {"drawer_bar_1": ("drawer", "loc_bar_1"), "drawer_bar_2": ("drawer", "loc_bar_1"),
           "fridge_bar_1": ("fridge", "loc_bar_2"), "coffeemachine_bar_1": ("coffeemachine", "loc_bar_3"),
           "countertop_bar_1": ("countertop", "loc_bar_3")}          # a corner of one: the drawers share a spot


def hand_made(kind="cool", obj="mug", recep="coffeemachine", receptacles=KITCHEN, lies=None):
    """A game in such a corner; ``lies``: object -> receptacle."""
    lies = lies or {"mug_bar_1": "countertop_bar_1", "knife_bar_1": "drawer_bar_1", "apple_bar_1": "countertop_bar_1"}
    objects = {o: o.split("_bar_")[0] for o in lies}
    problem = alfworld_games._problem(kind, obj, recep, 1, receptacles, objects, lies, "loc_bar_0")
    sentence = TEMPLATES[kind][0].format(obj=obj, recep=recep)
    return Game(MOVING, "train", sentence, zlib.compress(problem.encode()), Logic("rules", "texts"))


def test_rules_by_hand():
    engine = RuleEngine()
    assert engine.reset(hand_made()) == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see "
        "a coffeemachine 1, a countertop 1, a drawer 2, a drawer 1, and a fridge 1.\n\n"
        "Your task is to: put a cool mug in coffeemachine.")
    for command, feedback in (
            ("look", "You are in the middle of a room. Looking quickly around you, you see nothing."),
            ("take mug 1 from countertop 1", "Nothing happens."), ("Go to drawer 1", "Nothing happens."),
            ("go to drawer 2", "You arrive at drawer 2. The drawer 2 is closed."),
            ("go to drawer 1", "Nothing happens."),
            ("look", "You are facing the drawer 2, and drawer 1. Next to it, you see nothing."),
            ("open drawer 2", "You open the drawer 2. The drawer 2 is open. In it, you see a knife 1."),
            ("take knife 1 from drawer 2", "You pick up the knife 1 from the drawer 2."),
            ("open drawer 1", "You open the drawer 1. The drawer 1 is open. In it, you see nothing."),
            ("inventory", "You are carrying: a knife 1."),
            ("go to countertop 1", "You arrive at countertop 1. On the countertop 1, you see a apple 1, and a mug 1."),
            ("slice apple 1 with knife 1", "You sliced the apple 1 with the knife 1."),
            ("take mug 1 from countertop 1", "Nothing happens."),
            ("move knife 1 to countertop 1", "You move the knife 1 to the countertop 1."),
            ("take apple 1 from countertop 1", "You pick up the apple 1 from the countertop 1."),
            ("examine apple 1", "This is a sliced apple 1."),
            ("move apple 1 to countertop 1", "You move the apple 1 to the countertop 1."),
            ("take mug 1 from countertop 1", "You pick up the mug 1 from the countertop 1."),
            ("examine mug 1", "This is a normal mug 1. In it, you see nothing."),
            ("move mug 1 to coffeemachine 1", "You move the mug 1 to the coffeemachine 1."),       # not cool yet
            ("look", "You are facing the coffeemachine 1, and countertop 1. Next to it, you see a mug 1."),
            ("take mug 1 from coffeemachine 1", "You pick up the mug 1 from the coffeemachine 1."),
            ("  go to fridge 1 ", "You arrive at fridge 1. The fridge 1 is closed."),
            ("cool mug 1 with fridge 1", "You cool the mug 1 using the fridge 1."),                # closed: works
            ("go to coffeemachine 1", "You arrive at coffeemachine 1. On the coffeemachine 1, you see nothing.")):
        assert engine.step(command) == feedback
        assert not engine.won and engine.admissible == sorted(set(engine.admissible))
    assert engine.step("move mug 1 to coffeemachine 1") == "You move the mug 1 to the coffeemachine 1." and engine.won


def states_after(game, *actions, hidden=()):
    """(the states that these commands lead to, is the task fulfilled after the last and not before?)  In each of them
    ``Grammar.admissible`` is what the engine offers, less what the state cannot tell (``hidden``)."""
    env = ALFWorldEnv(Games([game]))
    env.reset(env.tasks("train")[0])
    states, won = [], []
    for action in actions:
        state, _, terminated, _, info = env.step(action)
        states.append(state)
        won.append(terminated)
        assert not info["invalid"]
        assert GRAMMAR.admissible(state) == [c for c in env.admissible() if c not in hidden]
    return states, won[-1] and not any(won[:-1])


def test_what_a_knife_reaches_out_of_sight_is_in_the_state():
    """The engine offers to slice also what a closed fridge holds, and what lies in no receptacle."""
    lies = {"knife_bar_1": "countertop_bar_1", "bread_bar_1": "fridge_bar_1", "egg_bar_1": "countertop_bar_1"}
    states, _ = states_after(hand_made(lies=lies), "go to countertop 1", "take knife 1 from countertop 1",
                             "go to fridge 1", "slice bread 1 with knife 1", "open fridge 1", "close fridge 1")
    assert states[2].startswith("[at] fridge closed @1 : [hold] knife *1 , [seen] bread |fridge 1 1 , egg |")
    assert "bread sliced |fridge 1 1 ," in states[3] and "bread sliced |fridge 1 1 ," in states[5]
    assert "[at] fridge open @1 : bread sliced @1 ," in states[4]
    game = hand_made(lies=lies)
    problem = game.problem.replace("(inReceptacle egg_bar_1 countertop_bar_1)", "")
    states, _ = states_after(
        replace(game, packed=zlib.compress(problem.encode())), "go to countertop 1", "take knife 1 from countertop 1",
        "slice egg 1 with knife 1", "move knife 1 to countertop 1")
    assert ["egg" in state for state in states] == [False, True, True, False] and "egg sliced @1 ," in states[2]


def test_a_station_of_another_name_cleans_all_the_same():
    """Scene 420: its bathtubbasin is of the type of a sinkbasin."""
    bathroom = {"bathtub_bar_1_bar_bathtubbasin": ("sinkbasin", "loc_bar_1"), "toilet_bar_1": ("toilet", "loc_bar_2")}
    game = hand_made("clean", "cloth", "toilet", bathroom, {"cloth_bar_1": "bathtub_bar_1_bar_bathtubbasin"})
    clean, put = "clean cloth 1 with bathtubbasin 1", "move cloth 1 to toilet 1"
    (_, dirty, held, there, done), won = states_after(
        game, "go to bathtubbasin 1", "take cloth 1 from bathtubbasin 1", clean, "go to toilet 1", put, hidden=[clean])
    task = task_text(game.sentence)
    assert "[hold] cloth *1 ," in dirty and "[hold] cloth clean *1 ," in held and won
    assert GRAMMAR.outcome(task, there, put, done) == (True, True) and not GRAMMAR.outcome(task, dirty, clean, held)[0]
    assert GRAMMAR.patch(dirty, clean, GRAMMAR.diff(dirty, clean, held)) == held


def test_the_environment_keeps_the_engine_text_beside_the_state():
    env = ALFWorldEnv(Games([hand_made()]))
    state = env.reset(env.tasks("train")[0])
    assert env.raw.startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. ")
    assert env.raw.endswith("Your task is to: put a cool mug in coffeemachine.")
    assert state.startswith("[room] [new] ")
    state, *_, info = env.step("go to drawer 1")
    assert env.raw == info["raw"] == "You arrive at drawer 1. The drawer 1 is closed."
    assert state.startswith("[at] drawer closed @1 : [by] drawer closed @2 : ")


# ------------------------------------------------------------------------------------------------ generated games

@needs_package
def test_generated_games_are_seeded_full_and_apart(generated):
    again = alfworld_games.load(None, seed=3, train=36, validation=6, test=12)
    other = alfworld_games.load(None, seed=4, train=36, validation=0, test=0)
    assert [g.problem for g in generated.by_split["train"]] == [g.problem for g in again.by_split["train"]]
    assert [g.problem for g in generated.by_split["train"]] != [g.problem for g in other.by_split["train"]]
    scenes = {split: {int(g.name.split("/")[0].rsplit("-", 1)[1]) for g in games}
              for split, games in generated.by_split.items()}
    assert scenes["test"] <= set(alfworld_games.UNSEEN_SCENES)
    assert not (scenes["train"] | scenes["validation"]) & set(alfworld_games.UNSEEN_SCENES)
    rooms = [alfworld_games.room_of(g) for games in generated.by_split.values() for g in games]
    assert Counter(r.kind for r in rooms) == {kind: 9 for kind in KINDS}
    assert 20 < sum(len(r.places) for r in rooms) / len(rooms) < 28
    assert 27 < sum(sum(map(len, r.inside.values())) for r in rooms) / len(rooms) < 39


@needs_package
def test_experts_states_and_grammar_agree_with_the_engine(generated):
    """On every step of expert, noisy and random episodes: admissible commands, edits, judge and states."""
    env = ALFWorldEnv(generated)
    edits = Counter()

    def check(task, state, action, after, terminated, past):
        assert render(parse(after)) == after and GRAMMAR.kind(after)
        assert GRAMMAR.admissible(after) == sorted(env.admissible())
        memory = [after] if len(past) % 2 else []
        edit = GRAMMAR.diff(state, action, after, memory, past)
        assert GRAMMAR.patch(state, action, edit, memory, past) == after
        assert GRAMMAR.outcome(task.text, state, action, after) == (terminated, terminated)
        edits[edit == after] += 1
        terminated or agrees(task.text, after)
        assert GRAMMAR.explain(task.text, state, action, after).endswith(" ok") == terminated

    for split in ("train", "test"):
        for task in env.tasks(split):
            assert env.reset(task) == task.start
            won, steps = play(env, task, policy("expert"), random.Random(task.id), check)
            assert won, task.id
    for name in ("noisy", "random"):
        for task in env.tasks("train")[:12]:
            play(env, task, policy(name), random.Random(1), check)
    assert edits[True] == 0                                   # no state had to be written out in full
    with pytest.raises(ValueError):
        policy("genius")


def agrees_at_random(env, tasks, episodes):
    """Random play, a knife kept long: what the state offers is what the engine offers, but for cleaning in the bathtub
    (scene 420).  Returns how often the knife reached what is in sight, and what is not."""
    rng, slices = random.Random(0), Counter()

    def act(task, state, past, rng):
        by_verb = {}
        for command in env.admissible():
            by_verb.setdefault(command.split(" ")[0], []).append(command)
        if parse(state).held and "knife" in parse(state).held and rng.random() < 0.8:
            by_verb.pop("move", None)
        knives = [c for c in by_verb.get("take", ()) if c.split(" ")[1] in ("knife", "butterknife")]
        return rng.choice(knives or by_verb[rng.choice(["go", *by_verb])])

    def check(task, state, action, after, terminated, past):
        real = env.admissible()
        told = [c for c in real if not (c.startswith("clean ") and " bathtubbasin " in c)]
        assert GRAMMAR.admissible(after) == told, (task.id, len(past), action)
        hidden = {o for r, names in parse(after).inside.items() if not parse(after).visible(r) for o in names}
        sliceable = [" ".join(c.split(" ")[1:3]) for c in real if c.startswith("slice ")]
        slices.update("hidden" if o in hidden else "seen" for o in sliceable)

    for _ in range(episodes):
        play(env, rng.choice(tasks), act, rng, check)
    return slices


@needs_package
def test_the_state_offers_what_the_engine_does_in_random_play(generated):
    env = ALFWorldEnv(generated)
    slices = agrees_at_random(env, env.tasks("train") + env.tasks("test"), 60)
    assert min(slices["hidden"], slices["seen"]) > 10


class Rules:
    """Eq. 4 without a model: the rules, and memory for what is hidden."""

    def __init__(self, codec):
        self.codec = codec

    def predict(self, queries):
        return [self.one(q, d) for q, d in zip(queries, self.codec.retrieve(queries))]

    def one(self, q, demos):
        grammar, memory = self.codec.grammar, [d.next_state for d in demos]
        verb = commands(parse(q.state)).get(q.action, ["nothing"])[0]
        edit = _EDITS.get(verb, "[same]")
        for e in ([f"{edit} [mem]"] if grammar.reveals(q.state, q.action) else []) + [edit]:
            try:
                after = grammar.patch(q.state, q.action, e, memory, q.past)
                return Prediction("", e, after, *grammar.outcome(q.task, q.state, q.action, after))
            except ValueError:
                continue


@needs_package
def test_dreamed_rooms_are_whole_and_most_tasks_can_be_fulfilled_in_them(generated):
    """What unseen places hold is remembered from other games of the room: never a thing in two places, and the
    explorer, which knows nothing of it, finds what most tasks ask for."""
    env, rng, offline = ALFWorldEnv(generated), random.Random(0), []
    tasks = env.tasks("train")
    for i in range(40):
        offline += play_scripted(env, tasks[i % len(tasks)], policy("expert" if i % 2 else "random"), GRAMMAR, str(i), rng)
    buffer = ReplayBuffer(make_encoder("hash"), GRAMMAR)
    buffer.add(offline)
    dream = DreamEnv(Rules(Codec(GRAMMAR, buffer, True, 2, 1, True)), 50)
    won = 0
    for task in tasks[:18]:
        [state], over = dream.reset([task]), False
        while not over:
            action = policy("expert")(task.text, state, [], rng)
            [(state, reward, done, truncated, info)] = dream.step([0], [action])
            over = done or truncated
            page = parse(state)
            things = [o for names in page.inside.values() for o in names] + [page.held]
            assert len(things) == len(set(things)), state
        won += info["success"]
    assert won >= 9


@needs_package
def test_limit_invalid_actions_and_interleaved_episodes(generated):
    envs = [ALFWorldEnv(generated, max_steps=9) for _ in range(4)]
    tasks = generated.tasks("train")[:4]

    def steps(env, task):
        state, rng = env.reset(task), random.Random(task.id)
        yield state
        for _ in range(9):
            state, reward, terminated, truncated, info = env.step(policy("random")(task.text, state, [], rng))
            yield state, reward, terminated, truncated, info["raw"]

    alone = [list(steps(envs[0], task)) for task in tasks]
    assert list(zip(*(steps(env, task) for env, task in zip(envs, tasks)))) == list(zip(*alone))
    assert all(run[-1][3] and not run[-2][3] for run in alone)                 # cut at the limit, not ended
    state = envs[0].reset(tasks[0])
    after, reward, terminated, truncated, info = envs[0].step("dance wildly")
    assert after == state and info["invalid"] and info["raw"] == "Nothing happens." and reward == 0 and not terminated


def write_official(folder, split, game, name=None, **changed):
    """The game as a file of the official layout below ``folder``, under another name if one is given."""
    file = folder / "json_2.1.1" / split / (name or game.name) / "game.tw-pddl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(game.document() | {"solvable": True} | changed))
    return file


FOLDERS = (("valid_unseen", "test"), ("valid_seen", "validation"), ("train", "train"))


@needs_package
def test_world_and_official_folder_layout(generated, tmp_path, monkeypatch):
    sizes = {"train": 5, "validation": 3, "test": 12}
    for folder, split in FOLDERS:
        for game in generated.by_split[split][:sizes[split]]:
            file = write_official(tmp_path, folder, game)
        for i, unplayable in enumerate(("AppleSliced", "Apple-movable")):          # and one that says so itself
            write_official(tmp_path, folder, game, f"pick_and_place_simple-{unplayable}-None-Desk-1/trial_{i}")
        write_official(tmp_path, folder, game, "pick_and_place_simple-Apple-None-Desk-1/trial_2", solvable=False)
    write_official(tmp_path, "valid_train", game)              # rooms and tasks of train: not used
    world = open_world(SimpleNamespace(data=str(tmp_path), catalog_seed=0, train_tasks=None, max_steps=50))
    for split, tasks in world.tasks.items():
        assert {(t.id, t.text, t.start, t.split) for t in tasks} == {
            (t.id, t.text, t.start, t.split) for t in generated.tasks(split)[:sizes[split]]}
    task = world.tasks["test"][0]
    assert play(world.make(), task, world.scripted("expert"), random.Random(0))[0]
    assert world.rules("test")["explorer"] == 1.0
    hasty = open_world(SimpleNamespace(data=str(tmp_path), catalog_seed=0, train_tasks=None, max_steps=2))
    assert hasty.rules("test")["explorer"] == 0.0              # nothing is done in two steps
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    assert {k: len(v) for k, v in alfworld_games.load("official").by_split.items()} == sizes
    assert {k: len(v) for k, v in alfworld_games.load("official", train=2).by_split.items()} == sizes | {"train": 2}
    old = json.loads(file.read_text())                         # of train, the last one that counts
    file.write_text(json.dumps(old | {"grammar": old["grammar"].replace(
        generated.by_split["train"][4].sentence, "Chill the mug")}))
    with pytest.raises(UserError, match="Chill the mug"):
        alfworld_games.load(str(tmp_path)).tasks("train")
    file.write_text("{")
    with pytest.raises(UserError, match="no ALFWorld game"):
        alfworld_games.load(str(tmp_path))


@needs_package
def test_packed_games(generated, tmp_path):
    """The packed file holds the same games, and its splits become ours in the same way."""
    path = tmp_path / "games.jsonl.xz"
    games = {folder: generated.by_split[split][:2] for folder, split in FOLDERS}
    games["valid_train"] = generated.by_split["train"][2:3]
    logic = games["train"][0].logic
    rows = [{"pddl_domain": logic.domain, "grammar": logic.grammar}, *(
        {"split": folder, "game": g.name, "task": g.sentence, "pddl_problem": g.problem, "walkthrough": []}
        for folder, chosen in games.items() for g in chosen)]
    with lzma.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    read = alfworld_games.load(str(path))
    assert read.by_split == {split: games[folder] for folder, split in FOLDERS}
    assert alfworld_games.load(str(path), train=1).by_split["train"][0] in games["train"]
    with lzma.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows[:1] + rows[-1:])
    with pytest.raises(UserError, match="holds no game of the splits"):
        alfworld_games.load(str(path))


@needs_package
@pytest.mark.parametrize("domain, grammar, said", [
    (("(holds ?a ?o)", "(holds ?o ?a)"), ("", ""), "older or newer, than .* was checked against. What fits"),
    (("", ""), ("You arrive at", "You reach"), "older or newer"),
    (("", ""), ("action PutObject", "action LayObject"), "older or newer"),
    (("", ""), ('"move {o} to {r}"', '"put {o} in/on {r}"'), "older or newer.*put down with 'put {o} in/on {r}'")])
def test_games_of_another_release_are_refused_when_they_are_read(domain, grammar, said, generated, tmp_path):
    game = generated.by_split["test"][0]
    other = Logic(game.logic.domain.replace(*domain), game.logic.grammar.replace(*grammar))
    assert other != game.logic
    file = write_official(tmp_path, "valid_unseen", replace(game, logic=other))
    packed = tmp_path / "games.jsonl.xz"
    packed.write_bytes(lzma.compress(json.dumps({"pddl_domain": other.domain, "grammar": other.grammar}).encode()))
    for data, source in ((tmp_path, file), (packed, packed)):
        with pytest.raises(UserError, match=said) as error:
            alfworld_games.load(str(data))
        assert str(source) in str(error.value) and "\n" not in str(error.value)


@needs_package
def test_a_package_of_another_release_is_refused(monkeypatch):
    monkeypatch.setattr(alfworld_games, "CHECKED_RULES", "those of another release")
    alfworld_games._shipped_logic.cache_clear()
    with pytest.raises(UserError, match="alfworld/data: .* older or newer"):
        alfworld_games.load(None)


def test_the_step_limit_of_the_configuration():
    cfg, _ = config.load(CONFIG, "cpu", [])
    assert (cfg.env.max_steps, cfg.rl.max_turns, cfg.mexp.gate_false_success) == (50, 25, 0.03)


def test_missing_things_are_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    (tmp_path / "broken.jsonl.xz").write_bytes(b"not xz")
    (tmp_path / "empty").mkdir()
    for data, words in (("official", "ALFWORLD_DATA"), (str(tmp_path / "nowhere"), "does not exist"),
                        (str(tmp_path / "broken.jsonl.xz"), "no packed file"), (str(tmp_path / "empty"), "json_2.1.1")):
        with pytest.raises(UserError, match=words) as error:
            alfworld_games.load(data)
        assert "\n" not in str(error.value)
    monkeypatch.setattr(alfworld_games.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps alfworld==0.4.2"):
        alfworld_games._package()


@needs_package
def test_the_whole_method_on_generated_games(tmp_path, monkeypatch, capsys):
    """Two steps of everything: the stages fit together, RL keeps its own limit of turns, results come by task type."""
    monkeypatch.setattr(alfworld, "load", lambda data, seed, train: alfworld_games.load(data, seed, train, 6, 6))
    few = ["run.processes=1", f"run.out={tmp_path / 'run'}", "env.train_tasks=60", "env.max_steps=4", "rl.max_turns=3",
           "collect.noisy=6", "collect.mediocre=0", "collect.random=2", "policy.steps=2", "mexp.steps=2", "rl.iterations=1",
           "rl.tasks_per_step=2", "s2r.transitions=0", "eval.tasks=6", "policy_model.max_new_tokens=4",
           "mexp_model.max_new_tokens=4"]
    monkeypatch.setattr("sys.argv", ["dreamgym.py", "--config", str(CONFIG), "--profile", "smoke",
                                     *(word for setting in few for word in ("--set", setting))])
    assert dreamgym.main() == 0
    table = capsys.readouterr().out
    assert "unseen_false_success" not in json.loads((tmp_path / "run" / "fidelity.json").read_text())
    assert "by task type" in table and all(f"{kind} (1)" in table for kind in KINDS) and "explorer" in table
    dreamed = [json.loads(line) for line in open(tmp_path / "run" / "dream.jsonl")]
    assert {t["source"] for t in dreamed} == {"dream"} and max(t["step"] for t in dreamed) <= 2
    assert "exact_known" in json.loads((tmp_path / "run" / "fidelity.json").read_text())
    used = json.loads((tmp_path / "run" / "results.json").read_text())["real"]["transitions"]
    assert used["rl"] == used["s2r"] == 0 < used["offline"]


def test_without_the_package_the_run_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(alfworld_games.importlib.util, "find_spec", lambda name: None)
    for cached in (alfworld_games._scenes, alfworld_games._shipped_logic):
        cached.cache_clear()
    cfg, _ = config.load(CONFIG, "smoke", [f"run.out={tmp_path}"])
    with pytest.raises(UserError, match="run: pip install --no-deps alfworld==0.4.2"):
        open_world(cfg.env)


# ------------------------------------------------------------------------------------------------ official, textworld

@needs_official
def test_official_games(official):
    assert {k: len(v) for k, v in official.by_split.items()} == {"train": 3553, "validation": 140, "test": 134}
    few = alfworld_games._spread(official.by_split["train"], 12)
    assert Counter(alfworld_games.room_of(g).kind for g in few) == {kind: 2 for kind in KINDS}
    env, lengths = ALFWorldEnv(official), []

    def check(task, state, action, after, terminated, past):
        assert GRAMMAR.admissible(after) == sorted(env.admissible())

    for task in env.tasks("test"):
        assert env.reset(task) == task.start
        won, steps = play(env, task, policy("expert"), random.Random(task.id), check)
        assert won, task.id
        lengths.append(steps)
    assert sum(lengths) / len(lengths) < 16


@needs_official
def test_the_state_offers_what_the_engine_does_in_official_games(official):
    env = ALFWorldEnv(official)
    everything = [task for split in ("train", "validation", "test") for task in env.tasks(split)]
    slices = agrees_at_random(env, everything, 60)
    assert min(slices["hidden"], slices["seen"]) > 10
    bathtub = [task for task in everything if "-420/" in task.id]
    assert len(bathtub) == 28                                 # as the docstring of alfworld_text says
    agrees_at_random(env, bathtub, 10)


@needs_textworld
@needs_package
@pytest.mark.parametrize("kind", ["generated", pytest.param("official", marks=needs_official)])
def test_identical_to_textworld(kind, request):
    """A small sample, with impossible commands and a win; benchmarks/alfworld_equality.py plays many."""
    games: Games = request.getfixturevalue(kind)
    stock, ours, rng, clock = alfworld.StockEngine(), RuleEngine(), random.Random(4), Counter()
    game = min(games.by_split["test"], key=lambda g: len(g.packed))            # the stock engine is slow
    assert alfworld_equality.compare(game, stock, ours, 50, rng, clock) == ""
    assert clock["impossible"] >= 1 and clock["won"] == 1 and stock.done == bool(stock.score) == ours.won


class Echo(RuleEngine):
    """Says what textworld would; attributes given to it are lies."""

    def __init__(self, **lies):
        self.__dict__.update(lies)

    score = property(lambda self: self.__dict__.get("score", float(self.won)))
    done = property(lambda self: self.__dict__.get("done", self.won))


@pytest.mark.parametrize("lie, said", [({}, ""), ({"score": 1.0}, "score: 1.0 against 0.0"),
                                       ({"done": True}, "done: True against False")])
def test_comparing_engines_sees_what_they_say_of_the_end(lie, said):
    found = alfworld_equality.compare(hand_made(), Echo(**lie), RuleEngine(), 5, random.Random(0), Counter())
    assert found.endswith(said) and bool(found) == bool(lie)


@needs_package
def test_the_equality_benchmark_fails_where_it_should(generated, monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr("sys.argv", ["alfworld_equality.py", *words])
        code = alfworld_equality.main()
        return code, capsys.readouterr().out

    monkeypatch.setattr(alfworld_equality, "load", lambda data, seed: generated)
    monkeypatch.setattr(alfworld_equality, "StockEngine", Echo)
    assert {(g.split, g.name.split("-")[0]) for g in alfworld_equality.drawn(generated, 18, random.Random(0))} == {
        (split, kind) for split in generated.by_split for kind in alfworld_games.TYPES.values()}
    code, out = run("--games", "3", "--steps", "4")
    assert code == 1 and "3 games" in out and ": identical" in out and "times faster (at least 15)" in out    # 1 time
    monkeypatch.setattr(alfworld_equality, "FASTER", {"reset": 0, "step": 0})
    assert run("--games", "3", "--steps", "4")[0] == 0
    monkeypatch.setattr(Echo, "_inventory", lambda self: "You carry nothing.")
    code, out = run("--games", "18", "--steps", "30")
    assert code == 1 and "feedback: 'You carry nothing.' against" in out
    monkeypatch.setattr(alfworld_equality, "resident", lambda: 100.0)
    assert run("--memory", "10")[0] == 0
    used = iter(range(100, 200, 10))
    monkeypatch.setattr(alfworld_equality, "resident", lambda: next(used))
    code, out = run("--memory", "10")
    assert code == 1 and "memory grew by 40.0% (at most 10%)" in out
