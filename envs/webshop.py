"""WebShop: an agent shops for a described product on a simulated web site, by text (Yao et al. 2022).

Equal to the original (princeton-nlp/WebShop, commit 64fa2a5) in goals, prices, pages, search results and rewards,
without its web server, Java and spaCy.  Three layers:

``Shop``        all that never changes: catalogue, search index, goals (``envs/webshop_data.py``), and how pages look.
                Any number of episodes share it.
``Session``     one episode in the original's own terms: ``search[..]`` and ``click[..]``, pages as text.
``WebShopEnv``  the environment of DreamGym: abstract states, Gymnasium's step, success = a perfect purchase.

How a purchase is judged (``reward``): the share of wishes that it meets (attributes, options, price), times a factor
for being the right type of product.  Odd rules are kept and commented: published numbers contain them.

    python -m envs.webshop --bench [--data FOLDER]      steps per second, time and memory to load
    python -m envs.webshop --play  [--data FOLDER]      shop by hand
    python -m envs.webshop --nouns --data FOLDER        write the noun table that official files need
"""
from __future__ import annotations

import argparse
import json
import random
import re
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain

from rapidfuzz.fuzz import token_set_ratio as rapidfuzz_ratio
from rapidfuzz.utils import default_process

from config import UserError
from envs import Task, World, catalog
from envs.webshop_data import CACHED, Goal, Product, Stock, write_nouns
from envs.webshop_text import Item, Option, Page, WebShopGrammar, option_text, option_word, policy, render, task_text

PER_PAGE = 10
SEP = " [SEP] "
SUB_PAGES = {"description": "Description", "features": "Features", "reviews": "Reviews", "attributes": "Attributes"}
# Colours in this order; the first one contained in an option value stands for the whole value.
PALETTE = ("alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy "
           "camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral "
           "cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass "
           "gray green grey heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon "
           "mauve merlot midnight mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter "
           "pink plum purple rainbow red rose royal rust sand sapphire seashell silver skull slate steel stone "
           "stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white wine yellow").split()


# --------------------------------------------------------------------------------------------------------- reward
_LATIN1 = dict.fromkeys(range(128, 256))        # deleted, not replaced: the original's "force ASCII"


@lru_cache(maxsize=1 << 16)
def _processed(text: str) -> str:
    return default_process(text.translate(_LATIN1))


def token_set_ratio(one: object, other: object) -> int:
    """thefuzz's likeness of two word sets, 0..100; a tuple is compared as Python prints it."""
    return round(rapidfuzz_ratio(_processed(str(one)), _processed(str(other))))


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


# ---------------------------------------------------------------------------------------------------------- pages
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


class Shop(Stock):
    """The stock, what buying from it scores, and its pages; the part of a page that belongs to an episode (instruction,
    clicked marks) is added by the session.  For parameters and sources see ``Stock``.
    """

    def __init__(self, *sources, **options):
        super().__init__(*sources, **options)
        self.item_page = lru_cache(maxsize=CACHED)(self._item_page)
        self.sub_page = lru_cache(maxsize=CACHED)(self._sub_page)
        self.results_page = lru_cache(maxsize=CACHED)(self._results_page)
        self.state = lru_cache(maxsize=2 * CACHED)(self._state)

    def buy(self, row: int, goal_index: int, chosen: Iterable[str]) -> tuple[float, dict]:
        """Reward and info (see ``reward``) of buying the product for the goal, with the chosen option values."""
        goal = self.goal(goal_index)
        return reward(self.product(row), goal, self.prices[row], chosen, self.nouns(row),
                      self.nouns(self.rows[goal.asin]))

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


# -------------------------------------------------------------------------------------------------------- session
_ACTION = re.compile(r"(.+)\[(.+)\]")            # greedy, and what follows the last bracket is ignored
_PAGE_NAMES = ("search_results", "item_page", "item_sub_page", "done")
_SEARCH_PAGE = Body([("button", "Search")])
_DONE_PAGE = Body([])


class Session:
    """One episode in the original's terms, quirks included; it goes on after a purchase, as the original does.

    ``goal`` is the index of a goal of the shop, ``id`` the name in the URLs.  After each step ``observation`` (text
    mode), ``rich`` (text_rich mode), ``url``, ``clickables`` and ``has_search_bar`` describe the page; ``reward``,
    ``info`` and ``done`` the last purchase.  For structured access: ``kind`` (home, results, item, done, or the name of
    a sub page), ``row`` of the product, ``rows`` found, ``number`` of the results page, ``options`` chosen.
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
        if text not in self._body.clickables or self.kind == "home":    # there, "search" is a button for show
            return 0.0, False, False
        turns = text in ("next >", "< prev")
        url = self.url if turns else ""
        page = next((name for name in _PAGE_NAMES if name in url), "")      # fooled by a query that names a page
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
                     "price upper", "instuction text", "category", "product category", "query", "Goal ", "None",
                     "Reward", "Your score (min 0.0, max 1.0)", str(self.reward), "Reward Details ", "None"]
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
        if self.kind in ("home", "done"):
            return self.shop.state(self.kind, (), 0, ())
        if self.kind == "results":
            return self.shop.state(self.kind, self.shown, self.number, ())
        return self.shop.state(self.kind, (self.row,), 0, tuple(self.options.items()) if self.kind == "item" else ())


# ---------------------------------------------------------------------------------------------------- environment
# word of the abstract state: text of the button
BUTTONS = {"buy": "buy now", "back": "back to search", "prev": "< prev", "next": "next >"} | {s: s for s in SUB_PAGES}
_ENGINE_COMMANDS = ("<r>", "<c>", "<q>", "<a>")


class WebShopEnv:
    """WebShop for agents (protocol ``envs.Env``).

    Actions: those of ``envs.webshop_text`` (``search red shoes``, ``click 3``, ``click light_blue``, ``click buy``) or
    the original's (``search[red shoes]``, ``click[buy now]``).  The reward is 1.0 for a purchase that scores exactly 1,
    else 0; ``info["score"]`` is the graded score and ``info["parts"]``, on a purchase, what it is made of.  An episode
    ends at its purchase, or is truncated after ``max_steps`` actions.  An action that the page does not offer, or one
    of the search engine's own commands, costs a step and changes nothing: the same state and ``info["invalid"]``.
    """

    def __init__(self, shop: Shop, max_steps: int = 15):
        self.shop, self.max_steps = shop, max_steps
        self._grammar = WebShopGrammar()
        self.session: Session | None = None

    def tasks(self, split: str) -> list[Task]:
        return [self.task(index, split) for index in self.shop.split(split)]

    def task(self, index: int, split: str) -> Task:
        """The goal of this index as a task."""
        text = task_text(self.shop.goal(index).instruction_text)
        return Task(f"webshop-{index}", text, split, start=self.shop.state("home", (), 0, ()), goal=index)

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
        if not isinstance(action, str):
            return nothing
        match = _ACTION.match(action)
        if match and match[1] in ("search", "click"):
            banned = match[1] == "search" and match[2].lower().split(" ")[0] in _ENGINE_COMMANDS
            return nothing if banned else session.step(action)
        name, _, words = action.partition(" ")
        if name == "search" and words.strip():
            query = " ".join(map(option_text, words.lower().split()))
            return nothing if query.split(" ")[0] in _ENGINE_COMMANDS else (0.0, False, session.search(query))
        return session.click(self._link(words)) if name == "click" and words else nothing

    def _link(self, word: str) -> str | None:
        """What to click in the shop for a word of the abstract state."""
        session = self.session
        if session.kind == "results":
            asins = [session.shop.asins[row].lower() for row in session.shown]
            if re.fullmatch(r"[1-9]\d?", word, re.ASCII) and int(word) <= len(asins):
                return asins[int(word) - 1]
            return next((asin for asin in asins if option_word(asin) == word), BUTTONS.get(word))
        if session.kind == "item":
            values = session.shop.product(session.row).options.values()
            return next((value for value in chain(*values) if value and option_word(value) == word), BUTTONS.get(word))
        return BUTTONS.get(word)

    def admissible(self) -> list[str]:
        return [] if self.over else self._grammar.admissible(self.session.state())


def open_world(cfg) -> World:
    """WebShop as section ``env`` of the configuration describes it: official files (``cfg.data``) or the invented
    catalogue of ``cfg.catalog_seed``."""
    shop = Shop.load(cfg.data, cfg.human_goals) if cfg.data else Shop.invented(cfg.catalog_seed)
    env = WebShopEnv(shop, cfg.max_steps)
    grammar = lru_cache(maxsize=1)(lambda: catalog.training_grammar(shop))      # only collecting data needs it
    tasks = {split: env.tasks(split) for split in ("train", "validation", "test")}
    for split, found in tasks.items():
        if not found:
            raise UserError(f"env.data: {len(shop)} goals leave none for {split}; the published positions are test 0-499, "
                            f"validation 500-1499, train from 1500")
    return World(make=lambda: WebShopEnv(shop, cfg.max_steps), tasks=tasks,
                 grammar=WebShopGrammar, scripted=lambda name: policy(name, grammar()),
                 rules=lambda split: catalog.rule_baselines(shop, split))


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


def read_line() -> str:
    """A line of input without its spaces; empty at the end of input."""
    try:
        return input("\n> ").strip()
    except EOFError:
        return ""


def play(shop: Shop, goal: int) -> None:
    """Shop by hand: abstract or original actions, an empty line ends."""
    if not 0 <= goal < len(shop):
        raise UserError(f"--goal {goal}: this shop has the goals 0 to {len(shop) - 1}")
    env = WebShopEnv(shop, max_steps=100)
    task = env.task(goal, "train")
    print(f"{shop.goal(goal).instruction_text}\n\n{task.text}\n\n{env.reset(task)}")
    while not env.over and (action := read_line()):
        state, _, _, _, info = env.step(action)
        print("nothing happens; possible: " + ", ".join(env.admissible()) if info["invalid"] else state)
    if env.session.info:
        print(f"score {env.session.reward:.3f}: {json.dumps(env.session.info)}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m envs.webshop", description="WebShop at the command line.")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--bench", action="store_true", help="measure steps per second")
    mode.add_argument("--play", action="store_true", help="shop by hand")
    mode.add_argument("--nouns", action="store_true", help="write nouns.json for the files in FOLDER (needs spaCy)")
    parser.add_argument("--data", metavar="FOLDER", help="official files (default: the invented catalogue)")
    parser.add_argument("--human", action="store_true", help="goals written by people (needs --data)")
    parser.add_argument("--goal", type=int, default=0, help="goal to play")
    options = parser.parse_args(arguments)

    def make_shop() -> Shop:
        return Shop.load(options.data, options.human) if options.data else Shop.invented()
    try:
        if options.human and not options.data:
            raise UserError("--human: goals written by people need --data FOLDER")
        if options.nouns:
            print(write_nouns(options.data or "."))
        elif options.bench:
            bench(make_shop)
        else:
            play(make_shop(), options.goal)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
