"""WebShop: equality with the original where its recordings are at hand, and each rule on its own.

Recordings and official files are third-party data outside the project (``$DREAMGYM_SHARED/webshop``, default
``../shared/webshop``); their tests skip where the folder is absent.
"""
import copy
import dataclasses
import hashlib
import json
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from config import UserError
from envs import open_world, webshop
from envs.records import Records
from envs.webshop import Goal, Product, Session, Shop, WebShopEnv, normalize_color, reward, token_set_ratio
from envs.webshop_text import WebShopGrammar, parse, policy, render

ROOT = Path(__file__).parent.parent
SHARED = Path(os.environ.get("DREAMGYM_SHARED", ROOT.parent / "shared")) / "webshop"
recordings = pytest.mark.skipif(not SHARED.is_dir(), reason="the recordings of the original are not at hand")


def digest(data):
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def goals(shop):
    return [dataclasses.asdict(shop.goal(index)) for index in range(len(shop))]


def lines(name):
    return [json.loads(line) for line in open(SHARED / name, encoding="utf-8")]


# ------------------------------------------------------------------------------------------- equality: recordings
@pytest.fixture(scope="module")
def small():
    return {human: Shop.load(SHARED / "small_catalog", human, SHARED / "nouns.json", show_attrs=human)
            for human in (False, True)}


@pytest.fixture(scope="module")
def official():
    return Shop.load(SHARED)


@recordings
def test_recorded_rewards():
    cases = lines("reward_cases.jsonl")
    assert len(cases) == 509
    for case in cases:
        record = case["product"]
        product = Product(record["asin"], record["Title"], record["query"], "", record["product_category"],
                          record["Description"], record["BulletPoints"], [], "", {}, record["Attributes"])
        got = reward(product, Goal(**case["goal"]), case["price"], case["options"].values(),
                     case["nouns"]["product"], case["nouns"]["goal"])
        assert got == (case["expected"]["reward"], case["expected"]["info"]), case["id"]
        assert list(got[1]) == list(case["expected"]["info"])


@recordings
def test_recorded_walks(small):
    walks = lines("page_walks.jsonl")
    assert sum(len(walk["steps"]) for walk in walks) == 365
    for walk in walks:
        shop = small[walk["human"]]
        session = Session(shop, walk["session"])
        assert dataclasses.asdict(shop.goal(walk["session"])) == walk["goal"]
        for step in walk["steps"]:
            paid, done = (0, False) if step["action"] is None else session.step(step["action"])[:2]
            assert step == {"action": step["action"], "obs": session.observation, "rich": session.rich,
                            "url": session.url, "has_search_bar": session.has_search_bar,
                            "clickables": session.clickables, "reward": paid, "done": done}
        asin = None if session.row is None else shop.asins[session.row]
        assert walk["final"] == {"reward": session.reward, "info": session.info, "done": session.done, "asin": asin,
                                 "options": session.options}


@recordings
def test_small_catalogue_fingerprints(small):
    assert digest(dict(zip(small[False].asins, small[False].prices))) == "a908ccac5b1cc5b5"
    assert len(small[False]) == 127 and digest(goals(small[False])) == "6114aa0388233927"
    assert len(small[True]) == 24 and digest(goals(small[True])) == "74f47061ad081f28"


@recordings
def test_official_fingerprints(official):
    assert digest(dict(zip(official.asins, official.prices))) == "bb1f9de1b3f96cf5"
    assert len(official) == 6910 and digest(goals(official)) == "80ed72031f975ac1"
    human = Shop.load(SHARED, human_goals=True)
    assert len(human) == 13 and digest(goals(human)) == "1a31ba015f048c4b"
    found = [official.index.search(official.goal(index).instruction_text.lower()) for index in range(500)]
    assert digest([[official.asins[row] for row in rows] for rows in found]) == "ed8af12fd045c91e"


@recordings
@pytest.mark.parametrize("with_options, mean, perfect", [(False, 0.571136967574908, 11),
                                                         (True, 0.7943975129445716, 282)])
def test_official_rule_baselines(official, with_options, mean, perfect):
    """Search the instruction, open the first hit, click the options that the instruction names, buy."""
    scores = []
    for goal in range(500):
        session = Session(official, goal)
        session.step(f"search[{session.instruction}]")
        session.step(f"click[{official.asins[session.rows[0]]}]")
        for values in official.product(session.row).options.values() if with_options else ():
            named = [value for value in values if value in session.instruction.lower()]
            if named:
                session.step(f"click[{max(named, key=len)}]")
        scores.append(session.step("click[buy now]")[0])
    assert (sum(scores) / 500, scores.count(1.0)) == (mean, perfect)


@recordings
def test_official_exact_purchases(official):
    exact = [official.buy(official.rows[goal.asin], index, goal.goal_options.values())[0]
             for index in range(len(official)) for goal in [official.goal(index)]]
    assert exact.count(1.0) == 6452


@recordings
def test_official_splits(official):
    assert official.split("test") == list(range(500)) and official.split("validation") == list(range(500, 1500))
    assert official.split("train") == list(range(1500, 6910))


# ------------------------------------------------------------------------------------------------- reward, by rule
@pytest.mark.parametrize("one, other, expected", [
    ("multi 5", "multi 3", 86), ("easy clean", "easy cleaning", 87), ("dish washer safe", "dishwasher safe", 97),
    ("12 ounce (pack of 2)", "12 ounce (pack of 1)", 94), ("8", "18", 67), ("large", "xx-large", 100),
    ("large", ("size", "large"), 100), ("xx-large", ("size", "large"), 77), ("x-large", ("size", "large"), 83),
    ("★", "★", 0), ("", "", 0), ("a_b", "a b", 100), ("caf\u00e9", "caf", 100), ("RED", "red", 100),
    ("\u0130x", "ix", 100), ("\u03a3", "\u03c3", 100),
])
def test_token_set_ratio(one, other, expected):
    assert token_set_ratio(one, other) == token_set_ratio(other, one) == expected


def test_palette():
    assert len(webshop.PALETTE) == 102 and webshop.PALETTE == sorted(webshop.PALETTE)
    assert normalize_color("navy blue") == "blue" and normalize_color("dark red") == "dark"
    assert normalize_color("rectangular") == "tan" and normalize_color("large") == "large"
    assert normalize_color(("color", "navy")) == "navy"             # equal to the value
    assert normalize_color(("color", "navy blue")) == ("color", "navy blue")        # contained is not enough


PRODUCT = Product("X", "Blue Ceramic Mug", "mugs", "garden", "Home › Kitchen › Mugs", "A mug for the living room.",
                  ["Dishwasher safe", "Lead free glaze"], [30.0], "$30.0", {}, ["multi 3"])
GOAL = Goal("Y", "garden", "mugs", "Stoneware Mug", "Home › Kitchen › Mugs", "", ["multi 5"], 30.0, [], 1)


def buy(product=PRODUCT, price=30.0, chosen=(), nouns=("mug",), goal_nouns=("mug",), **goal):
    return reward(product, dataclasses.replace(GOAL, **goal), price, chosen, nouns, goal_nouns)


@pytest.mark.parametrize("goal_value, chosen, in_list, in_dict", [
    ("navy blue", "light blue", True, True), ("navy blue", "navy", False, True), ("navy", "navy blue", False, False),
    ("black and red", "red", False, True), ("red", "black and red", False, False),
    ("dark red", "dark green", True, True),
    ("large", "xx-large", True, False), ("xx-large", "large", True, True), ("8", "18", False, False),
    ("12 ounce (pack of 2)", "12 ounce (pack of 1)", True, True), ("8", "size 8", True, True),
    ("10 wide", "10", True, True), ("rectangular", "rectangular", True, False),
    ("fashion black woman", "fashion black woman", True, False), ("★", "★", False, False),
])
def test_option_matching(goal_value, chosen, in_list, in_dict):
    name = "color" if any(color in goal_value for color in webshop.PALETTE) else "size"
    for goal_options, expected in (([goal_value], in_list), ({name: goal_value}, in_dict)):
        assert buy(goal_options=goal_options, chosen=[chosen])[1]["r_option"] == expected


def test_option_of_another_name_counts_only_without_the_name():
    assert buy(goal_options={"size": "8"}, chosen=["size 8"])[1]["r_option"] == 1
    assert buy(goal_options={"width": "8"}, chosen=["size 8"])[1]["r_option"] == 0


def test_attribute_needs_more_than_85():
    assert buy()[1]["r_att"] == 1.0                                 # 86
    at_85 = dataclasses.replace(PRODUCT, attributes=["glasses woolen"])
    assert token_set_ratio("wood glasses", "glasses woolen") == 85
    assert buy(at_85, attributes=["wood glasses"])[1]["r_att"] == 0.0


def test_attribute_in_the_texts():
    for wanted in ("ceramic", "safe lead", "living room"):          # title, joined bullets, description
        assert buy(attributes=[wanted])[1]["r_att"] == 1.0
    assert buy(attributes=["Ceramic"])[1]["r_att"] == 0.0           # the wish itself is not lower-cased
    assert buy(attributes=["ceramic", "multi 5", "steel"])[1]["r_att"] == 2 / 3


def test_price_limit_is_met_by_equality():
    assert buy(price=30.0)[0] == 1.0
    assert buy(price=30.01)[0] == 0.5


def test_product_type():
    def kind(**changes):
        return buy(**changes)[1]
    other = dict(query="shoes", product_category="Fashion › Shoes")
    assert kind(**other)["r_type"] == 1.0                                           # the nouns match
    # repeated nouns of the goal count, so the exact product can stay below 1
    assert kind(nouns=["set", "mug"], goal_nouns=["set", "mug", "set"])["title_score"] == 2 / 3
    assert kind(nouns=["a"], goal_nouns=list("abcde"), **other)["r_type"] == 0.5      # 0.2 is not more than 0.2
    assert kind(nouns=["a"], goal_nouns=list("abcde"))["r_type"] == 1.0               # but the query matches
    # a title with next to nothing in common overrules query and category
    assert kind(nouns=["a"], goal_nouns=list("abcdefghijk"))["r_type"] == 0.1
    assert kind(nouns=["z"], goal_nouns=["a"])["r_type"] == 0.0
    assert kind(nouns=["z"], goal_nouns=[], **other)["title_score"] == 0.2
    assert kind(query="x", product_category="Home›Kitchen")["category_match"] is True
    assert kind(query="x", product_category="Home › Food")["category_match"] is False


def test_reward_parts_and_weights():
    score, info = buy(goal_options=["red", "xl"], chosen=["red"], attributes=["multi 5", "steel"], price=31)
    assert score == (1 + 1 + 0) / 5
    assert info == {"r_type": 1.0, "r_att": 0.5, "w_att": 0.4, "query_match": True, "category_match": True,
                    "title_score": 1.0, "r_option": 0.5, "w_option": 0.4, "r_price": False, "w_price": 0.2}
    assert "r_option" not in buy()[1]


# ------------------------------------------------------------------------------------------------ loading and goals
def record(asin, name="Oak Shelf", pricing="$20.00", options="", **changes):
    return {"asin": asin, "name": name, "full_description": "Stands. ", "small_description": ["Made of oak"],
            "pricing": pricing, "product_category": "Home › Shelves", "category": "garden", "query": " Shelves ",
            "customization_options": options, **changes}


def values(*texts):
    return [{"value": text} for text in texts]


INSTRUCTION = {"attributes": ["solid"], "instruction": "Find me solid shelves", "instruction_attributes": ["solid"]}


def make_shop(products, ins=None, human=None, nouns=None, **options):
    products = copy.deepcopy(products)
    usable = [p for p in products if {"asin", "name"} <= set(p)]
    ins = {p["asin"]: INSTRUCTION for p in usable} if ins is None else ins
    nouns = {p["name"]: ["oak", "shelf"] for p in usable} if nouns is None else nouns
    return Shop(Records("products", products), Records("ins", ins), Records("nouns", nouns),
                None if human is None else Records("human", human), **options)


def test_which_records_load():
    products = [record("A1"), record("nan"), record("ELEVENCHARS"), record("A1", "Second of this asin"), record("A2")]
    assert make_shop(products).asins == ["A1", "A2"]
    assert make_shop(products, limit=4).asins == ["A1"]             # the limit counts skipped records


@pytest.mark.parametrize("pricing, prices, tag", [
    ("$877.80", [877.8], "$877.8"), ("$1,299.00", [1299.0], "$1299.0"), ("US $5", [5.0], "$5.0"),
    ("$12.50 - $18.75", [12.5, 18.75], "$12.5 to $18.75"), ("$1 $2 $3", [1.0, 2.0], "$1.0 to $2.0"),
    ("", [100.0], "$100.0"), (None, [100.0], "$100.0"),
])
def test_prices(pricing, prices, tag):
    product = make_shop([record("A", pricing=pricing)]).product(0)
    assert (product.prices, product.price_tag) == (prices, tag)


def test_options_and_other_fields():
    shop = make_shop([record("A", options={"Color": values(" Dark/Red ", "X"), "Size": None, "COLOR": values("Blue"),
                                           "Kind": values("B", "A")}, small_description="one", full_description=None)])
    product = shop.product(0)
    assert product.options == {"color": ["blue"], "kind": ["b", "a"]} and list(product.options) == ["color", "kind"]
    assert product.bullets == ["one"] and product.description == "" and product.query == "shelves"
    assert product.search_text == "oak shelf  one color: blue, and kind: b, a"
    two = make_shop([record("A", small_description=["First", "second"]), record("B", small_description=[])])
    assert two.product(0).search_text == "oak shelf stands.  first "        # the first bullet alone is indexed
    assert two.product(1).search_text == "oak shelf stands.   "
    slash = make_shop([record("A", options={"C": values(" Dark/Red ")})])
    assert slash.product(0).options == {"c": ["dark | red"]}


def test_synthetic_goals():
    """One per combination, first name slowest; one limit per product, drawn after all prices."""
    options = {"Size": values("s", "m"), "Color": values("red", "tan")}
    shop = make_shop([record("A", pricing="$10 - $20", options=options),
                      record("B", pricing="$980"), record("C", options={"None": []}), record("D")],
                     {**{asin: INSTRUCTION for asin in "ABC"}, "D": {"attributes": ["solid"]}}, seed=5)
    rng = random.Random(5)
    price = rng.uniform(10, 20)
    limit = max(rng.sample([20.0, 30.0, 40.0, 50.0], 2))
    assert list(shop.prices) == [price, 980.0, 20.0, 20.0]
    order = list(range(5))
    random.Random(233).shuffle(order)
    text = f", and price lower than {limit:.2f} dollars"
    wishes = [{"color": c, "size": s} for c in ("red", "tan") for s in ("s", "m")]
    expected = [(f"Find me solid shelves with color: {w['color']}, and size: {w['size']}{text}", limit, w)
                for w in wishes] + [("Find me solid shelves", 1000000, {})]
    got = [(g.instruction_text, g.price_upper, g.goal_options) for g in map(shop.goal, range(len(shop)))]
    assert got == [expected[number] for number in order]            # C has an option without values: no goal
    assert {type(goal.price_upper) for goal in map(shop.goal, range(5))} == {float, int}
    assert {goal.weight for goal in map(shop.goal, range(5))} == {0.2}


def test_human_goals():
    entry = {"instruction": "a shelf..", "instruction_attributes": ["solid"], "instruction_options": ["red", "s"]}
    shop = make_shop([record("A"), record("B")], ins={"B": INSTRUCTION},
                     human={"B": [{**entry, "instruction_attributes": []}, entry, {**entry, "instruction": "b"}],
                            "Z": [entry]}, seed=3)
    rng = random.Random(3)
    limits = [max(rng.sample([30.0, 40.0, 50.0, 60.0], 2)) for _ in range(2)]       # none for the skipped one
    found = {goal.instruction_text: goal for goal in map(shop.goal, range(len(shop)))}
    texts = [f"{text}, and price lower than {limit:.2f} dollars" for text, limit in zip(["a shelf", "b"], limits)]
    assert set(found) == set(texts) and found[texts[0]].goal_options == ["red", "s"] and found[texts[0]].weight == 1
    assert shop.product(0).attributes == ["DUMMY_ATTR"] and shop.product(1).attributes == ["solid"]


def test_weighted_draw_is_off_by_one():
    shop = make_shop([record("A", options={"Size": values("a", "b", "c")})])
    drawn = [shop.draw_goal(random.Random(seed)) for seed in range(400)]
    assert set(drawn) == {1, 2} and 220 < drawn.count(2) < 310      # the last goal has two shares of three


@pytest.mark.parametrize("change, message", [
    ({"products": [record("A"), {"name": "x"}]}, "products: record 1 .*'asin'"),
    ({"products": [record("A"), "text"]}, "products: record 1 .*'asin'"),
    ({"products": [record("a1")]}, "upper case"), ({"products": [record("REVIEWS")]}, "button"),
    ({"products": [record("A", name=["x"])], "nouns": {}}, "record 0 .*'A'.*'name' must be a text"),
    ({"products": [record("A", query=None)]}, "'query'"), ({"products": [record("A", category=3)]}, "'category'"),
    ({"products": [record("A", product_category=None)]}, "'product_category'"),
    ({"products": [record("A", full_description=["x"])]}, "'full_description'"),
    ({"products": [record("A", small_description=[None])]}, "'small_description'"),
    *(({"products": [record("A", pricing=wrong)]}, "'pricing'") for wrong in ("12.50", "$", 12.5, "$1.2.3", ["$1"], "$0.00001", "$" + "9" * 400)),
    ({"products": [record("A", options={f"o{i}": values(*map(str, range(100))) for i in range(12)})]}, "combinations"),
    ({"products": [record("A", options=["red"])]}, "'customization_options'"),
    ({"products": [record("A", options={"Color": ["red"]})]}, "'customization_options'"),
    ({"products": [record("A", options={"Color": [{"image": ""}]})]}, "'customization_options'"),
    ({"products": [record("nan")]}, "no product"),
    ({"ins": {}}, "ins: no entry for asin 'A'"), ({"ins": {"A": []}}, "ins: record 0 .*'A'.* object"),
    ({"ins": {"A": {**INSTRUCTION, "instruction": 5}}}, "'instruction' is a text"),
    ({"ins": {"A": {**INSTRUCTION, "instruction_attributes": []}}}, "'instruction_attributes'.*not empty"),
    ({"ins": {"A": {**INSTRUCTION, "attributes": "solid"}}}, "'attributes'.* list"),
    ({"ins": {"A": {"attributes": []}}}, "no instruction"),
    ({"nouns": {}}, "nouns: no entry for 'Oak Shelf'"), ({"nouns": {"Oak Shelf": "oak"}}, "nouns: record 0 .* list"),
    ({"human": {"A": {}}}, "human: record 0 .* list of objects"),
    ({"human": {"A": [{"instruction": "x"}]}}, "'instruction_attributes'"),
    ({"human": {"A": [{"instruction_attributes": ["x"], "instruction_options": []}]}}, "'instruction'"),
    ({"human": {"A": [{"instruction": "x", "instruction_attributes": ["x"], "instruction_options": {}}]}}, "_options'"),
])
def test_unusable_data_is_one_clear_line(change, message):
    with pytest.raises(UserError, match=message) as caught:
        make_shop(**{"products": [record("A")], **change})
    assert "\n" not in str(caught.value)


def test_folder_errors(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="needs items_shuffle.json or items_shuffle_1000.json, found neither"):
        Shop.load(tmp_path)
    write("items_shuffle_1000.json", json.dumps([record("A")]))
    write("items_ins_v2.json", '{"A": {"attributes": []}, "A": {"attributes": []}}')
    write("nouns.json", '{"Oak Shelf": ["oak"]}')
    with pytest.raises(UserError, match=r"items_ins_v2.json: record 1 .*'A': occurs twice"):
        Shop.load(tmp_path)
    write("items_ins_v2.json", json.dumps({"A": INSTRUCTION}))
    assert len(Shop.load(tmp_path)) == 1
    with pytest.raises(UserError, match="items_human_ins"):
        Shop.load(tmp_path, human_goals=True)
    write("items_shuffle.json", "[]")
    with pytest.raises(UserError, match="found both: keep one"):
        Shop.load(tmp_path)
    (tmp_path / "items_shuffle_1000.json").unlink()
    write("items_shuffle.json", json.dumps([record("A"), record("B")])[:-40])
    with pytest.raises(UserError, match="items_shuffle.json: record 1 .*truncated"):
        Shop.load(tmp_path)
    (tmp_path / "nouns.json").unlink()
    with pytest.raises(UserError, match="nouns.json: cannot be read"):
        Shop.load(tmp_path)


def test_the_noun_table_needs_spacy(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "spacy", None)
    assert webshop.main(["--nouns", "--data", str(tmp_path)]) == 2
    assert "pip install" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------- session, quirks
@pytest.fixture(scope="module")
def shop():
    options = {"Color": values("Red", "Black"), "Frame": values("Black", "Oak", ""),
               "Kind": values("Features", "Plain [new]", "Size\"x", "Größe", "Search", "Next >")}
    products = [record("B000", "Odd Poster", options=options, small_description=["", " ", "Real ", "\n"],
                       full_description=" ", query="Posters", category="garden tools")]
    products += [record(f"A{n:03d}", f"Shelf {n}", pricing="$1 - $2") for n in range(60)]
    return make_shop(products, show_attrs=True)


def start(shop, *actions, goal=0):
    session = Session(shop, goal)
    for action in actions:
        session.step(action)
    return session


def found(session):
    return [session.shop.asins[row] for row in session.rows]


@pytest.mark.parametrize("action", [
    "", "search", "search[]", "click[]", "Click[search]", "Search[x]", "think[x]", "buy now", "\nsearch[x]",
    " search[x]", "click[search]", "click[buy now]", "click[a]x[y]", "Action: search[x]", "search[<a> x]",
    "search[<c>]", "click[no such]", "search[x"])
def test_bad_actions_change_nothing(shop, action):
    session = start(shop)
    before = session.observation, session.url, session.clickables
    assert session.step(action) == (0.0, False, False)
    assert before == (session.observation, session.url, session.clickables) and session.clickables == ["search"]


def test_action_grammar(shop):
    assert start(shop, "search[shelf] please").kind == "results"        # what follows the last bracket is ignored
    assert start(shop, "search[a]b]c").words == ["a]b"]                  # the argument runs to the last bracket
    assert start(shop, "search[ODD  Poster]").words == ["odd", "", "poster"]
    session = start(shop, "search[odd poster]", "click[B000]")
    assert session.step("click[BUY NOW] please")[1] is True
    assert session.done and session.kind == "done" and session.clickables == []


def test_engine_commands(shop):
    assert len(set(found(start(shop, "search[<r>]")))) == 50
    assert found(start(shop, "search[<c> garden]")) == [f"A{n:03d}" for n in range(60)]
    assert len(start(shop, "search[<C> garden tools]").rows) == 60      # only the second word counts
    assert found(start(shop, "search[<q> posters]")) == ["B000"] and start(shop, "search[<q> none]").rows == ()
    state = random.getstate()
    start(shop, "search[<r>]")
    assert random.getstate() == state


def test_paging(shop):
    session = start(shop, "search[shelf]")
    assert len(session.rows) == 50 and "Page 1 (Total results: 50)" in session.observation
    assert session.clickables[:2] == ["back to search", "next >"] and len(session.shown) == 10
    for _ in range(6):
        session.step("click[next >]")
    assert session.number == 7 and session.shown == () and session.clickables == ["back to search", "< prev", "next >"]
    session.step("click[< prev]")
    assert session.number == 6
    assert start(shop, "search[zzz]").observation.endswith("Page 1 (Total results: 0) [SEP] Next >")


def test_item_page_and_options(shop):
    session = start(shop, "search[odd poster]", "click[b000]")
    assert session.clickables == [
        "back to search", "< prev", "description", "features", "reviews", "attributes", "buy now",
        "red", "black", "oak", "", "plain [new]", 'size"x', "größe", "search", "next >"]
    session.step("click[black]")                    # under two names: the later one gets it
    assert session.options == {"frame": "black"}
    assert session.rich.startswith(2 * "You have clicked black.\n" + "Instruction:\n")
    assert session.rich.count("  [clicked button] black [clicked button_]\n") == 2
    session.step("click[red]")
    assert session.rich.startswith(2 * "You have clicked black.\n" + "You have clicked red.\nInstruction:")
    for hidden in ('size"x', "größe"):              # the URL holds JSON, so these never show as clicked
        assert session.step(f"click[{hidden}]") == (0.0, False, True) and session.options["kind"] == hidden
        assert f"[button] {hidden} [button_]" in session.rich
    for impossible in ("click[plain [new]]", "click[search]", "click[]"):
        assert session.step(impossible) == (0.0, False, False)
    session.step("click[next >]")                   # no button here, but an option of this text
    assert session.options["kind"] == "next >" and session.kind == "item"
    session.step("click[features]")                 # an option and a button: the text decides
    assert session.kind == "features" and session.url.endswith("/Features/" + str(session.options))
    session.step("click[< prev]")
    assert session.kind == "item" and session.options
    session.step("click[< prev]")                   # a results page forgets options, remembers visits
    assert session.kind == "results" and session.options == {} and session.row is None
    assert "\n[clicked button] B000 [clicked button_]\n" in session.rich
    session.step("click[back to search]")
    session.step("search[odd poster]")
    assert "\n[button] B000 [button_]\n" in session.rich and session.number == 1


def test_quoted_words_of_the_query_show_as_clicked(shop):
    session = start(shop, 'search[odd "red" poster]', "click[b000]")
    assert session.rich.startswith("You have clicked red.") and session.options == {}


def test_white_space_nodes(shop):
    session = start(shop, "search[odd poster]", "click[b000]", "click[features]")
    head = f"Instruction: [SEP] {session.instruction} [SEP] Back to Search [SEP] < Prev"
    assert session.observation == head + " [SEP]  [SEP]  [SEP] Real"        # "\n" vanishes
    assert session.rich.endswith("[button] < Prev [button_]\n \n \n Real \n")
    session = start(shop, "search[odd poster]", "click[b000]", "click[description]")
    assert session.observation == head + " [SEP] "
    assert start(shop, "search[odd poster]", "click[b000]", "click[reviews]").observation == head
    session = start(shop, "search[odd poster]", "click[b000]", "click[attributes]")
    assert session.rich.endswith("\n solid\ngarden tools\nposters\nHome › Shelves\n")


def test_queries_that_name_pages_fool_prev(shop):
    session = start(shop, "search[odd search_results]", "click[b000]")
    session.step("click[< prev]")
    assert session.kind == "results" and session.number == 0 and session.shown == ()
    assert session.clickables == ["back to search", "next >"]
    session = start(shop, "search[odd item_page]", "click[b000]", "click[reviews]", "click[< prev]")
    assert session.kind == "results" and session.number == 1


def test_life_after_the_purchase(shop):
    session = start(shop, "search[shelf 3]")
    asin = found(session)[0]
    score, done, valid = session.step(f"click[{asin}]") and session.step("click[buy now]")
    assert done and valid and session.reward == score and session.url.endswith(f"/done/{session.id}/{asin}/{{}}")
    assert "Your code:  [SEP] None" not in session.observation and str(score) in session.observation
    assert session.step("click[buy now]") == (0.0, False, False)
    assert session.step("search[shelf]") == (0.0, False, True) and session.done
    session.step(f"click[{found(session)[0]}]")
    assert session.step("click[buy now]")[1] is True
    session.reset()
    assert session.done and session.info is not None and session.kind == "home"     # only the page is new


def test_done_page_escapes_options():
    shop = make_shop([record("A", options={"B": values("<b> & 'é'"), "A": values("x")})])
    session = start(shop, "search[oak]", "click[a]", "click[<b> & 'é']", "click[x]", "click[buy now]")
    escaped = r'{"a": "x", "b": "\u003cb\u003e \u0026 \u0027\u00e9\u0027"}'
    assert f"options [SEP] {escaped} [SEP]" in session.observation
    assert session.url.endswith("/done/0/A/{'b': \"<b> & 'é'\", 'a': 'x'}")


# ----------------------------------------------------------------------------------------------------- environment
@pytest.fixture(scope="module")
def invented():
    return Shop.invented()


def play(env, task, act):
    """(states, actions, last step's values) of one episode."""
    states, actions, over = [env.reset(task)], [], False
    while not over:
        actions.append(act(states[-1], actions))
        state, paid, terminated, truncated, info = env.step(actions[-1])
        states.append(state)
        over = terminated or truncated
    return states, actions, (paid, terminated, truncated, info)


def test_perfect_and_partial_purchases(invented):
    env = WebShopEnv(invented)
    for task in env.tasks("test")[::10]:
        goal = invented.goal(task.goal)
        assert env.reset(task) == task.start == "[home]"
        env.step(f"search {goal.name.replace('|', ' ')}")
        steps = [f"click {goal.asin.lower()}", *[f"click {value}" for value in goal.goal_options.values()], "click buy"]
        for action in steps[:-1]:
            state, paid, terminated, truncated, info = env.step(action)
            assert (paid, terminated, truncated) == (0.0, False, False)
            assert info == {"success": False, "score": 0.0, "invalid": False}
        state, paid, terminated, truncated, info = env.step(steps[-1])
        assert (state, paid, terminated, truncated) == ("[done]", 1.0, True, False)
        assert info["success"] is True and info["score"] == 1.0 and info["parts"]["r_att"] == 1.0
        env.reset(task)
        env.step(f"search {goal.name.replace('|', ' ')}")
        env.step(steps[0])
        state, paid, terminated, truncated, info = env.step("click buy")        # right product, no options
        assert paid == 0.0 and terminated and 0 < info["score"] < 1 and info["success"] is False


def test_step_limit_truncates(invented):
    env = WebShopEnv(invented, max_steps=3)
    env.reset(env.tasks("train")[0])
    results = [env.step("click next")[2:4] for _ in range(4)]
    assert results == [(False, False), (False, False), (False, True), (False, True)]
    env.reset(env.tasks("train")[0])
    for action in ("search lamp", "click 1"):
        env.step(action)
    assert env.step("click buy")[2:4] == (True, False)              # an end in the last step is no truncation
    state, paid, terminated, truncated, info = env.step("search lamp")
    assert (state, paid, terminated, truncated, info["invalid"]) == ("[done]", 0.0, True, False, True)
    assert env.admissible() == []


@pytest.mark.parametrize("action", [
    "", " ", "search", "search ", "click", "click ", "click 11", "click 0", "click -1", "click ²", "click s999",
    "click buy", "click prev", "click red", "buy", "click[buy now]", "click 1 2", "search <r>", "search <c> garden",
    "search <Q> x", "search %3cr> x", "search[<r>]", "search[<A> x]", "search[<c> garden] x", "\nsearch lamp",
    "Search lamp", "[results]", "click\n1", None, 3])
def test_invalid_actions_change_nothing(invented, action):
    env = WebShopEnv(invented)
    env.reset(env.tasks("train")[0])
    for setup in ("", "search lamp"):
        before = env.step(setup)[0]
        state, paid, terminated, truncated, info = env.step(action)
        assert state == before and (paid, terminated, truncated) == (0.0, False, False)
        assert info == {"success": False, "score": 0.0, "invalid": True}


def test_nothing_an_agent_writes_raises(shop):
    rng, env, before = random.Random(4), WebShopEnv(shop, 40), random.getstate()
    pieces = ["search", "click", "[", "]", " ", "b000", "1", "buy", "buy now", "back", "prev", "next", "< prev",
              "next >", "features", "attributes", "red", "_", "%66eatures", "<c>", "<r>", "<a>", "\n", "★", "|",
              "search_results", "*"]
    for episode in range(60):
        env.reset(env.task(0, "train"))
        for step in range(45):
            action = rng.choice(["search odd poster", "click 1", "".join(rng.choices(pieces, k=rng.randint(1, 6)))])
            state, paid, terminated, truncated, info = env.step(action)
            assert render(parse(state)) == state and not (terminated and truncated)
    assert random.getstate() == before


def test_every_admissible_action_works_and_words_equal_the_original_form(shop):
    """Each abstract action leads where the original's click leads, odd option texts included."""
    env, other = WebShopEnv(shop, 100), WebShopEnv(shop, 100)
    task = env.task(0, "train")

    def walk(actions):
        env.reset(task)
        for action in actions:
            env.step(action)
        return env.session.state()

    tried = set()
    odd = ["search odd poster"]
    for path in ([], odd, [*odd, "click 1"], [*odd, "click b000", "click red"], [*odd, "click 1", "click features"],
                 ["search shelf", "click next"]):
        state = walk(path)
        assert env.admissible() == WebShopGrammar().admissible(state)
        for action in env.admissible():
            walk(path)
            action = action.replace("<words>", "shelf")
            info = env.step(action)[4]
            assert not info["invalid"], (path, action)
            tried.add(action)
    assert {"click red", "click %66eatures", "click plain_%5bnew]", "click buy", "click prev", "click 10"} <= tried
    for setup, words, original in ((odd, "click 1", "click[b000]"), (odd, "search red_oak", "search[red oak]"),
                                   ([*odd, "click 1"], "click red", "click[red]"),
                                   ([*odd, "click 1"], "click back", "click[back to search]"),
                                   ([*odd, "click 1"], "click prev", "click[< prev]"),
                                   ([*odd, "click 1"], "click buy", "click[buy now]")):
        for one, action in ((env, words), (other, original)):
            one.reset(task)
            for step in [*setup, action]:
                one.step(step)
        assert (env.session.observation, env.session.url) == (other.session.observation, other.session.url)


def test_invented_tasks_have_no_goal_here(invented):
    env = WebShopEnv(invented)
    with pytest.raises(ValueError, match="no goal"):
        env.reset(dataclasses.replace(env.tasks("train")[0], goal=None, parent="webshop-1"))


def test_episodes_share_a_shop_and_do_not_touch_each_other(invented):
    act = policy("noisy", WebShopGrammar())
    env, rng = WebShopEnv(invented), random.Random(0)
    tasks = env.tasks("train")[:8]
    alone = [play(env, task, lambda state, past: act(task.text, state, past, rng)) for task in tasks]
    envs = [WebShopEnv(invented) for _ in tasks]
    states = [[env.reset(task)] for env, task in zip(envs, tasks)]
    for step in range(15):                          # the same actions, all episodes side by side
        for number, (_, actions, _) in enumerate(alone):
            if step < len(actions):
                states[number].append(envs[number].step(actions[step])[0])
    assert states == [states for states, _, _ in alone]


def assert_disjoint(shop):
    names = ("train", "validation", "test")
    ids = {name: set(shop.split(name)) for name in names}
    products = {name: {shop.goal(index).asin for index in ids[name]} for name in names}
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert ids[one] and ids[other] and not ids[one] & ids[other] and not products[one] & products[other]


SPLIT_DIGEST = """
import hashlib, json, random, sys
sys.path.insert(0, sys.argv[1])
random.seed(int(sys.argv[2]))                               # workers differ in their global state
from envs.webshop import Shop, WebShopEnv
before = random.getstate()
shop = Shop.invented(int(sys.argv[3]))
tasks = {name: [(t.id, t.text, t.goal, shop.goal(t.goal).asin) for t in WebShopEnv(shop).tasks(name)]
         for name in ("train", "validation", "test")}
assert random.getstate() == before
print(hashlib.sha256(json.dumps([tasks, list(shop.prices)]).encode()).hexdigest())
"""


def test_splits_are_disjoint_in_goals_and_products_for_all_workers_and_seeds():
    train, held_out = {}, {}
    for catalog_seed in range(4):
        for worker in range(2):
            random.seed(worker)
            shop = Shop.invented(catalog_seed)
            assert_disjoint(shop)
            env = WebShopEnv(shop)
            for store, names in ((train, ["train"]), (held_out, ["validation", "test"])):
                store.setdefault(catalog_seed, set()).update(shop.goal(task.goal).asin for name in names
                                                             for task in env.tasks(name))
        assert not train[catalog_seed] & held_out[catalog_seed]     # over all workers of a run
    workers = [subprocess.run([sys.executable, "-c", SPLIT_DIGEST, str(ROOT), str(worker), "1"], capture_output=True,
                              text=True, check=True).stdout for worker in (1, 2)]
    assert workers[0] == workers[1]


def test_building_and_playing_leave_the_global_generator_alone():
    random.seed(7)
    before = random.getstate()
    shops = [make_shop([record(f"A{n}", pricing="$10 - $90") for n in range(20)], seed=seed) for seed in (1, 1, 2)]
    start(shops[0], "search[<r>]", "search[oak]", "click[a1]", "click[buy now]")
    assert random.getstate() == before
    assert shops[0].prices == shops[1].prices != shops[2].prices and goals(shops[0]) == goals(shops[1])


@pytest.mark.parametrize("seed", range(3))
def test_no_held_out_task_is_asked_for_in_another_split(seed):
    """Two products may share a wish; then options or limit differ, or the held-out goal is in no split."""
    env = WebShopEnv(Shop.invented(seed))
    texts = {split: {task.text for task in env.tasks(split)} for split in ("train", "validation", "test")}
    assert len(texts["test"]) >= 200 and len(texts["validation"]) >= 100
    assert not texts["train"] & texts["validation"] and not (texts["train"] | texts["validation"]) & texts["test"]


def test_odd_numbers_are_invalid_and_never_raise():
    env = WebShopEnv(Shop.invented(0))
    env.reset(env.tasks("train")[0])
    state, *_ = env.step("search wool sweater")
    for word in ("1" * 5000, "\u0661", "01", "0", "11", "-1", "1.0"):
        assert env.step(f"click {word}")[0] == state and env.step(f"click {word}")[4]["invalid"]


def test_published_splits_by_product():
    products = [record(f"A{n:03d}", options={"Size": values(*map(str, range(10)))}) for n in range(200)]
    by_id, by_product = make_shop(products), make_shop(products, by_product=True)
    assert [len(by_id.split(name)) for name in ("test", "validation", "train")] == [500, 1000, 500]
    assert by_product.split("test") == by_id.split("test")
    products = {name: {by_product.goal(index).asin for index in by_product.split(name)} for name in webshop_splits()}
    assert not products["train"] & (products["validation"] | products["test"])
    assert not products["validation"] & products["test"]
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        by_id.split("dev")


def webshop_splits():
    return ("train", "validation", "test")


def test_memory_stays_flat(invented):
    env, act, rng = WebShopEnv(invented), policy("random", WebShopGrammar()), random.Random(0)
    tasks = env.tasks("train")[:50]

    def episodes(count):
        for number in range(count):
            task = tasks[number % len(tasks)]
            env.reset(task)
            env.step("search " + task.text.split(" , ")[0])
            for link in ("1", "features", "prev", "prev", "next", "1", "buy"):
                env.step(f"click {link}")

    episodes(300)
    tracemalloc.start()
    first = tracemalloc.get_traced_memory()[0]
    episodes(2000)
    grown = tracemalloc.get_traced_memory()[0] - first
    tracemalloc.stop()
    assert grown < 50_000                           # bytes; one kept episode each would be hundreds of kB


def test_caches_are_bounded(invented):
    for cached in (invented.goal, invented.product, invented.item_page, invented.sub_page, invented.results_page,
                   invented.state, invented.index.search):
        assert cached.cache_info().maxsize is not None


def test_open_world():
    cfg = SimpleNamespace(name="webshop", data=None, human_goals=False, catalog_seed=0, max_steps=8, train_tasks=None)
    world = open_world(cfg)
    assert {name: len(tasks) > 100 for name, tasks in world.tasks.items()} == dict.fromkeys(webshop_splits(), True)
    env, rng, expert = world.make(), random.Random(0), world.scripted("expert")
    assert env.max_steps == 8 and env is not world.make() and env.shop is world.make().shop
    won = sum(play(env, task, lambda state, past: expert(task.text, state, past, rng))[2][0]
              for task in world.tasks["train"][:40])
    assert won > 20
    assert world.grammar(["[home]"]).kind("[home]") == "home"


# ---------------------------------------------------------------------------------------------------- command line
def test_bench_prints_its_figures(capsys):
    webshop.bench(Shop.invented, seconds=0.1)
    text = capsys.readouterr().out
    assert "load and index: 300 products" in text and "Session: " in text and "WebShopEnv: " in text and "MB" in text


def test_play_by_hand(monkeypatch, capsys):
    answers = iter(["search tea infuser", "nonsense", "click 1", "click buy"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    assert webshop.main(["--play", "--goal", "0"]) == 0
    text = capsys.readouterr().out
    assert "[results] p1 1 " in text and "nothing happens; possible: click 1" in text and "[done]\nscore 0" in text


def test_command_line_errors(capsys, tmp_path):
    assert webshop.main(["--bench", "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
