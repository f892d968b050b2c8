"""WebShop: an agent shops for a described product on a simulated web site, by text (Yao et al. 2022).

Equal to the original (princeton-nlp/WebShop, commit 64fa2a5) in goals, prices, pages, search results and rewards,
without its web server, Java and spaCy.  Three layers:

``Shop``        everything that never changes: catalogue, search index, goals.  Any number of episodes share it.
``Session``     one episode in the original's own terms: ``search[..]`` and ``click[..]``, pages as text.
``WebShopEnv``  the environment of DreamGym: abstract states, Gymnasium's step, success = a perfect purchase.

How a purchase is judged (``reward``): the share of wishes that it meets (attributes, options, price), times a factor
for being the right type of product.  Odd rules are kept and commented: published numbers contain them.

    python -m envs.webshop --bench [--data FOLDER]      steps per second, time and memory to load
    python -m envs.webshop --play  [--data FOLDER]      shop by hand
"""
from __future__ import annotations

import argparse
import json
import math
import random
import re
import resource
import sys
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
from rapidfuzz.fuzz import token_set_ratio as _ratio
from rapidfuzz.utils import default_process

from config import UserError
from envs import Task, catalog
from envs.bm25 import BM25
from envs.records import JsonFile, Records
from envs.webshop_text import Item, Option, Page, WebShopGrammar, option_text, option_word, render, task_text

NO_LIMIT = 1000000                              # an int where drawn limits are floats, as in the original
PER_PAGE = 10
SEP = " [SEP] "
SUB_PAGES = {"description": "Description", "features": "Features", "reviews": "Reviews", "attributes": "Attributes"}
PUBLISHED = {"test": (0, 500), "validation": (500, 1500), "train": (1500, None)}    # by position in the goal list
CACHED = 4096                                   # products, pages and goals kept in memory, each
# Colours in this order; the first one contained in an option value stands for the whole value.
PALETTE = ("alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel "
           "camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry "
           "cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green "
           "grey heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot "
           "midnight mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum "
           "purple rainbow red rose royal rust sand sapphire seashell silver skull slate steel stone stonewash "
           "sunflower tan taupe teal tiger turquoise violet walnut wheat white wine yellow").split()


# ------------------------------------------------------------------------------------------------ products, goals
@dataclass(frozen=True)
class Product:
    """One loaded record.  prices: one number, or the two ends of a range.  options: name -> values."""
    asin: str
    name: str
    query: str
    category: str
    product_category: str
    description: str
    bullets: list[str]
    prices: list[float]
    price_tag: str
    options: dict[str, list[str]]
    attributes: list[str] = field(default_factory=list)

    @property
    def search_text(self) -> str:
        """What the index sees: the first bullet alone, no attributes, no category."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return f"{self.name} {self.description} {(self.bullets or [''])[0]} {options}".lower()


@dataclass(frozen=True)
class Goal:
    """One task.  goal_options: {name: value} of a synthetic goal, a list of values of a human one."""
    asin: str
    category: str
    query: str
    name: str
    product_category: str
    instruction_text: str
    attributes: list[str]
    price_upper: float
    goal_options: dict[str, str] | list[str]
    weight: float


def read_product(record: dict, where: str, attributes: list[str] = ()) -> Product:
    """Check and convert a record of items_shuffle.json.  Raises UserError, beginning with ``where``."""
    def text(key: str, missing_is_empty: bool = False) -> str:
        value = record.get(key)
        if value is None and missing_is_empty:
            return ""
        if not isinstance(value, str):
            raise UserError(f"{where}: {key!r} must be a text, not {value!r:.60}")
        return value

    bullets = record.get("small_description")
    bullets = [] if bullets is None else [bullets] if isinstance(bullets, str) else bullets
    if not isinstance(bullets, list) or not all(isinstance(bullet, str) for bullet in bullets):
        raise UserError(f"{where}: 'small_description' must be a text or a list of texts, not {bullets!r:.60}")
    prices, tag = read_price(record.get("pricing"), where)
    return Product(text("asin"), text("name"), text("query").lower().strip(), text("category"), text("product_category"),
                   text("full_description", True), bullets, prices, tag,
                   read_options(record.get("customization_options"), where), list(attributes))


def read_price(pricing: str | None, where: str) -> tuple[list[float], str]:
    """``$12.50 - $18.75`` -> [12.5, 18.75], ``$12.5 to $18.75``; no price -> 100 dollars."""
    if not pricing:
        return [100.0], "$100.0"
    try:
        prices = [float(Decimal(re.sub(r"[^\d.]", "", piece))) for piece in pricing.split("$")[1:]]
        prices[0]
    except (AttributeError, InvalidOperation, IndexError):
        raise UserError(f"{where}: 'pricing' must hold amounts like $12.50, not {pricing!r:.60}") from None
    return prices[:2], f"${prices[0]}" if len(prices) == 1 else f"${prices[0]} to ${prices[1]}"


def read_options(options: dict | None, where: str) -> dict[str, list[str]]:
    """Lower-cased names and values; of two names that become equal, the later one's values count."""
    try:
        return {name.lower(): [entry["value"].strip().replace("/", " | ").lower() for entry in values]
                for name, values in (options.items() if options else ()) if values is not None}
    except (AttributeError, KeyError, TypeError):
        raise UserError(f"{where}: 'customization_options' must be {{name: [{{\"value\": text}}, ..]}}, "
                        f"not {options!r:.60}") from None


# --------------------------------------------------------------------------------------------------------- reward
_LATIN1 = dict.fromkeys(range(128, 256))        # deleted, not replaced: the original's "force ASCII"


@lru_cache(maxsize=1 << 16)
def _processed(text: str) -> str:
    return default_process(text.translate(_LATIN1))


def token_set_ratio(one: object, other: object) -> int:
    """thefuzz's likeness of two word sets, 0..100; a tuple is compared as Python prints it."""
    return round(_ratio(_processed(str(one)), _processed(str(other))))


def normalize_color(option: str | tuple[str, str]) -> str | tuple[str, str]:
    """The first palette colour inside the text, else the option itself.  In a (name, value) pair "inside" means
    equal to one of the two, which is why "rectangular" (tan) never matches itself as a synthetic option."""
    return next((color for color in PALETTE if color in option), option)


def product_type(product: Product, goal: Goal, nouns: Sequence[str], goal_nouns: Sequence[str]) -> dict:
    """How much the purchase is the wanted type of product; ``nouns``: nouns of the two product names."""
    common = len(set(nouns) & set(goal_nouns))
    title_score = common / len(goal_nouns) if goal_nouns else 0.2   # repeated goal nouns count: may stay below 1
    query_match = product.query == goal.query
    category_match = len(_categories(product.product_category) & _categories(goal.product_category)) >= 2
    r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    if title_score < 0.1:                                           # overrules a match of query or category
        r_type = 0.1 if title_score > 0 else 0.0
    return {"r_type": r_type, "query_match": query_match, "category_match": category_match, "title_score": title_score}


def _categories(path: str) -> set[str]:
    return {part.strip() for part in path.split("›")}


def _has_attribute(product: Product, wanted: str) -> bool:
    return (any(token_set_ratio(attribute, wanted) > 85 for attribute in product.attributes)
            or wanted in product.name.lower() or wanted in " ".join(product.bullets).lower()
            or wanted in product.description.lower())


def reward(product: Product, goal: Goal, price: float, chosen: Iterable[str], nouns: Sequence[str],
           goal_nouns: Sequence[str]) -> tuple[float, dict]:
    """Score of a purchase in [0, 1] and its parts.

        r = r_type * (attributes met + options met + [price <= limit]) / (attributes + options + 1)

    ``chosen``: the option values that were clicked.  An option wish is met by any of them, whatever its name, if
    the two are similar enough: "light blue" also buys "navy blue".
    """
    goal_options = list(goal.goal_options.items() if isinstance(goal.goal_options, dict) else goal.goal_options)
    wishes = len(goal.attributes) + len(goal_options) + 1
    attributes_met = sum(_has_attribute(product, wanted) for wanted in goal.attributes)
    bought = [normalize_color(value) for value in chosen]
    options_met = sum(any(token_set_ratio(value, wanted) > 85 for value in bought)
                      for wanted in map(normalize_color, goal_options))
    price_met = price <= goal.price_upper
    kind = product_type(product, goal, nouns, goal_nouns)
    info = {"r_type": kind["r_type"], "r_att": attributes_met / len(goal.attributes),
            "w_att": len(goal.attributes) / wishes, **kind}
    if goal_options:
        info |= {"r_option": options_met / len(goal_options), "w_option": len(goal_options) / wishes}
    info |= {"r_price": price_met, "w_price": 1 / wishes}
    return (attributes_met + options_met + price_met) / wishes * kind["r_type"], info


# ----------------------------------------------------------------------------------------------------------- shop
class Shop:
    """Catalogue, search index and goals; immutable, shared by all episodes of a process.

    The sources are read once, entry by entry.  In memory stay the index (6 bytes per posting), about 0.4 kB per
    product, and bounded caches; texts are read back from their file when a page shows them.

    ``seed``: of prices within a range and of price limits; the original leaves both to the caller's global random
    state, here they come from a private generator.  ``limit``: only the first so many records.  ``show_attrs``: item
    pages link to the attributes.  ``split``: {asin: split} of the goals' products; without it goals are split by
    their published positions, and ``by_product`` then removes from training every goal whose product is also a goal of
    validation or test, and from validation those of test.  Raises UserError for unusable data.
    """

    def __init__(self, products: JsonFile | Records, ins: JsonFile | Records, nouns: JsonFile | Records,
                 human: JsonFile | Records | None = None, *, seed: int = 1, limit: int | None = None,
                 show_attrs: bool = False, split: dict[str, str] | None = None, by_product: bool = False):
        self.show_attrs, self._human_goals = show_attrs, human is not None
        self._products, self._ins, self._nouns, self._human = products, ins, nouns, human
        self._split_of, self._by_product = split, by_product
        self.goal = lru_cache(maxsize=CACHED)(self._goal)
        self.product = lru_cache(maxsize=CACHED)(self._product)
        self.item_page = lru_cache(maxsize=CACHED)(self._item_page)
        self.sub_page = lru_cache(maxsize=CACHED)(self._sub_page)
        self.results_page = lru_cache(maxsize=CACHED)(self._results_page)
        self.state = lru_cache(maxsize=2 * CACHED)(self._state)
        rng = random.Random(seed)
        self._load(limit)
        self.prices = array("d", (low if math.isnan(high) else rng.uniform(low, high) for low, high in self._ranges))
        del self._ranges
        self._make_goals(rng)

    @classmethod
    def load(cls, folder: str | Path, human_goals: bool = False, nouns: str | Path | None = None, **options) -> Shop:
        """The official files in ``folder``: items_shuffle.json, items_ins_v2.json, items_human_ins.json (each also
        with the ending _1000) and nouns.json, {product name: [nouns in lower case]}."""
        folder = Path(folder).expanduser()

        def path(stem: str) -> Path:
            found = [folder / f"{stem}{ending}.json" for ending in ("", "_1000") if
                     (folder / f"{stem}{ending}.json").exists()]
            if len(found) != 1:
                raise UserError(f"{folder}: needs {stem}.json or {stem}_1000.json, "
                                + ("found both: keep one" if found else "found neither"))
            return found[0]
        human = JsonFile(path("items_human_ins"), dict) if human_goals else None
        return cls(JsonFile(path("items_shuffle"), list), JsonFile(path("items_ins_v2"), dict),
                   JsonFile(Path(nouns or folder / "nouns.json"), dict), human, **options)

    @classmethod
    def invented(cls, catalog_seed: int = 0, **options) -> Shop:
        """The catalogue that comes with the project."""
        data = catalog.build(catalog_seed)
        return cls(Records("catalogue products", data.products), Records("catalogue instructions", data.ins),
                   Records("catalogue nouns", data.nouns), split=data.split, **options)

    # ---- loading
    def _load(self, limit: int | None) -> None:
        ins = {asin: number for number, (asin, _) in enumerate(self._ins.scan())}
        human = {asin: number for number, (asin, _) in enumerate(self._human.scan())} if self._human else {}
        nouns = {name: number for number, (name, _) in enumerate(self._nouns.scan())}
        self.rows: dict[str, int] = {}          # asin -> row; all the arrays below are by row
        self.asins: list[str] = []
        self._record, self._noun = array("i"), array("i")
        self._ins_record, self._human_record = array("i"), array("i")       # -1: none
        self._combinations = array("q")
        self._ranges: list[tuple[float, float]] = []
        self._queries, self._categories = {}, {}
        self.index = BM25()
        for number, (_, record) in enumerate(self._products.scan()):
            if limit is not None and number >= limit:
                break
            asin = record.get("asin") if isinstance(record, dict) else None
            where = f"{self._products.name}: record {number} (from 0), asin {asin!r}"
            if not isinstance(asin, str) or not asin or asin != asin.upper() and asin != "nan":
                raise UserError(f"{where}: 'asin' must be a text in upper case")
            if asin == "nan" or len(asin) > 10 or asin in self.rows:
                continue
            product = read_product(record, where)
            if product.name not in nouns:
                raise UserError(f"{self._nouns.name}: no entry for {product.name!r:.80} ({asin})")
            if asin not in ins and not self._human_goals:
                raise UserError(f"{self._ins.name}: no entry for asin {asin!r}")
            row = self.rows[asin] = len(self.asins)
            self.asins.append(asin)
            self._record.append(number)
            self._noun.append(nouns[product.name])
            self._ins_record.append(ins.get(asin, -1))
            self._human_record.append(human.get(asin, -1))
            self._combinations.append(math.prod(len(values) for values in product.options.values()))
            low, *high = product.prices
            self._ranges.append((low, high[0] if high else math.nan))
            self._queries.setdefault(product.query, array("i")).append(row)
            self._categories.setdefault(product.category, array("i")).append(row)
            self.index.add(product.search_text)
        if not self.asins:
            raise UserError(f"{self._products.name}: no product in it")
        self.index.finish(self.asins)

    def _instruction(self, row: int) -> dict:
        """The entry of items_ins_v2.json, checked."""
        number = self._ins_record[row]
        entry = self._ins.get(number) if number >= 0 else {}
        where = f"{self._ins.name}: record {number} (from 0), asin {self.asins[row]!r}"
        if not isinstance(entry, dict) or not isinstance(entry.get("instruction") or "", str):
            raise UserError(f"{where}: must be an object whose 'instruction' is a text")
        _texts(entry.get("attributes", []), f"{where}: 'attributes'")
        if entry.get("instruction") is not None and not self._human_goals:
            _texts(entry.get("instruction_attributes"), f"{where}: 'instruction_attributes'", at_least=1)
        return entry

    def _human_instructions(self, row: int) -> list[tuple[int, dict]]:
        """(position, record) of the usable human instructions of a product."""
        number = self._human_record[row]
        entries = self._human.get(number) if number >= 0 else []
        where = f"{self._human.name}: record {number} (from 0), asin {self.asins[row]!r}"
        if not isinstance(entries, list) or not all(isinstance(e, dict) and isinstance(e.get("instruction"), str)
                                                    for e in entries):
            raise UserError(f"{where}: must be a list of objects, each with a text 'instruction'")
        for entry in entries:
            for key in ("instruction_attributes", "instruction_options"):
                _texts(entry.get(key), f"{where}: {key!r}")
        return [(at, entry) for at, entry in enumerate(entries) if entry["instruction_attributes"]]

    def _make_goals(self, rng: random.Random) -> None:
        """A goal is a pair: row, and number of the option combination (or of the human instruction)."""
        rows, parts, limits = array("i"), array("q"), array("d")
        self._counts: Counter[str] = Counter()                              # attribute -> goals that ask for it
        for row in range(len(self.asins)):
            if self._human_goals:
                here = []
                for part, entry in self._human_instructions(row):
                    here.append(part)
                    limits.append(self._draw_limit(rng, row))
            else:
                entry = self._instruction(row)
                if entry.get("instruction") is None:
                    continue
                here = range(self._combinations[row])
                limit = self._draw_limit(rng, row)
                limits.extend([limit] * len(here))
                for attribute in entry["instruction_attributes"]:
                    self._counts[attribute] += len(here)
            rows.extend([row] * len(here))
            parts.extend(here)
        if not rows:
            raise UserError(f"{(self._human or self._ins).name}: no instruction for any of the products")
        order = list(range(len(rows)))
        random.Random(233).shuffle(order)                                   # the original's canonical order
        self._goal_rows, self._goal_parts, self._limits = (np.array(x)[order] for x in (rows, parts, limits))

    def _draw_limit(self, rng: random.Random, row: int) -> float:
        """One of the next tens above the price; NO_LIMIT where fewer than two of them lie below 1000."""
        above = [ten for ten in (10.0 * step for step in range(1, 100)) if ten > self.prices[row]][:4]
        return max(rng.sample(above, 2)) if len(above) >= 2 else NO_LIMIT

    # ---- reading
    def _product(self, row: int) -> Product:
        return read_product(self._products.get(self._record[row]), f"{self._products.name}: asin {self.asins[row]!r}",
                            self._instruction(row).get("attributes", ["DUMMY_ATTR"]))

    def nouns(self, row: int) -> list[str]:
        return _texts(self._nouns.get(self._noun[row]), f"{self._nouns.name}: nouns of asin {self.asins[row]!r}")

    def __len__(self) -> int:
        """Number of goals."""
        return len(self._goal_rows)

    def _goal(self, index: int) -> Goal:
        row, part, limit = int(self._goal_rows[index]), int(self._goal_parts[index]), float(self._limits[index])
        limit, price_text = (NO_LIMIT, "") if limit == NO_LIMIT else (
            limit, f", and price lower than {limit:.2f} dollars")
        product = self.product(row)
        if self._human_goals:
            entry = dict(self._human_instructions(row))[part]
            text, options = entry["instruction"].strip("."), entry["instruction_options"]
        else:
            entry = self._instruction(row)
            options = {}
            for name in sorted(product.options, reverse=True):              # the last name varies fastest
                part, at = divmod(part, len(product.options[name]))
                options = {name: product.options[name][at], **options}
            wishes = ", and ".join(f"{name}: {value}" for name, value in options.items())
            text = entry["instruction"] + (f" with {wishes}" if wishes else "")
        attributes = entry["instruction_attributes"]
        weight = 1 if self._human_goals else sum(1.0 / self._counts[a] for a in attributes) / len(attributes)
        return Goal(product.asin, product.category, product.query, product.name, product.product_category,
                    text + price_text, attributes, limit, options, weight)

    @cached_property
    def _cumulative(self) -> list[float]:
        return [0.0, *accumulate(self.goal(index).weight for index in range(len(self)))]

    def draw_goal(self, rng: random.Random) -> int:
        """The original's weighted draw; off by one: goal i comes with the weight of goal i - 1, goal 0 never."""
        position = rng.uniform(0, self._cumulative[-1])
        return min(bisect_right(self._cumulative, position), len(self) - 1)

    def split(self, name: str) -> list[int]:
        """Goals of ``train``, ``validation`` or ``test``, in order."""
        if name not in PUBLISHED:
            raise ValueError(f"unknown split {name!r}; known: {', '.join(PUBLISHED)}")
        if self._split_of is not None:
            wanted = np.array([self._split_of[asin] == name for asin in self.asins])
            return np.flatnonzero(wanted[self._goal_rows]).tolist()
        first, end = PUBLISHED[name]
        indices = np.arange(len(self))[first:end]
        if self._by_product:
            taken = {"test": 0, "validation": 500, "train": 1500}[name]     # goals of the splits that come first
            indices = indices[~np.isin(self._goal_rows[indices], self._goal_rows[:taken])]
        return indices.tolist()

    def find(self, words: list[str], rng: random.Random) -> Sequence[int] | None:
        """Rows of the products that a search lists; None where the original breaks down (``<a>``, ``<c>`` alone).

        Four engine commands list products without ranking: ``<r>``, ``<c> category``, ``<q> query``, ``<a>``."""
        command, *rest = words
        if command == "<r>":
            return rng.sample(range(len(self.asins)), min(50, len(self.asins)))
        if command == "<q>":
            return self._queries.get(" ".join(rest).strip(), ())
        if command == "<c>":
            return self._categories.get(rest[0].strip(), ()) if rest else None  # later words are ignored
        return None if command == "<a>" else self.index.search(" ".join(words))

    def buy(self, row: int, goal_index: int, chosen: Iterable[str]) -> tuple[float, dict]:
        goal_row = int(self._goal_rows[goal_index])
        return reward(self.product(row), self.goal(goal_index), self.prices[row], chosen, self.nouns(row),
                      self.nouns(goal_row))

    # ---- pages without the part that belongs to the episode
    def _item_page(self, row: int) -> Body:
        product = self.product(row)
        nodes = [("button", "Back to Search"), ("button", "< Prev")]
        for name, values in product.options.items():
            nodes += [("text", name)] + [("option", value) for value in values]
        nodes += [("text", product.name), ("text", f"Price: {product.price_tag}"), ("text", "Rating: N.A.")]
        nodes += [("button", title) for title in SUB_PAGES.values() if title != "Attributes" or self.show_attrs]
        return Body(nodes + [("button", "Buy Now")], product.options)

    def lines(self, row: int, name: str) -> list[str]:
        """What a sub page shows of a product; reviews are always empty."""
        product = self.product(row)
        return {"description": [product.description], "features": product.bullets, "reviews": [],
                "attributes": [*product.attributes, product.category, product.query, product.product_category]}[name]

    def _sub_page(self, row: int, name: str) -> Body:
        indented = {"features": len(self.product(row).bullets), "attributes": len(self.product(row).attributes)}
        lines = [(" " if at < indented.get(name, 0) else "") + line for at, line in enumerate(self.lines(row, name))]
        return Body([("button", "Back to Search"), ("button", "< Prev")] + [("text", line) for line in lines])

    def _results_page(self, rows: tuple[int, ...], page: int, total: int) -> Body:
        nodes = [("button", "Back to Search"), ("text", f"Page {page} (Total results: {total})")]
        nodes += ([("button", "< Prev")] if page > 1 else []) + [("button", "Next >")]
        for product in map(self.product, rows):
            nodes += [("link", product.asin), ("text", product.name), ("text", product.price_tag)]
        return Body(nodes)

    def _state(self, kind: str, rows: tuple[int, ...], number: int, chosen: tuple[tuple[str, str], ...]) -> str:
        """A page as abstract state (``envs.webshop_text``)."""
        if kind == "results":
            products = map(self.product, rows)
            return render(Page(kind, number=number, items=tuple(Item(p.asin, p.name, p.price_tag) for p in products)))
        if kind == "item":
            product, chosen = self.product(rows[0]), dict(chosen)
            return render(Page(kind, title=product.name, price=product.price_tag, options=tuple(
                Option(name, tuple(values), chosen.get(name)) for name, values in product.options.items())))
        return render(Page(kind, lines=tuple(self.lines(rows[0], kind)) if kind in SUB_PAGES else ()))


def _texts(value: object, where: str, at_least: int = 0) -> list[str]:
    if not isinstance(value, list) or len(value) < at_least or not all(isinstance(text, str) for text in value):
        raise UserError(f"{where}: must be a list of texts{', not empty' if at_least else ''}, not {value!r:.60}")
    return value


# -------------------------------------------------------------------------------------------------------- session
class Body:
    """A page's nodes [(kind, text)], as the original's HTML parser gives them, and what can be clicked on it.

    kind: text, button, link (to a product) or option.  ``clickables``: {text in lower case: (kind, option name)}; of
    equal texts the first one gives the position and the last one the meaning.
    """

    def __init__(self, nodes: list[tuple[str, str]], options: dict[str, list[str]] | None = None):
        self.nodes = [(kind, seen) for kind, text in nodes if (seen := _visible(text))]
        self.clickables = {text.lower(): (kind, "") for kind, text in nodes if kind in ("button", "link")}
        for name, values in (options or {}).items():
            self.clickables |= {value: ("option", name) for value in values}
        self.text = _plain(self.nodes)


def _plain(nodes: Iterable[tuple[str, str]]) -> str:
    return SEP.join(text.strip() for _, text in nodes)


def _visible(text: str) -> str:
    """What is left of a text node: white space alone vanishes with a line break in it, else it becomes one space."""
    return text if text.strip(" \n\t\f\r") else "" if "\n" in text else text and " "


_ACTION = re.compile(r"(.+)\[(.+)\]")            # greedy, and what follows the last bracket is ignored
_PAGE_NAMES = ("search_results", "item_page", "item_sub_page", "done")
_SEARCH_PAGE = Body([("button", "Search")])
_DONE_PAGE = Body([])


class Session:
    """One episode in the original's terms, quirks included; it goes on after a purchase, as the original does.

    ``goal`` is the index of a goal of the shop, ``id`` the name in the URLs.  After each step ``observation`` (text
    mode), ``rich`` (text_rich mode), ``url``, ``clickables`` and ``has_search_bar`` describe the page; ``reward``,
    ``info`` and ``done`` the last purchase.  For structured access: ``kind`` (home, results, item, a sub page's name, or
    done), ``row`` of the product, ``rows`` found, ``number`` of the results page, ``options`` chosen.
    """

    def __init__(self, shop: Shop, goal: int, id: str | None = None, rng: random.Random | None = None):
        self.shop, self.goal, self.id = shop, goal, str(goal) if id is None else id
        self._rng = rng or random.Random(goal)          # for the engine command <r> alone
        self.instruction = shop.goal(goal).instruction_text
        self.reward: float | None = None
        self.info: dict | None = None
        self.done = False
        self.reset()

    def reset(self) -> None:
        """Back to the search page; goal, reward and done stay as they are."""
        self.kind, self._body = "home", _SEARCH_PAGE
        self.words: list[str] = []
        self.rows: Sequence[int] = ()
        self.number = 0
        self.row: int | None = None
        self.visited: set[int] = set()
        self.options: dict[str, str] = {}

    # ---- actions
    def step(self, action: str) -> tuple[float, bool, bool]:
        """(reward, done, valid) of ``search[words]`` or ``click[text]``; what is not valid changes nothing.
        ``done`` is True in the buying step alone."""
        match = _ACTION.match(action)
        name, argument = match.groups() if match else (action, "")
        if name == "search" and argument:
            return 0.0, False, self.search(argument.lower())
        if name == "click" and argument and argument.lower() != "search":
            return self.click(argument.lower())
        return 0.0, False, False

    def search(self, query: str) -> bool:
        """Works on every page."""
        return self._results(query.split(" "), 1)

    def click(self, text: str) -> tuple[float, bool, bool]:
        """Click what reads ``text`` (lower case).  The text alone decides, not what it was meant to be: an option
        named like a button does what the button does."""
        if text not in self._body.clickables:
            return 0.0, False, False
        turns = text in ("next >", "< prev")
        page = next((name for name in _PAGE_NAMES if name in self.url), "") if turns else ""    # fooled by some queries
        if text == "buy now":
            self.reward, self.info = self.shop.buy(self.row, self.goal, self.options.values())
            self.kind, self._body, self.done = "done", _DONE_PAGE, True
            return self.reward, True, True
        if text == "back to search":
            self.reset()
        elif turns and page == "search_results":
            self._results(self.words, self.number + (1 if text == "next >" else -1))
        elif text == "< prev" and page == "item_page":
            self._results(self.words, self.number)
        elif text in SUB_PAGES:
            self.kind, self._body = text, self.shop.sub_page(self.row, text)
        else:
            kind, name = self._body.clickables[text]
            if kind == "link":
                self.row = self.shop.rows[text.upper()]
                self.visited.add(self.row)
            elif kind == "option":
                self.options = {**self.options, name: text}
            self.kind, self._body = "item", self.shop.item_page(self.row)
        return 0.0, False, True

    def _results(self, words: list[str], number: int) -> bool:
        rows = self.shop.find(words, self._rng)
        if rows is None:
            return False
        self.words, self.rows, self.number = words, rows, number
        self.kind, self.row, self.options = "results", None, {}
        self._body = self.shop.results_page(self.shown, number, len(rows))
        return True

    # ---- what the page shows
    @property
    def shown(self) -> tuple[int, ...]:
        """Rows of the products on this results page."""
        return tuple(self.rows[(self.number - 1) * PER_PAGE:self.number * PER_PAGE])

    @property
    def has_search_bar(self) -> bool:
        return self.kind == "home"

    @property
    def clickables(self) -> list[str]:
        return list(self._body.clickables)

    @property
    def url(self) -> str:
        words, asin = "+".join(self.words), self.shop.asins[self.row] if self.row is not None else None
        path = {"home": f"{self.id}", "results": f"search_results/{self.id}/{words}/{self.number}",
                "item": f"item_page/{self.id}/{asin}/{words}/{self.number}/{json.dumps(self.options)}",
                "done": f"done/{self.id}/{asin}/{self.options}"}.get(self.kind)
        if path is None:
            path = f"item_sub_page/{self.id}/{asin}/{words}/{self.number}/{SUB_PAGES[self.kind]}/{self.options}"
        return f"http://127.0.0.1:3000/{path}"

    def _head(self) -> list[tuple[str, str]]:
        """The nodes before the page's body; the whole page at the end of an episode."""
        if self.kind == "done":
            options = json.dumps(self.options, sort_keys=True)
            for char in "<>&'":
                options = options.replace(char, f"\\u{ord(char):04x}")
            texts = ["Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)",
                     "Purchased", "asin", self.shop.asins[self.row], "options", options, "attrs", "None", "category",
                     "None", "query", "None", "product category", "None", "Target", "asin", "options", "attrs",
                     "price upper", "instuction text", "category", "product category", "query", "Goal ", "None", "Reward",
                     "Your score (min 0.0, max 1.0)", str(self.reward), "Reward Details ", "None"]
        else:
            texts = ["WebShop", "Instruction: "] if self.kind == "home" else ["Instruction:"]
            texts.append(self.instruction)
        return [("text", seen) for text in texts if (seen := _visible(text))]

    @property
    def observation(self) -> str:
        head = _plain(self._head())
        return head + SEP + self._body.text if self._body.nodes else head

    @property
    def rich(self) -> str:
        url, page = self.url, ""
        for kind, text in chain(self._head(), self._body.nodes):
            clicked = ((kind == "option" and f'"{text}"' in url)
                       or (kind == "link" and self.shop.rows[text] in self.visited))
            if clicked and kind == "option":
                page = f"You have clicked {text}.\n{page}"
            mark = "clicked button" if clicked else "button"
            before = {"option": "  ", "link": "\n"}.get(kind, "")
            page += (text if kind == "text" else f"{before}[{mark}] {text} [{mark}_]") + "\n"
        return page

    def state(self) -> str:
        """The abstract state of ``envs.webshop_text``."""
        rows = self.shown if self.kind == "results" else () if self.row is None else (self.row,)
        return self.shop.state(self.kind, rows, self.number, tuple(self.options.items()))


# ---------------------------------------------------------------------------------------------------- environment
_BUTTONS = {"buy": "buy now", "back": "back to search", "prev": "< prev", "next": "next >"} | {s: s for s in SUB_PAGES}
_ENGINE_COMMANDS = ("<r>", "<c>", "<q>", "<a>")


class WebShopEnv:
    """WebShop for agents (protocol ``envs.Env``).

    Actions: those of ``envs.webshop_text`` (``search red shoes``, ``click 3``, ``click light_blue``, ``click buy``) or
    the original's (``search[red shoes]``, ``click[buy now]``).  The reward is 1.0 for a purchase that scores exactly 1,
    else 0; ``info["score"]`` is the graded score.  An episode ends at its purchase, or is truncated after
    ``max_steps`` actions.  An action that the page does not offer, or one of the search engine's own commands, costs a step
    and changes nothing: the same state comes back, with ``info["invalid"]``.
    """

    def __init__(self, shop: Shop, max_steps: int = 15):
        self.shop, self.max_steps = shop, max_steps
        self._grammar = WebShopGrammar()
        self.session: Session | None = None

    def tasks(self, split: str) -> list[Task]:
        return [self.task(index, split) for index in self.shop.split(split)]

    def task(self, index: int, split: str) -> Task:
        return Task(f"webshop-{index}", task_text(self.shop.goal(index).instruction_text), split, goal=index)

    def reset(self, task: Task) -> str:
        """Raises ValueError for a task that is not the environment's own: an invented task has no goal to judge by."""
        if task.goal is None:
            raise ValueError(f"task {task.id!r} has no goal in this shop")
        self.session, self.steps, self.over = Session(self.shop, task.goal), 0, False
        return self.session.state()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        session = self.session
        score, bought, valid = (0.0, False, False) if self.over else self._act(action)
        self.steps += 1
        terminated = bought or session.done
        truncated = not terminated and self.steps >= self.max_steps
        self.over = terminated or truncated
        info = {"success": score == 1.0, "score": score, "invalid": not valid}
        if bought:
            info["parts"] = session.info
        return session.state(), float(info["success"]), terminated, truncated, info

    def _act(self, action: str) -> tuple[float, bool, bool]:
        session, nothing = self.session, (0.0, False, False)
        match = _ACTION.match(action)
        if match and match[1] in ("search", "click"):
            banned = match[1] == "search" and match[2].lower().split(" ")[0] in _ENGINE_COMMANDS
            return nothing if banned else session.step(action)
        name, _, words = action.partition(" ")
        if name == "search" and words.strip():
            query = " ".join(map(option_text, words.split()))
            return nothing if query.split(" ")[0] in _ENGINE_COMMANDS else (0.0, False, session.search(query))
        return session.click(self._link(words)) if name == "click" and words else nothing

    def _link(self, word: str) -> str | None:
        """What to click in the shop for a word of the abstract state."""
        session = self.session
        if session.kind == "results":
            asins = [session.shop.asins[row].lower() for row in session.shown]
            if word.isdecimal() and 0 < int(word) <= len(asins):
                return asins[int(word) - 1]
            return next((asin for asin in asins if option_word(asin) == word), _BUTTONS.get(word))
        if session.kind == "item":
            values = session.shop.product(session.row).options.values()
            return next((value for value in chain(*values) if option_word(value) == word), _BUTTONS.get(word))
        return _BUTTONS.get(word)

    def admissible(self) -> list[str]:
        return [] if self.over else self._grammar.admissible(self.session.state())


# ---------------------------------------------------------------------------------------------------- command line
def bench(make_shop, seconds: float = 3.0) -> None:
    """Prints load time and memory, then steps per second of processor time of random shoppers.

    A shopper searches a goal's instruction (no search is repeated before every goal had its turn), then clicks at
    random until it buys or has made 15 steps; the page of every step is read.
    """
    clock = time.process_time                   # the time of one core, whatever else the machine does
    start = clock()
    shop = make_shop()
    print(f"load and index: {len(shop.asins)} products, {len(shop)} goals in {clock() - start:.2f} s")
    for name in ("Session", "WebShopEnv"):
        rng, env, steps, searches, goal, start = random.Random(0), WebShopEnv(shop), 0, 0, 0, clock()
        while clock() - start < seconds:
            env.reset(Task(str(goal), "", "train", goal=goal % len(shop)))
            session, goal, over = env.session, goal + 1, False
            for _ in range(15):
                links = session.clickables
                action = f"search[{session.instruction}]" if links == ["search"] else f"click[{rng.choice(links)}]"
                if name == "Session":
                    over = session.step(action)[1]
                    session.observation         # built on demand
                else:
                    over = env.step(action)[2]
                steps, searches = steps + 1, searches + (links == ["search"])
                if over:
                    break
        print(f"{name}: {steps / (clock() - start):.0f} steps/s, {searches / steps:.0%} of them searches")
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


def play(shop: Shop, goal: int) -> None:
    """Shop by hand: abstract or original actions, an empty line ends."""
    env = WebShopEnv(shop, max_steps=100)
    task = env.task(goal, "train")
    print(f"{shop.goal(goal).instruction_text}\n\n{task.text}\n\n{env.reset(task)}")
    while not env.over and (action := input("\n> ").strip()):
        state, _, _, _, info = env.step(action)
        print("nothing happens; possible: " + ", ".join(env.admissible()) if info["invalid"] else state)
    if env.session.info:
        print(f"score {env.session.reward:.3f}: {json.dumps(env.session.info)}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m envs.webshop", description="WebShop at the command line.")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--bench", action="store_true", help="measure steps per second")
    mode.add_argument("--play", action="store_true", help="shop by hand")
    parser.add_argument("--data", metavar="FOLDER", help="official files (default: the invented catalogue)")
    parser.add_argument("--human", action="store_true", help="goals written by people (needs --data)")
    parser.add_argument("--goal", type=int, default=0, help="goal to play")
    options = parser.parse_args(arguments)

    def make_shop() -> Shop:
        return Shop.load(options.data, options.human) if options.data else Shop.invented()
    try:
        if options.bench:
            bench(make_shop)
        else:
            play(make_shop(), options.goal)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
