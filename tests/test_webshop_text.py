"""The text side of WebShop: exact inverses on hostile text, task text, grammar, edits, judge, policies."""
import json
import os
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

import dreamgym
import envs
import fidelity
from envs import Task
from envs import webshop_text as wt
from envs.catalog import scripted_baseline, training_grammar
from envs.webshop import Shop, WebShopEnv
from envs.webshop_text import Page, WebShopGrammar, parse, render, task_text
from mexp import rename

OFFICIAL = Path(os.environ.get("DREAMGYM_SHARED", Path(__file__).parents[2] / "shared")) / "webshop"

TASK = "wireless , padded , travel headphones , color red , size small , price 60.00 ,"
ITEM = ("[item] norwick travel headphones | wireless | padded | foldable | $49.5 color black | blue | red | "
        "size small | large |")
RESULTS = "[results] p1 1 s017 norwick travel headphones | wireless | padded | $49.5 2 s201 keldon wool sweater | $19.5"
GRAMMAR = WebShopGrammar([TASK, "vegan , stretchy , wool sweater , color black ,", ITEM])


def pages(count, seed=0):
    """Random pages full of separators, markers and odd characters."""
    rng = random.Random(seed)
    bits = ["|", "*", ",", "$", "$49.5", "<think>", "<|im_end|>", "[item]", "[mem]", "[", "]", "<", ">", "buy", "back",
            "Buy", "to", "to $5", "_", "a_b", "%3c", "%", "100%", "%25", "%62uy", "p1", "1", "s017", "ünï", "İ", "ǅ",
            "Ω", "★", "\n", "\t", "  ", "\u2028", "\u00a0", "\u200b", "'", '"', "A", "color", "red *", "red |",
            "description", "&lt;", ""]

    def text():
        return "".join(rng.choice(bits) + rng.choice(["", " "]) for _ in range(rng.randint(0, 6)))

    def texts():
        return tuple(text() for _ in range(rng.randint(0, 3)))

    def tag():
        return rng.choice(["$49.5", "$12.5 to $18.75", "$1299.0"])

    for _ in range(count):
        choices = [texts() for _ in range(rng.randint(0, 3))]
        yield Page(rng.choice(wt.KINDS), number=rng.randint(1, 9),
                   items=tuple((text(), text(), tag()) for _ in range(rng.randint(0, 3))), title=text(), price=tag(),
                   options=tuple((text(), values, rng.choice([None, *values])) for values in choices), lines=texts())


# ------------------------------------------------------------------------------------------------ render and parse
def test_every_page_survives_its_text():
    for page in pages(2000):
        text = render(page)
        assert parse(text) == page
        assert text.count("[") == 1 and "<" not in text and "  " not in text and "\n" not in text


def test_the_text_of_ordinary_pages_stays_readable():
    page = Page("item", title="Norwick  Travel Headphones | Wireless | 100% Wool, 5\" wide", price="$12.5 to $18.75",
                options=(("Color", ("Light Blue", "Red"), "red"), ("Pattern Name", ("buy",), None)))
    assert render(page) == ('[item] norwick travel headphones | wireless | 100% wool, 5" wide | $12.5 to $18.75 '
                            "color light_blue | red * pattern_name %62uy |")
    assert render(parse(RESULTS)) == RESULTS and parse(RESULTS).items[1] == ("s201", "keldon wool sweater", "$19.5")
    assert render(Page("features", lines=("One , $5", "", "Two <b>"))) == "[features] one %2c %245 | two %3cb> |"
    assert [render(Page(kind)) for kind in ("home", "done", "reviews")] == ["[home]", "[done]", "[reviews]"]


@pytest.mark.parametrize("text", [
    "", "hello", "[mem]", "[nowhere]", "[home?", "[home] sweet home", "[done] [done]", "[description] no end",
    "[results]", "[results] page 1", "[results] p01", "[results] p1 1 s017 lamp |", "[results] p1 2 s017 lamp | $4.5",
    "[results] p1 1 s017 lamp | $4.5 ", "[item] lamp |", "[item] lamp $4.5", "[item] lamp | $x", "[item] Lamp | $4.5",
    "[item] lamp | $4.5 color", "[item] lamp | $4.5 color red", "[item] lamp | $4.5 red |",
    "[item] lamp | $4.5 color red * blue *", "[item] a <think> b | $4.5"])
def test_text_that_is_no_page_is_refused(text):
    with pytest.raises(ValueError):
        parse(text)


def test_pick_moves_the_mark():
    page = wt.pick(wt.pick(parse(ITEM), "black"), "red")
    assert render(page) == ITEM.replace("red |", "red *")
    with pytest.raises(ValueError, match="green"):
        wt.pick(page, "green")
    # the same value under two names: the last one gets it, and the mark is what counts
    twice = wt.pick(parse("[item] lamp | $4.5 body red | shade red | blue |"), "red")
    assert render(twice) == "[item] lamp | $4.5 body red | shade red * blue |"
    assert GRAMMAR.met("lamp , body red ,", render(twice)) and GRAMMAR.met(
        "lamp , body red ,", "[item] lamp | $4.5 body red * shade red | blue |")


# --------------------------------------------------------------------------------------------------------- tasks
@pytest.mark.parametrize("instruction, text", [
    ("Find me wireless, padded, travel headphones with color: red, and size: small, and price lower than 60.00 dollars",
     TASK),
    ("Find me leak proof, easy clean tongue cleaners with storage case for bad breath with color: Light Blue, and "
     "size: 5 ft, 2 in, and price lower than 40.00 dollars",
     "leak proof , easy clean tongue cleaners , storage case , bad breath , color light_blue , size 5_ft,_2_in , "
     "price 40.00 ,"),
    ("I'm looking for a grey bed frame that is easy to assemble, and price lower than 90.00 dollars",
     "grey bed frame , easy to assemble , price 90.00 ,"),
    ("i need a <think> lamp | [item] *", "%3cthink> lamp %7c %5bitem] %2a ,"),
    ("lamp", "lamp ,")])
def test_task_text(instruction, text):
    assert task_text(instruction) == text


@pytest.mark.skipif(not OFFICIAL.exists(), reason="official data not present")
def test_task_text_of_the_official_instructions():
    for instruction in json.loads((OFFICIAL / "human_goals.json").read_text())[:2000]:
        items = wt.task_items(task_text(instruction))
        assert items and all(item.strip() == item and "<" not in item and " , " not in item for item in items)


# ------------------------------------------------------------------------------------------------------- grammar
def test_admissible_actions():
    item_buttons = ["click buy", "click back", "click prev", "click description", "click features", "click reviews"]
    assert GRAMMAR.admissible("[home]") == ["search <words>"]
    assert GRAMMAR.admissible(RESULTS) == ["click 1", "click 2", "click next", "click back"]
    assert GRAMMAR.admissible("[results] p2") == ["click next", "click prev", "click back"]
    assert GRAMMAR.admissible(ITEM)[:5] == ["click black", "click blue", "click red", "click small", "click large"]
    assert GRAMMAR.admissible(ITEM)[5:] == item_buttons
    assert GRAMMAR.admissible("[reviews]") == ["click back", "click prev"] and GRAMMAR.admissible("[done]") == []


def test_key_resolves_what_a_link_points_at():
    assert GRAMMAR.key(RESULTS, "click 2") == "results click keldon wool sweater |"
    assert GRAMMAR.key(RESULTS, "click s201") == GRAMMAR.key(RESULTS, "click 2")
    assert GRAMMAR.key(RESULTS, "click 3") == "results click 3"
    assert GRAMMAR.key(RESULTS, "click next") == "results click next p1 s017 s201"
    assert GRAMMAR.key("[home]", "search red shoes") == GRAMMAR.key(ITEM, "search red shoes") == "search red shoes"
    assert GRAMMAR.key(ITEM, "click features") == (
        "item click features norwick travel headphones | wireless | padded | foldable |")
    assert GRAMMAR.key(ITEM, "click red") == "item click red"


def test_edits_and_back():
    picked = ITEM.replace("red |", "red *")
    other = RESULTS.replace("s201 keldon", "s202 pelwyn")
    far = "[results] p1 1 s300 zelmont desk chair | $14.5"
    page2 = "[results] p2 1 s018 corvane soap dispenser | $14.5"
    cases = [  # state, action, next state, memory, past, edit, page that patch gives back
        (ITEM, "click red", picked, [], [], "[pick] red", picked),
        (picked, "click red", picked, [], [], "[pick] red", picked),
        (ITEM, "click green", ITEM, [], [], "[same]", ITEM),
        (ITEM, "click back", "[home]", [far], [], "[home]", "[home]"),
        (ITEM, "click buy", "[done]", [far], [], "[done]", "[done]"),
        (picked, "click prev", RESULTS, [far], ["[home]", far, RESULTS, ITEM], "[prevpage]", RESULTS),
        ("[reviews]", "click prev", picked, [far], ["[home]", RESULTS, ITEM, picked], "[prevpage]", picked),
        (page2, "click prev", RESULTS, [far], ["[home]", RESULTS], "[prevpage]", RESULTS),
        (ITEM, "click prev", RESULTS, [far], [], RESULTS, RESULTS),
        (RESULTS, "click 1", ITEM, [ITEM, far], [], "[mem]", ITEM),
        (RESULTS, "click 1", ITEM, [far, ITEM], [], ITEM, ITEM),
        ("[home]", "search a", RESULTS, [other], [], "[mem]", other),                # half of the items agree: lossy
        ("[home]", "search a", RESULTS, [far], [], RESULTS, RESULTS),
        (RESULTS, "click next", page2, [RESULTS], [], page2, page2)]
    for state, action, following, memory, past, edit, patched in cases:
        assert GRAMMAR.diff(state, action, following, memory, past) == edit
        assert GRAMMAR.patch(state, action, edit, memory, past) == patched


@pytest.mark.parametrize("state, edit", [
    (ITEM, "[mem]"), (ITEM, "[prevpage]"), (ITEM, "[pick] green"), (ITEM, "[pick]"), (RESULTS, "[pick] red"),
    (ITEM, "[item] half a"), (ITEM, ""), (ITEM, "[home] [home]")])
def test_edits_with_nothing_to_work_on_are_refused(state, edit):
    with pytest.raises(ValueError):
        GRAMMAR.patch(state, "click prev", edit, [], [])


# --------------------------------------------------------------------------------------------------------- judge
def test_judge_is_a_chain_of_look_ups():
    bought = "[item] rosedale floor lamp | waterproof | adjustable | wireless | $49.5 color black | blue * red |"
    task = "foldable , wireless , floor lamp , color blue , price 50.00 ,"
    grammar = WebShopGrammar([bought])
    assert grammar.judge(task, bought) == [
        ("foldable", ",", False), ("wireless", "|", True), ("floor", "lamp", True), ("lamp", "|", True),
        ("blue", "*", True), ("price 50.00", "$49.5", True)]
    assert grammar.explain(task, bought, "click buy", "[done]") == (
        "foldable , no wireless | ok floor lamp ok lamp | ok blue * ok price 50.00 $49.5 ok")


@pytest.mark.parametrize("task, state, met", [
    (TASK, ITEM.replace("red |", "red *").replace("small |", "small *"), True),
    (TASK, ITEM, False),
    (TASK, ITEM.replace("red |", "red *"), False),
    (TASK.replace("60.00", "40.00"), ITEM.replace("red |", "red *").replace("small |", "small *"), False),
    ("headphones , price 49.50 ,", ITEM, True),                       # the limit itself is allowed
    ("wool sweater ,", ITEM, False), ("travel lamp ,", ITEM, False), ("travel ,", ITEM, True), (" ,", ITEM, False),
    ("fragrance ,", ITEM, False), ("lamp , price 15.00 ,", "[item] lamp | $10.0 to $20.0", False),   # a range: its end
    ("wireless , price 60.00 ,", "[home]", False), ("wireless ,", "[done]", False)])
def test_purchase_meets_the_task(task, state, met):
    assert GRAMMAR.met(task, state) is met


def test_explain():
    picked = ITEM.replace("red |", "red *")
    words = [GRAMMAR.explain(TASK, *step) for step in (
        ("[home]", "search red", RESULTS), (RESULTS, "click 1", ITEM), (ITEM, "click red", picked),
        (ITEM, "click x", ITEM), (ITEM, "click prev", RESULTS), (ITEM, "click features", "[features]"),
        (ITEM, "click back", "[home]"))]
    assert words == ["results", "open", "red | choose", "x none nothing", "back", "read", "home"]


# -------------------------------------------------------------------------------------------------- augmentation
@pytest.fixture(scope="module")
def world():
    """(environment, grammar of the training split, purchases of the noisy expert on training tasks)."""
    env = WebShopEnv(Shop.invented(0))
    grammar = training_grammar(env.shop)
    rng, act, purchases = random.Random(0), wt.policy("noisy", grammar), []
    for task in rng.choices(env.tasks("train"), k=80):
        state, over, history = env.reset(task), False, []
        while not over:
            history.append(act(task.text, state, history, rng))
            before = state
            state, _, terminated, truncated, info = env.step(history[-1])
            over = terminated or truncated
            assert over or grammar.admissible(state) == env.admissible()
        if terminated:
            purchases.append((task.text, before, info["success"]))
    return env, grammar, purchases


def test_judge_agrees_with_the_real_shop_on_what_agents_buy(world):
    _, grammar, purchases = world
    assert len(purchases) > 50 and 10 < sum(success for *_, success in purchases) < len(purchases) - 10
    assert all(grammar.met(task, state) == success for task, state, success in purchases)


def test_counterfactual_tasks_are_balanced_and_made_of_known_words(world):
    env, grammar, purchases = world
    rng = random.Random(1)
    items = {item for task in env.tasks("train") for item in wt.task_items(task.text)}
    items |= {f"price {ten}.00" for ten in range(10, 200, 10)}
    made = [(grammar.counterfactual(task, state, "click buy", state, rng), task, state)
            for task, state, _ in purchases for _ in range(10)]
    labels = Counter(grammar.met(new, state) for new, _, state in made)
    assert 0.4 < labels[True] / len(made) < 0.6
    assert all(set(wt.task_items(new)) <= items | {f"price {ten}.00" for ten in range(10, 200, 10)} for new, *_ in made)
    # every kind of wish is broken now and then, and about half of the failures have a single cause
    causes = [tuple(word for word, _, fine in grammar.judge(new, state) if not fine) for new, _, state in made]
    assert 0.3 < sum(len(cause) == 1 for cause in causes) / labels[False] < 0.8
    broken = {word for cause in causes for word in cause}
    assert any(word.startswith("price") for word in broken)
    assert broken & {"wireless", "vegan"} and broken & {"red", "blue"} and broken & {"lamp", "kit"}
    assert grammar.counterfactual(TASK, "[home]", "", "", rng) is None
    assert GRAMMAR.counterfactual(TASK, "[item] some unknown thing | $4.5", "", "", rng) is None


def test_renaming_content_words_changes_nothing_but_the_words(world):
    _, grammar, purchases = world
    rng = random.Random(2)
    words = sorted(set().union(*(grammar.content_words(f"{task} {state}") for task, state, _ in purchases)))
    assert {"wireless", "wool", "red", "small"} < set(words)
    assert not {"color", "size", "price", "click", "buy", "|", "*", ",", "p1", "$49.5", "[item]"} & set(words)
    names = dict(zip(words, rng.sample(words, len(words))))
    back = {new: old for old, new in names.items()}
    for task, state, success in purchases:
        new_task, new_state = rename(task, names), rename(state, names)
        assert new_task != task and render(parse(new_state)) == new_state
        assert grammar.met(new_task, new_state) == success
        assert rename(new_state, back) == state


def test_grammar_learns_names_from_pages_and_words_from_tasks():
    assert GRAMMAR.values == {"color": ["black", "blue", "red"], "size": ["small", "large"]}
    assert GRAMMAR.attributes == ["wireless", "padded", "vegan", "stretchy"]
    assert GRAMMAR.products == ["travel headphones", "wool sweater"]


def test_a_thought_reads_the_page_and_ends_with_what_it_comes_to():
    assert GRAMMAR.consider(TASK, ITEM, []) == "red | small | price 60.00 $49.5 ok fits"
    chosen = ITEM.replace("red | size", "red * size")
    assert GRAMMAR.consider(TASK, chosen, []) == "red * small | price 60.00 $49.5 ok fits"
    assert GRAMMAR.consider(TASK.replace("red", "pink"), ITEM, []) == "pink , small | price 60.00 $49.5 ok misses"
    assert GRAMMAR.consider(TASK.replace("60", "40"), ITEM, []) == "red | small | price 40.00 $49.5 no misses"
    assert GRAMMAR.consider("wireless , travel headphones ,", ITEM, []) == ""         # nothing to look up
    assert GRAMMAR.consider(TASK, RESULTS, []) == "1 $49.5 ok click 1"
    assert GRAMMAR.consider(TASK, RESULTS, ["click 1", "click prev"]) == "1 opened 2 $19.5 ok click 2"
    revisits = [GRAMMAR.varied(TASK, RESULTS, "click 1", ["search a"], random.Random(seed)) for seed in range(20)]
    assert all(revisit == (TASK, ["search a", "click 1", "click prev"]) for revisit in revisits)   # one is left to open
    assert GRAMMAR.varied(TASK, ITEM, "click red", ["search a"], random.Random(0)) == (TASK, ["search a"])
    assert [GRAMMAR.advice(TASK, page, []) for page in (RESULTS, ITEM)] == ["click 1", None]
    for task, page, history in ((TASK, RESULTS, ["click 1", "click prev", "click 2", "click prev"]),    # nothing is left
                                ("wireless , travel headphones ,", RESULTS, []), (TASK, "[home]", [])):
        assert GRAMMAR.advice(task, page, history) is None
        assert GRAMMAR.varied(task, page, "click next", history, random.Random(0)) == (task, history)
    assert GRAMMAR.consider(TASK.replace("60", "40"), RESULTS, ["search a"]) == "1 $49.5 no 2 $19.5 ok click 2"
    for action in ("search a", "click next"):                  # other hits than before
        assert GRAMMAR.consider(TASK, RESULTS, ["click 1", action]) == "1 $49.5 ok click 1"


def test_a_task_must_be_met_by_one_page():
    """Each wish is known of the product, but no single page meets them all: such a task cannot be solved."""
    other = ("[item] lunaro travel headphones | wireless | vegan | $19.5 color pink | size small |")
    grammar = WebShopGrammar([TASK, TASK.replace("60", "20"), "vegan , padded , travel headphones ,", ITEM, other])
    text = "{} , {} , travel headphones , color {} , size small , price {}.00 ,"
    actions, items = grammar.task_parts(text.format("wireless", "padded", "blue", 60))
    assert actions == {"search", "click", "buy", "choose"} and "color blue" in items
    assert grammar.task_parts(text.format("vegan", "wireless", "pink", 20))
    for wishes in (("vegan", "padded", "red", 60), ("wireless", "padded", "pink", 60), ("wireless", "padded", "red", 20)):
        with pytest.raises(ValueError, match="^nowhere$"):
            grammar.task_parts(text.format(*wishes))


# ------------------------------------------------------------------------------------------------------ policies
def test_scripted_policies_keep_their_distance():
    shop = Shop.invented(0)
    success = {name: scripted_baseline(shop, name, "train", episodes=100)[0] for name in wt.POLICIES}
    assert success["expert"] > 0.88 and 0.3 < success["noisy"] < 0.6
    assert 0.12 < success["mediocre"] < 0.35 and success["random"] < 0.05
    with pytest.raises(ValueError, match="noisy"):
        wt.policy("perfect", GRAMMAR)


def test_the_curious_shopper_takes_what_it_took_least_often():
    world = envs.open_world(SimpleNamespace(name="webshop", data=None, human_goals=False, catalog_seed=0, max_steps=10,
                                            train_tasks=None))
    grammar, act, rng = world.grammar([]), world.scripted("curious"), random.Random(0)
    transitions = []
    for number in range(12):                                   # the same task again and again
        transitions += fidelity.play_scripted(world.make(), world.tasks["train"][0], act, grammar, f"c{number}", rng)
    assert not any(t.done for t in transitions)
    kinds = Counter(grammar.kind(t.next_state) for t in transitions)
    assert kinds["features"] > 8 and kinds["description"] > 8 and transitions[1].action == "click next"
    for kind in ("features", "description"):
        keys = [grammar.key(t.state, t.action) for t in transitions if t.action == f"click {kind}"]
        assert len(set(keys[:5])) == 5 and max(Counter(keys).values()) <= wt.CURIOUS_TIMES


def test_varied_tasks_begin_unlike():
    tasks = [Task(str(i), f"{word} ,", "train") for i, word in enumerate("aababca")]
    order = [t.text[0] for _, t in zip(range(14), dreamgym.varied(tasks, lambda text, *_: text, random.Random(0)))]
    assert sorted(order[:3]) == ["a", "b", "c"] and sorted(order[:7]) == sorted("aababca")
    assert sorted(order[7:10]) == ["a", "b", "c"]
