"""An invented catalogue in WebShop's own file format, small enough to learn from on two cores.

Everything that decides a purchase stands on the product's page: the attributes of the reward are the segments of
the title, and the options and the price are printed.  What makes it hard: the ten products of a category
share most attributes, prices spread over the limits, and the descriptions (which the search indexes) name
options that the product does not have.  So the first hit of a search is often a wrong one.

``python -m envs.catalog --baselines`` prints what rules reach on the test split; no result should be read
without it.
"""
from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from itertools import combinations

BRANDS = ("Aldmoor Brensa Calverto Corvane Dunleith Elvaro Fenwilde Gransby Halvorn Jorvale Keldon Lunaro Maristo "
          "Norwick Oakriff Pelwyn Quillon Rosedale Selvik Varnholt Wexley Zelmont").split()
# department (one of the five of WebShop): products.  No two products share a word.
PRODUCTS = {
    "fashion": ["Wool Sweater", "Winter Jacket", "Running Shoes", "Leather Wallet", "Canvas Backpack", "Silk Scarf"],
    "electronics": ["Travel Headphones", "Shelf Speaker", "Phone Case", "Gaming Keyboard", "Tablet Stand",
                    "Video Projector"],
    "garden": ["Floor Lamp", "Desk Chair", "Wall Clock", "Bath Towel", "Shower Curtain", "Throw Blanket"],
    "beauty": ["Makeup Mirror", "Hair Dryer", "Soap Dispenser", "Nail Kit", "Face Brush", "Perfume Bottle"],
    "grocery": ["Tea Infuser", "Spice Rack", "Lunch Box", "Picnic Basket", "Pasta Maker", "Kitchen Knife"],
}
ATTRIBUTES = ("Wireless Padded Foldable Waterproof Stretchy Reversible Adjustable Lightweight Washable Durable "
              "Insulated Handmade Compact Rechargeable Vegan Cushioned").split()
COLORS = "Black Blue Green Red White Gray Brown Pink Purple Yellow".split()
OTHER_OPTIONS = {"Size": "Small Medium Large Mini".split(),
                 "Pattern": "Plain Striped Dotted Floral".split()}
PRICES = [5.0 * step + 9.5 for step in range(1, 20)]        # $14.5 .. $104.5: 19 tags, none on a multiple of 10
PRICE_BANDS = (0, 3, 6, 9)                                  # a category has ten neighbouring prices

PER_CATEGORY = 10
DECOYS = 5                                                  # at most so many foreign options per text
HELD_OUT = {"validation": 30, "test": 45}                   # products; the rest is for training


@dataclass(frozen=True)
class Catalog:
    """The three official files, the noun table and the split.

    products: records as in ``items_shuffle.json``.  ins: ``items_ins_v2.json``, {asin: attributes, instruction,
    instruction_attributes}.  human: ``items_human_ins.json`` (empty).  nouns: {product name: its nouns in lower
    case}.  split: {asin: train | validation | test}; a task belongs to the split of its target product.
    """
    products: list[dict]
    ins: dict[str, dict]
    human: dict
    nouns: dict[str, list[str]]
    split: dict[str, str]


def build(seed: int = 0) -> Catalog:
    """The catalogue of this seed: 300 products in 30 categories.  Uses a random generator of its own."""
    rng = random.Random(f"catalog {seed}")
    products: list[dict] = []
    ins: dict[str, dict] = {}
    nouns: dict[str, list[str]] = {}
    seconds, bands = [*OTHER_OPTIONS, None] * 10, [*PRICE_BANDS] * 8
    rng.shuffle(seconds)
    rng.shuffle(bands)
    for department, names in PRODUCTS.items():
        for name in names:
            _category(rng, department, name, seconds.pop(), bands.pop(), products, ins, nouns)
    return Catalog(products, ins, {}, nouns, _split(rng, ins))


def _category(rng: random.Random, department: str, name: str, second: str | None, band: int,
              products: list, ins: dict, nouns: dict) -> None:
    """Appends the products of one category."""
    pool = rng.sample(ATTRIBUTES, 5)
    colors = rng.sample(COLORS, 5)
    wishes = 2 * rng.sample(list(combinations(pool, 2)), PER_CATEGORY // 2)      # each is asked of two products
    rng.shuffle(wishes)
    prices = rng.sample(PRICES[band:band + PER_CATEGORY], PER_CATEGORY)
    for brand, price, wish in zip(rng.sample(BRANDS, PER_CATEGORY), prices, wishes):
        asin = f"S{len(products):03d}"
        attributes = rng.sample([*wish, rng.choice([word for word in pool if word not in wish])], 3)
        options = {"Color": sorted(rng.sample(colors, rng.choice([3, 3, 4])))}
        if second:
            values = OTHER_OPTIONS[second]
            options[second] = sorted(rng.sample(values, rng.choice([2, 2, 3])), key=values.index)
        title = " | ".join([f"{brand} {name}", *attributes])
        own = [value for values in options.values() for value in values]
        foreign = [value for value in colors + OTHER_OPTIONS.get(second, []) if value not in own]
        most = min(DECOYS, len(foreign))
        decoys = [" and ".join(rng.sample(foreign, rng.randint(0, most))).lower() for _ in range(2)]
        products.append({
            "asin": asin, "name": title, "category": department, "query": name.lower(),
            "product_category": f"{department.capitalize()} › {name}",
            "pricing": f"${price:.2f}",
            "full_description": f"{name} by {brand}" + (f" goes well with {decoys[0]}" if decoys[0] else ""),
            "small_description": [f"Made by {brand}" + (f" to match {decoys[1]}" if decoys[1] else "")],
            "customization_options": {option: [{"value": value} for value in values]
                                      for option, values in options.items()},
            "images": [],
        })
        asked = rng.sample(wish, 2)
        ins[asin] = {
            "attributes": [word.lower() for word in attributes],
            "instruction": f"Find me {', '.join(word.lower() for word in asked)}, {name.lower()}",
            "instruction_attributes": [word.lower() for word in asked],
        }
        nouns[title] = name.lower().split()


def _split(rng: random.Random, ins: dict[str, dict]) -> dict[str, str]:
    """One held-out validation product per category, then one or two for the test, so that every category is known.

    Of two products with the same wish at most one is held out: the searches of held-out tasks occur in training.  (A
    held-out goal that a training goal equals in options and limit too is in no split, see ``Stock.split``.)
    """
    asins = list(ins)
    split = dict.fromkeys(asins, "train")
    categories = []
    for at in range(0, len(asins), PER_CATEGORY):
        category = rng.sample(asins[at:at + PER_CATEGORY], PER_CATEGORY)
        categories.append(list({frozenset(ins[asin]["instruction_attributes"]): asin for asin in category}.values()))
    rng.shuffle(categories)
    held_out = [asin for row in zip(*categories) for asin in row]     # first one of each category, then the second ..
    for name, count in HELD_OUT.items():
        split.update(dict.fromkeys(held_out[:count], name))
        held_out = held_out[count:]
    return split


# ---------------------------------------------------------------------------------------------------- baselines
def rule_baselines(shop, split: str = "test") -> dict[str, float]:
    """Success rates over all tasks of the split of three rules that search the instruction itself:
    the first hit bought as it is, with the options that the instruction names, and the best purchase possible."""
    wins = dict.fromkeys(["first hit, no options", "first hit, named options", "best of the top 50"], 0)
    indices = shop.split(split)
    for index in indices:
        goal = shop.goal(index)
        hits = shop.index.search(goal.instruction_text.lower())
        scores = [shop.buy(row, index, named_options(shop.product(row).options, goal.instruction_text))[0]
                  for row in hits]
        wins["first hit, no options"] += shop.buy(hits[0], index, [])[0] == 1
        wins["first hit, named options"] += scores[0] == 1
        wins["best of the top 50"] += max(scores) == 1
    return {rule: count / len(indices) for rule, count in wins.items()}


def named_options(options: dict[str, list[str]], instruction: str) -> list[str]:
    """Per option name the longest value that occurs in the instruction."""
    named = ([value for value in values if value in instruction] for values in options.values())
    return [max(values, key=len) for values in named if values]


def scripted_baseline(shop, name: str, split: str, episodes: int = 1500, max_steps: int = 15) -> tuple[float, float]:
    """Success rate and mean length of a scripted policy on tasks drawn from the split."""
    from envs.webshop import WebShopEnv                    # webshop.py imports this module
    from envs.webshop_text import policy
    env, rng, act = WebShopEnv(shop, max_steps), random.Random(0), policy(name, training_grammar(shop))
    won, steps = 0.0, 0
    for task in rng.choices(env.tasks(split), k=episodes):
        state, over, history = env.reset(task), False, []
        while not over:
            history.append(act(task.text, state, history, rng))
            state, reward, terminated, truncated, _ = env.step(history[-1])
            over = terminated or truncated
        won, steps = won + reward, steps + len(history)
    return won / episodes, steps / episodes


def training_grammar(shop):
    """The grammar with the vocabulary of the training split: its tasks and the item pages of its products."""
    from envs.webshop_text import WebShopGrammar, task_text
    goals = [shop.goal(index) for index in shop.split("train")]
    rows = dict.fromkeys(shop.rows[goal.asin] for goal in goals)
    return WebShopGrammar([task_text(goal.instruction_text) for goal in goals]
                          + [shop.state("item", (row,), 0, ()) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description="What rules reach on the invented catalogue.")
    parser.add_argument("--baselines", action="store_true", required=True, help="success of rules, test split")
    parser.add_argument("--seed", type=int, default=0, help="seed of the catalogue (default: 0)")
    args = parser.parse_args()
    from envs.webshop import Shop
    from envs.webshop_text import POLICIES
    shop = Shop.invented(args.seed)
    counts = {split: len(shop.split(split)) for split in ("train", "validation", "test")}
    print(f"catalogue {args.seed}: {len(shop.asins)} products, {len(shop)} tasks ("
          + ", ".join(f"{split} {count}" for split, count in counts.items()) + ")")
    print(f"\nrules on all {counts['test']} test tasks: success")
    random_clicks, _ = scripted_baseline(shop, "random", "test")
    for rule, success in {"random clicks (1500 episodes)": random_clicks, **rule_baselines(shop)}.items():
        print(f"  {rule:30}{100 * success:6.1f} %")
    print("\nscripted policies, 1500 episodes on training tasks: success, mean steps")
    for name in POLICIES:
        success, steps = scripted_baseline(shop, name, "train")
        print(f"  {name:30}{100 * success:6.1f} %{steps:6.1f}")


if __name__ == "__main__":
    main()
