"""WebShop's stock: the official files read, checked and kept small; the goals, their price limits and their splits.

Equal to the original (princeton-nlp/WebShop, commit 64fa2a5) record by record and draw by draw, but the draws come from
a private generator.  Formats: items_shuffle.json is a list of products; items_ins_v2.json maps an asin (a product's id)
to its attributes and, for some, an instruction; items_human_ins.json maps an asin to instructions by people.
"""
from __future__ import annotations

import json
import math
import random
import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from config import UserError
from envs import catalog
from envs.bm25 import BM25
from envs.records import JsonFile, Records

NO_LIMIT = 1000000                              # an int where drawn limits are floats, as in the original
MOST_COMBINATIONS = 10**6       # of the option values of one product, each a goal
PUBLISHED = {"test": (0, 500), "validation": (500, 1500), "train": (1500, None)}    # by position in the goal list
RESERVED = {"search", "buy now", "back to search", "< prev", "next >", "description", "features", "reviews",
            "attributes"}                       # texts of buttons
CACHED = 4096                                   # products and goals kept in memory, each


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
    options = read_options(record.get("customization_options"), where)
    return Product(text("asin"), text("name"), text("query").lower().strip(), text("category"),
                   text("product_category"), text("full_description", True), bullets, prices, tag, options,
                   list(attributes))


def read_price(pricing: str | None, where: str) -> tuple[list[float], str]:
    """``$12.50 - $18.75`` -> [12.5, 18.75], ``$12.5 to $18.75``; no price -> 100 dollars."""
    if not pricing:
        return [100.0], "$100.0"
    try:
        prices = [float(Decimal(re.sub(r"[^\d.]", "", piece))) for piece in pricing.split("$")[1:]]
        prices[0]
        if not all(0.001 <= price < 1e9 for price in prices[:2]):
            raise InvalidOperation
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


# ---------------------------------------------------------------------------------------------------------- stock
class Stock:
    """Catalogue, search index and goals; immutable, shared by all episodes of a process.

    The sources are read once, entry by entry.  In memory stay the index, the ids, a few numbers per product and goal,
    and bounded caches; texts are read back from their file when a page shows them.  Measured on the official small set
    multiplied to 50,000 and 150,000 products: 1.7 kB per product at the peak of loading, then 1.0 kB with human goals
    and 1.6 kB with all synthetic ones, 0.33 ms per product; hence about 2.2 GB at the peak, 1.3 or 2.0 GB afterwards
    and 7 minutes for the full set of 1.18 million products (10 to 20 ms for a search).

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
        rng = random.Random(seed)
        lows, highs = self._load(limit)
        self.prices = array("d", (low if math.isnan(high) else rng.uniform(low, high)
                                  for low, high in zip(lows, highs)))
        self._make_goals(rng)

    @classmethod
    def load(cls, folder: str | Path, human_goals: bool = False, nouns: str | Path | None = None, **options) -> Stock:
        """The official files in ``folder``: items_shuffle.json, items_ins_v2.json, items_human_ins.json (each also
        with the ending _1000) and nouns.json, {product name: [nouns in lower case]}."""
        folder = Path(folder).expanduser()
        products = JsonFile(_official(folder, "items_shuffle"), list)
        ins = JsonFile(_official(folder, "items_ins_v2"), dict)
        human = JsonFile(_official(folder, "items_human_ins"), dict) if human_goals else None
        return cls(products, ins, JsonFile(Path(nouns or folder / "nouns.json"), dict), human, **options)

    @classmethod
    def invented(cls, catalog_seed: int = 0, **options) -> Stock:
        """The catalogue that comes with the project."""
        data = catalog.build(catalog_seed)
        return cls(Records("catalogue products", data.products), Records("catalogue instructions", data.ins),
                   Records("catalogue nouns", data.nouns), split=data.split, **options)

    # ---- loading
    def _load(self, limit: int | None) -> tuple[array, array]:
        """Read everything once; returns both ends of the products' prices, the upper one NaN for a single price."""
        ins = _numbered(self._ins, self._check_instruction)
        human = _numbered(self._human, self._check_human) if self._human else {}
        nouns = _numbered(self._nouns, _check_texts)
        self.rows: dict[str, int] = {}          # asin -> row; all the arrays below are by row
        self.asins: list[str] = []
        self._record, self._noun = array("i"), array("i")
        self._ins_record, self._human_record = array("i"), array("i")       # -1: none
        self._combinations = array("q")
        lows, highs = array("d"), array("d")
        self._queries, self._categories = {}, {}
        self.index = BM25()
        for number, (_, record) in enumerate(self._products.scan()):
            if limit is not None and number >= limit:
                break
            asin = record.get("asin") if isinstance(record, dict) else None
            where = f"{self._products.name}: record {number} (from 0), asin {asin!r}"
            if not isinstance(asin, str) or not asin.strip():
                raise UserError(f"{where}: 'asin' must be a text")
            if asin == "nan" or len(asin) > 10 or asin in self.rows:
                continue
            if asin != asin.upper() or asin.lower() in RESERVED:        # a click on it could not lead to the product
                raise UserError(f"{where}: 'asin' must be in upper case and no button's text")
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
            combinations = math.prod(len(values) for values in product.options.values())
            if combinations > MOST_COMBINATIONS:
                raise UserError(f"{where}: 'customization_options' give {combinations:.1e} combinations, more than "
                                f"{MOST_COMBINATIONS:,}")
            self._combinations.append(combinations)
            lows.append(product.prices[0])
            highs.append(product.prices[1] if len(product.prices) > 1 else math.nan)
            self._queries.setdefault(product.query, array("i")).append(row)
            self._categories.setdefault(product.category, array("i")).append(row)
            self.index.add(product.search_text)
        if not self.asins:
            raise UserError(f"{self._products.name}: no product in it")
        self.index.finish(self.asins)
        return lows, highs

    def _check_instruction(self, entry: object, where: str) -> None:
        if not isinstance(entry, dict) or not isinstance(entry.get("instruction"), str | None):
            raise UserError(f"{where}: must be an object whose 'instruction' is a text")
        _check_texts(entry.get("attributes", []), f"{where}: 'attributes'")
        if not self._human_goals and entry.get("instruction") is not None:
            _check_texts(entry.get("instruction_attributes"), f"{where}: 'instruction_attributes'", at_least=1)

    def _check_human(self, entries: object, where: str) -> None:
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise UserError(f"{where}: must be a list of objects")
        for entry in entries:
            _check_texts(entry.get("instruction_attributes"), f"{where}: 'instruction_attributes'")
            if entry["instruction_attributes"]:
                _check_texts([entry.get("instruction")], f"{where}: 'instruction'")
                _check_texts(entry.get("instruction_options"), f"{where}: 'instruction_options'")

    def _make_goals(self, rng: random.Random) -> None:
        """A goal is a pair: row, and number of the option combination (or of the human instruction)."""
        rows, parts, limits = array("i"), array("q"), array("d")
        self._counts: Counter[str] = Counter()                              # attribute -> goals that ask for it
        for row in range(len(self.asins)):
            if self._human_goals:
                here = []
                for part, entry in enumerate(self._human_entries(row)):
                    if entry["instruction_attributes"]:                     # the others are skipped before drawing
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
        """Nouns of the product's name, by part-of-speech tagging, as the noun table has them."""
        return self._nouns.get(self._noun[row])

    def _instruction(self, row: int) -> dict:
        number = self._ins_record[row]
        return self._ins.get(number) if number >= 0 else {}

    def _human_entries(self, row: int) -> list[dict]:
        number = self._human_record[row]
        return self._human.get(number) if number >= 0 else []

    def __len__(self) -> int:
        """Number of goals."""
        return len(self._goal_rows)

    def _goal(self, index: int) -> Goal:
        row, part, limit = int(self._goal_rows[index]), int(self._goal_parts[index]), float(self._limits[index])
        limit, price_text = (NO_LIMIT, "") if limit == NO_LIMIT else (
            limit, f", and price lower than {limit:.2f} dollars")
        product = self.product(row)
        if self._human_goals:
            entry = self._human_entries(row)[part]
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
            goals = np.flatnonzero(wanted[self._goal_rows]).tolist()
            # What another split asks for in all parts is no held-out task, whichever product it is about.
            before = {"train": (), "validation": ("train",), "test": ("train", "validation")}[name]
            seen = {self._wish(index) for split in before for index in self.split(split)}
            return [index for index in goals if self._wish(index) not in seen] if seen else goals
        first, end = PUBLISHED[name]
        indices = np.arange(len(self))[first:end]
        if self._by_product:
            taken = {"test": 0, "validation": 500, "train": 1500}[name]     # goals of the splits that come first
            indices = indices[~np.isin(self._goal_rows[indices], self._goal_rows[:taken])]
        return indices.tolist()

    def _wish(self, index: int) -> tuple:
        """What a goal asks for, whatever its product: query, attributes, options, limit."""
        goal = self.goal(index)
        options = goal.goal_options.items() if isinstance(goal.goal_options, dict) else goal.goal_options
        return goal.query, frozenset(goal.attributes), frozenset(options), goal.price_upper

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


def _official(folder: Path, stem: str) -> Path:
    """The file of this kind in the folder, of the full set or of the set of 1,000 products."""
    found = [path for path in (folder / f"{stem}.json", folder / f"{stem}_1000.json") if path.exists()]
    if len(found) != 1:
        raise UserError(f"{folder}: needs {stem}.json or {stem}_1000.json, "
                        + ("found both: keep one" if found else "found neither"))
    return found[0]


def _check_texts(value: object, where: str, at_least: int = 0) -> None:
    if not isinstance(value, list) or len(value) < at_least or not all(isinstance(text, str) for text in value):
        raise UserError(f"{where}: must be a list of texts{', not empty' if at_least else ''}, not {value!r:.60}")


def _numbered(source: JsonFile | Records, check: Callable[[object, str], None]) -> dict[str, int]:
    """{key: number of the entry}, each entry checked.  Raises UserError for a key that occurs twice."""
    numbers: dict[str, int] = {}
    for number, (key, entry) in enumerate(source.scan()):
        where = f"{source.name}: record {number} (from 0), {key!r:.80}"
        if key in numbers:
            raise UserError(f"{where}: occurs twice")
        check(entry, where)
        numbers[key] = number
    return numbers


def write_nouns(folder: str | Path) -> Path:
    """Tag the product names of an official folder and write its nouns.json; needs spaCy 3.8 and its en_core_web_sm.

    The tagger decides the rewards' product types: another model or version changes about 1.5 % of random purchases.
    Raises UserError where they are not installed.
    """
    try:
        import spacy                                            # optional: nothing else in the project needs it
        tagger = spacy.load("en_core_web_sm", disable=["parser", "ner", "lemmatizer"])
    except (ImportError, OSError) as error:
        raise UserError(f"the noun table needs spaCy and its model: pip install 'spacy>=3.8,<3.9' && "
                        f"python -m spacy download en_core_web_sm ({error})") from None
    source = JsonFile(_official(Path(folder).expanduser(), "items_shuffle"), list)
    names = dict.fromkeys(str(record.get("name")) for _, record in source.scan() if isinstance(record, dict))
    path = Path(folder).expanduser() / "nouns.json"
    partial = path.with_suffix(".partial")
    with open(partial, "w", encoding="utf-8") as file:          # one entry a line; renamed only when complete
        for number, (name, doc) in enumerate(zip(names, tagger.pipe(names, batch_size=256))):
            nouns = [token.text.lower() for token in doc if token.pos_ in ("NOUN", "PROPN")]
            file.write(f"{',' if number else '{'}\n{json.dumps(name)}: {json.dumps(nouns)}")
        file.write("\n}\n" if names else "{}\n")
    partial.rename(path)
    return path
