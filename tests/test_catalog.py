"""The invented catalogue: solvable, fair (all that decides is on the page), and not solvable by rule of thumb."""
import itertools
import random
from collections import Counter

import pytest

from envs import catalog
from envs.webshop import PALETTE, Shop, normalize_color, token_set_ratio
from envs.webshop_text import WebShopGrammar, parse, task_text

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def data():
    return catalog.build(0)


@pytest.fixture(scope="module")
def shop():
    return Shop.invented(0)


def option_words(product):
    return {name: [entry["value"].lower() for entry in values] for name, values in
            product["customization_options"].items()}


def test_same_seed_same_catalogue_and_no_global_randomness():
    state = random.getstate()
    assert catalog.build(3) == catalog.build(3) != catalog.build(4)
    assert random.getstate() == state


@pytest.mark.parametrize("seed", SEEDS)
def test_sizes_and_splits(seed):
    data = catalog.build(seed)
    assert len(data.products) == 300 and Counter(data.split.values()) == {"train": 225, "validation": 30, "test": 45}
    assert all(count == 10 for count in Counter(p["query"] for p in data.products).values())
    assert len({p["asin"] for p in data.products}) == len({p["name"] for p in data.products}) == 300
    # every category is known from training products
    assert {p["query"] for p in data.products if data.split[p["asin"]] == "train"} == {
        p["query"] for p in data.products}
    goals = {split: len(Shop.invented(seed).split(split)) for split in ("train", "validation", "test")}
    assert 1500 <= sum(goals.values()) <= 3000 and goals["test"] >= 200


@pytest.mark.parametrize("seed", SEEDS)
def test_held_out_products_are_new_combinations_of_known_words(seed):
    data = catalog.build(seed)

    def words(product):
        texts = [product["name"], *itertools.chain(*option_words(product).values())]
        return {word for text in texts for word in text.lower().split()}

    train = set().union(*(words(p) for p in data.products if data.split[p["asin"]] == "train"))
    assert set().union(*map(words, data.products)) == train
    prices = {p["pricing"] for p in data.products if data.split[p["asin"]] == "train"}
    assert {p["pricing"] for p in data.products} == prices and 15 <= len(prices) <= 20


def test_words_cannot_be_confused_by_the_reward(data):
    """Its fuzzy and substring matches must only ever find what is really there."""
    attributes = sorted({a for entry in data.ins.values() for a in entry["attributes"]})
    options = {name.lower(): sorted({v for p in data.products for v in option_words(p).get(name, [])})
               for name in ("Color", "Size", "Pattern")}
    assert all(token_set_ratio(a, b) <= 85 for a, b in itertools.combinations(attributes, 2))
    pairs = [(name, value) for name, values in options.items() for value in values]
    for name, value in pairs:
        assert normalize_color(value) == value
        assert name == "color" or not any(color in value for color in PALETTE)
        for _, other in pairs:
            assert (token_set_ratio(normalize_color(other), normalize_color((name, value))) > 85) == (other == value)
    # words of one sort are no words of another
    brands, nouns = {b.lower() for b in catalog.BRANDS}, [n for names in data.nouns.values() for n in names]
    sorts = [brands, set(nouns), set(attributes), *map(set, options.values()), set(options)]
    assert sum(map(len, sorts)) == len(set().union(*sorts))
    # a rule that looks for option values in the instruction finds none inside another word
    words = set().union(*sorts)
    assert not [(value, word) for _, value in pairs for word in words if value in word and value != word]


def test_texts_name_an_attribute_only_as_the_title_does(data):
    attributes = {a for entry in data.ins.values() for a in entry["attributes"]}
    for product in data.products:
        entry = data.ins[product["asin"]]
        brand_and_name, *segments = product["name"].lower().split(" | ")
        assert segments == entry["attributes"] and set(entry["instruction_attributes"]) < set(segments)
        rest = " ".join([brand_and_name, product["full_description"], *product["small_description"]]).lower()
        assert not any(attribute in rest for attribute in attributes)


def test_categories_share_nothing_that_counts(data):
    kinds = {p["query"]: (set(data.nouns[p["name"]]), set(p["product_category"].split(" › "))) for p in data.products}
    assert len(kinds) == 30
    for (nouns, path), (other_nouns, other_path) in itertools.combinations(kinds.values(), 2):
        assert not nouns & other_nouns and len(path & other_path) < 2


def test_reward_is_one_exactly_if_the_page_meets_the_task(shop):
    """For sampled tasks: all pages of the category with every choice of options, and pages of other categories."""
    rng = random.Random(0)
    pages = [shop.state("item", (row,), 0, ()) for row in range(len(shop.asins))]
    grammar = WebShopGrammar(pages)
    outcomes = Counter()
    for index in rng.sample(range(len(shop)), 60):
        goal = shop.goal(index)
        task = task_text(goal.instruction_text)
        same = [row for row in range(len(shop.asins)) if shop.product(row).query == goal.query]
        for row in same + rng.sample(range(len(shop.asins)), 5):
            options = shop.product(row).options
            for values in itertools.product(*([None, *values] for values in options.values())):
                chosen = {name: value for name, value in zip(options, values) if value is not None}
                score, _ = shop.buy(row, index, chosen.values())
                met = grammar.met(task, shop.state("item", (row,), 0, tuple(chosen.items())))
                assert (score == 1.0) == met, (task, shop.product(row), chosen)
                outcomes[met] += 1
    assert outcomes[True] >= 60 and outcomes[False] > 1000


def test_results_page_is_short(shop):
    for index in shop.split("test"):
        rows = shop.index.search(shop.goal(index).instruction_text.lower())[:10]
        assert len(shop.state("results", rows, 1, ()).split(" ")) <= 150
        assert parse(shop.state("results", rows, 1, ())).items[0].id == shop.asins[rows[0]].lower()


def test_rules_of_thumb_fall_short_and_a_perfect_choice_exists(shop):
    rules = catalog.rule_baselines(shop)
    assert rules["first hit, no options"] < 0.1
    assert 0.4 <= rules["first hit, named options"] <= 0.7
    assert rules["best of the top 50"] > 0.95
