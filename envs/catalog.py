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

BRANDS = ("Aldmoor Brensa Calverto Corvane Dunleith Elvaro Fenwilde Gransby Halvorn Jorvale Keldon Lunaro Maristo "
          "Norwick Oakriff Pelwyn Quillon Rosedale Selvik Varnholt Wexley Zelmont").split()
# department (one of the five of WebShop): products.  No two products share a word.
PRODUCTS = {
    "fashion": ["Wool Sweater", "Winter Jacket", "Running Shoes", "Leather Wallet", "Canvas Backpack", "Silk Scarf"],
    "electronics": ["Travel Headphones", "Bluetooth Speaker", "Phone Case", "Gaming Keyboard", "Tablet Stand",
                    "Video Projector"],
    "garden": ["Floor Lamp", "Desk Chair", "Wall Clock", "Bath Towel", "Shower Curtain", "Throw Blanket"],
    "beauty": ["Makeup Mirror", "Hair Dryer", "Soap Dispenser", "Nail Kit", "Face Brush", "Perfume Bottle"],
    "grocery": ["Tea Infuser", "Spice Rack", "Lunch Box", "Picnic Basket", "Pasta Maker", "Kitchen Knife"],
}
ATTRIBUTES = ("Wireless Padded Foldable Waterproof Stretchy Reversible Adjustable Lightweight Washable Durable "
              "Insulated Handmade Compact Rechargeable Vegan Cushioned").split()
COLORS = "Black Blue Green Red White Gray Brown Pink Purple Yellow".split()
OTHER_OPTIONS = {"Size": "Small Medium Large Mini Jumbo".split(),
                 "Pattern": "Plain Striped Dotted Floral Checked".split()}
PRICES = [5.0 * step + 9.5 for step in range(1, 20)]        # $14.5 .. $104.5: 19 tags, none on a multiple of 10

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
    seconds = [*OTHER_OPTIONS, None] * 10
    rng.shuffle(seconds)
    for department, names in PRODUCTS.items():
        for name in names:
            _category(rng, department, name, seconds.pop(), products, ins, nouns)
    return Catalog(products, ins, {}, nouns, _split(rng, [product["asin"] for product in products]))


def _category(rng: random.Random, department: str, name: str, second: str | None,
              products: list, ins: dict, nouns: dict) -> None:
    """Appends the products of one category."""
    pool = rng.sample(ATTRIBUTES, 5)
    colors = rng.sample(COLORS, 6)
    cheapest = rng.randrange(len(PRICES) - 9)
    for brand in rng.sample(BRANDS, PER_CATEGORY):
        asin = f"S{len(products):03d}"
        attributes = rng.sample(pool, 3)
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
            "pricing": f"${PRICES[cheapest + rng.randrange(10)]:.2f}",
            "full_description": f"{name} by {brand}" + (f" goes well with {decoys[0]}" if decoys[0] else ""),
            "small_description": [f"Made by {brand}" + (f" to match {decoys[1]}" if decoys[1] else "")],
            "customization_options": {option: [{"value": value} for value in values]
                                      for option, values in options.items()},
            "images": [],
        })
        asked = rng.sample(attributes, 2)
        ins[asin] = {
            "attributes": [word.lower() for word in attributes],
            "instruction": f"Find me {', '.join(word.lower() for word in asked)}, {name.lower()}",
            "instruction_attributes": [word.lower() for word in asked],
        }
        nouns[title] = name.lower().split()


def _split(rng: random.Random, asins: list[str]) -> dict[str, str]:
    """One held-out validation product per category, then one or two for the test, so that every category is known."""
    split = dict.fromkeys(asins, "train")
    categories = [rng.sample(asins[at:at + PER_CATEGORY], PER_CATEGORY) for at in range(0, len(asins), PER_CATEGORY)]
    rng.shuffle(categories)
    held_out = [asin for row in zip(*categories) for asin in row]     # first one of each category, then the second ..
    for name, count in HELD_OUT.items():
        split.update(dict.fromkeys(held_out[:count], name))
        held_out = held_out[count:]
    return split
