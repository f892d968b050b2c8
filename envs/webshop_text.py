"""WebShop as text: the abstract state, the task text, the grammar over both, and the scripted policies.

Nothing in this file can see more than text.  The real shop (``envs/webshop.py``) and the experience model share
``render``, so a dreamed page and a real one look the same.

The text.  Words are separated by single spaces; everything that can be looked up is followed by a separator
that tells where it stands: ``|`` (on the page), ``*`` (chosen option), ``,`` (in the task)::

    task      wireless , padded , travel headphones , color red , price 60.00 ,
    home      [home]
    results   [results] p1 1 s017 norwick travel headphones | wireless | $49.5 2 s201 ...
    item      [item] norwick travel headphones | wireless | $49.5 color black | red * size small | large |
    sub page  [description] line | line |      (also [features], [reviews], [attributes])
    end       [done]
    actions   search w1 w2 .. / click 3 / click <product id> / click red / click buy / click back / click prev /
              click next / click description (features, reviews, attributes)

A page is lower-cased and its white space collapsed; both are lossless for the task, as the shop's search, its
buttons and its reward do the same.  A title is a row of segments, each followed by ``|``.  Option names and values
are one word each: their spaces are written ``_``.  Text that could be mistaken for the above is written in
percent codes (``%3c`` for ``<``): every ``<``, ``[`` and ambiguous ``%``; a leading ``$``; the words ``|``, ``*``
and ``,``; in option words also ``_`` and, where the whole word names a button, its first letter.
"""
from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

SUB_PAGES = ("description", "features", "reviews", "attributes")
KINDS = ("home", "results", "item", *SUB_PAGES, "done")
BUTTONS = ("buy", "back", "prev", "next", *SUB_PAGES)
# Share of common products from which two results pages count as the same page, see WebShopGrammar.diff.
SAME_RESULTS = 0.3
# Words with a meaning of their own in states, actions, tasks and traces: never content.
STRUCTURE = {*BUTTONS, *KINDS, "search", "click", "price", "open", "choose", "read", "nothing", "none", "ok", "yes",
             "opened", "fits", "misses"}
FUNCTION_WORDS = set("a an and are as at be by can find for from has i in is it its me my not no of on one or that the "
                     "these this to want was which will with you your".split())


# ---------------------------------------------------------------------------------------------------- escaping
def clean(text: str) -> str:
    """Lower-cased, white space collapsed."""
    return " ".join(text.lower().split())


def _code(match: re.Match) -> str:
    return f"%{ord(match[0]):02x}"


def _escape(word: str) -> str:
    """One word of running text such that it contains none of our markers; readable words stay as they are."""
    word = re.sub(r"%(?=[0-9a-f]{2})|[<\[]", _code, word)
    return re.sub(r"^([|*,]$|\$)", _code, word)


def _unescape(word: str) -> str:
    return re.sub(r"%([0-9a-f]{2})", lambda match: chr(int(match[1], 16)), word)


def option_word(text: str) -> str:
    """The single word that stands for an option name or value: ``Light Blue`` -> ``light_blue``."""
    text = re.sub(r"%(?=[0-9a-f]{2})|[<\[_]", _code, clean(text)).replace(" ", "_")
    if text in BUTTONS:
        return _code(re.match(".", text)) + text[1:]
    return re.sub(r"^([|*,]$|\$)", _code, text) or "_"


def option_text(word: str) -> str:
    """Inverse of ``option_word`` (up to case and white space): ``light_blue`` -> ``light blue``."""
    return _unescape(word.replace("_", " ")).strip()


def _segments(text: str) -> list[str]:
    """The pieces of a text between words ``|``, none of them empty."""
    pieces: list[list[str]] = [[]]
    for word in text.lower().split():
        if word == "|":
            pieces.append([])
        else:
            pieces[-1].append(word)
    return [" ".join(piece) for piece in pieces if piece]


# -------------------------------------------------------------------------------------------------------- pages
class Item(NamedTuple):
    """One product on a results page."""
    id: str
    title: str
    price: str


class Option(NamedTuple):
    """One kind of option on an item page; ``chosen`` is one of ``values`` or None."""
    name: str
    values: tuple[str, ...]
    chosen: str | None = None


@dataclass(frozen=True)
class Page:
    """Any page.  The texts given are normalised here, so that ``parse(render(page)) == page`` for every page.

    kind: one of KINDS.  number: results page, from 1.  items: results.  title, price, options: item page
    (price tag as ``$49.5`` or ``$12.5 to $18.75``).  lines: sub pages.
    """
    kind: str
    number: int = 0
    items: tuple[Item, ...] = ()
    title: str = ""
    price: str = ""
    options: tuple[Option, ...] = ()
    lines: tuple[str, ...] = ()

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"unknown page kind {self.kind!r}; known: {', '.join(KINDS)}")
        items = [Item(clean(i.id), " | ".join(_segments(i.title)), _tag(i.price)) for i in
                 map(Item._make, self.items)]
        options = []
        for name, values, chosen in self.options:
            values = tuple(value for value in map(clean, values) if value)   # the shop cannot click an empty value
            chosen = clean(chosen) if chosen is not None else None
            if values:
                options.append(Option(clean(name), values, chosen if chosen in values else None))
        is_item = self.kind == "item"
        normal = {"number": self.number if self.kind == "results" else 0,
                  "items": tuple(items) if self.kind == "results" else (),
                  "title": " | ".join(_segments(self.title)) if is_item else "",
                  "price": _tag(self.price) if is_item else "",
                  "options": tuple(options) if is_item else (),
                  "lines": tuple(s for line in self.lines for s in _segments(line)) if self.kind in SUB_PAGES else ()}
        for name, value in normal.items():
            object.__setattr__(self, name, value)


def _tag(tag: str) -> str:
    tag = clean(tag)
    if not re.fullmatch(r"\$[\d.e+]+( to \$[\d.e+]+)?", tag):
        raise ValueError(f"price tag {tag!r} is neither '$a' nor '$a to $b'")
    return tag


def _running(segments: Iterable[str]) -> str:
    return "".join(" " + " ".join(map(_escape, segment.split(" "))) + " |" for segment in segments)


def render(page: Page) -> str:
    """The page as text, see the top of this file."""
    text = f"[{page.kind}]"
    if page.kind == "results":
        text += f" p{page.number}"
        for number, item in enumerate(page.items, 1):
            text += f" {number} {option_word(item.id)}{_running(_segments(item.title))} {item.price}"
    elif page.kind == "item":
        text += f"{_running(_segments(page.title))} {page.price}"
        for option in page.options:
            text += f" {option_word(option.name)}"
            for value in option.values:
                text += f" {option_word(value)} {'*' if value == option.chosen else '|'}"
    return text + _running(page.lines)


@lru_cache(maxsize=8192)
def parse(text: str) -> Page:
    """Inverse of ``render``.  Raises ValueError on text that ``render`` cannot have written."""
    words = text.split(" ")
    kind = words[0][1:-1]
    try:
        if kind == "results":
            page = _parse_results(words)
        elif kind == "item":
            title, price, at = _parse_title(words, 1)
            page = Page(kind, title=title, price=price, options=_parse_options(words[at:]))
        else:
            body = " ".join(map(_unescape, words[1:]))
            page = Page(kind, lines=tuple(body.split(" | ")) if body else ())
    except IndexError:
        raise ValueError(f"page breaks off: {text[:80]!r}") from None
    if render(page) != text:
        raise ValueError(f"not a page of this shop: {text[:80]!r}")
    return page


def _parse_title(words: list[str], at: int) -> tuple[str, str, int]:
    """Title and price tag from position ``at`` on, and the position behind them."""
    start = at
    while not words[at].startswith("$"):
        at += 1
    title, price = " ".join(map(_unescape, words[start:at])), words[at]
    if words[at + 1:at + 2] == ["to"] and words[at + 2].startswith("$"):
        price, at = f"{price} to {words[at + 2]}", at + 2
    return title, price, at + 1


def _parse_results(words: list[str]) -> Page:
    items, at = [], 2
    while at < len(words):
        title, price, behind = _parse_title(words, at + 2)
        items.append(Item(option_text(words[at + 1]), title, price))
        at = behind
    return Page("results", number=int(words[1][1:]), items=tuple(items))


def _parse_options(words: list[str]) -> tuple[Option, ...]:
    """``color black | red * size ..``: two words before a separator are a name and its first value."""
    options, at = [], 0
    while at < len(words):
        if words[at + 1] not in ("|", "*"):
            options.append(Option(option_text(words[at]), (), None))
            at += 1
        name, values, chosen = options[-1]
        value = option_text(words[at])
        options[-1] = Option(name, (*values, value), value if words[at + 1] == "*" else chosen)
        at += 2
    return tuple(options)


def pick(page: Page, word: str) -> Page:
    """The item page after a click on option ``word``.  Of two options with this value the last one gets it,
    as in the shop.  Raises ValueError where the page has no such option."""
    value = option_text(word)
    holders = [option for option in page.options if value in option.values]
    if not holders:
        raise ValueError(f"no option {word!r} on this page")
    options = tuple(o._replace(chosen=value) if o is holders[-1] else o for o in page.options)
    return Page("item", title=page.title, price=page.price, options=options)


# -------------------------------------------------------------------------------------------------------- tasks
_PREAMBLE = re.compile(r"^(hello|hi)?[, ]*(please )?(find me|give me|buy me|"
                       r"(i am|i'm|im)? ?(looking|searching) (for|to (buy|find))|"
                       r"i (need|want|would like|am in need of)( to (buy|find|get|purchase))?)( an?| some| the)? ")
_SPLIT = re.compile(r"[,.;?!] (?:and )?| with | for | and | that (?:is|are) | which (?:is|are) ")


def task_text(instruction: str) -> str:
    """The task as items, each followed by a comma, from the shop's instruction alone.

    ``Find me wireless, padded, travel headphones with color: red, and price lower than 60.00 dollars`` ->
    ``wireless , padded , travel headphones , color red , price 60.00 ,``.  The last item before the options is
    the product.  Free-form instructions of people are cut at commas and at small words in the same way.
    """
    text = clean(instruction)
    price = re.search(r", and price lower than (\d+\.\d+) dollars$", text)
    text = text[:price.start()] if price else text
    # the options start at the last "with" that a "name: " follows
    named = re.search(r" with ((?:(?! with )[^,:])+: .*)$", text)
    text = text[:named.start()] if named else text
    options = re.split(r", and (?=[^,:]+: )", named[1]) if named else []
    items = []
    for phrase in _SPLIT.split(_PREAMBLE.sub("", text).strip(" .?!")):
        words = [_escape(word) for word in phrase.split(" ") if word.strip(",.;:?!")]
        items += [" ".join(words)] if words else []
    items += [" ".join(map(option_word, option.split(": ", 1))) for option in options]
    items += [f"price {price[1]}"] if price else []
    return " , ".join(items) + " ,"


def task_items(task: str) -> list[str]:
    """``wireless , travel headphones , price 60.00 ,`` -> its items."""
    return [item for item in task.removesuffix(" ,").split(" , ") if item]


def limit_of(item: str) -> float | None:
    """The limit of a price item, None for any other item."""
    match = re.fullmatch(r"price (\d+(?:\.\d+)?)", item)
    return float(match[1]) if match else None


def dollars(tag: str) -> float:
    """The price that a tag promises at most; the shop draws a hidden price from a range."""
    return float(tag.split("$")[-1])


# ------------------------------------------------------------------------------------------------------ grammar
class WebShopGrammar:
    """The text side of WebShop (protocol ``envs.Grammar``).

    ``texts``: tasks and states of the training data, in any order.  They teach the option names (which tell the
    item ``color red`` from the item ``wool sweater``) and the vocabulary of ``counterfactual``; nothing else is
    known about the shop.  An option name is also recognised on the very page that is judged.
    """
    # words of a trace that carry the verdict or the place of a look-up
    verdict_words = frozenset({"ok", "no", "|", "*", ","})
    open_vocabulary = True
    parse = staticmethod(parse)
    render = staticmethod(render)

    def __init__(self, texts: Iterable[str] = ()):
        texts = list(dict.fromkeys(texts))
        self.values: dict[str, list[str]] = {}                       # option name -> values
        for text in texts:
            for option in parse(text).options if text.startswith("[item]") else ():
                known = self.values.setdefault(option_word(option.name), [])
                known += [word for word in map(option_word, option.values) if word not in known]
        attributes, products = {}, {}
        for text in texts:
            if not text.startswith("["):
                *first, product = self.phrases(text) or [""]
                attributes.update(dict.fromkeys(first))
                products[product] = None
        self.attributes, self.products = list(attributes), [product for product in products if product]
        self.limits = {item for text in texts if not text.startswith("[") for item in task_items(text)
                       if limit_of(item) is not None}
        # product -> the (option name, value) pairs that its pages and tasks show; product -> title -> a page
        self.offers: dict[str, set[tuple[str, str]]] = {product: set() for product in self.products}
        self.shelf: dict[str, dict[str, Page]] = {product: {} for product in self.products}
        for text in texts:
            if text.startswith("[item]"):
                page = parse(text)
                named = f" {page.title.split(' | ')[0]}"
                for product in self.products:
                    if named.endswith(f" {product}"):
                        self.shelf[product][page.title] = page
                        self.offers[product] |= {(option_word(o.name), option_word(v)) for o in page.options
                                                 for v in o.values}
            elif not text.startswith("["):
                *_, product = self.phrases(text) or [""]
                if product:
                    self.offers[product] |= {option for item in task_items(text) if (option := self.option(item))}

    # ---------------------------------------------------------------- reading
    def option(self, item: str, page: Page | None = None) -> tuple[str, str] | None:
        """(name, value word) where the item asks for an option."""
        words = item.split(" ")
        on_page = [option_word(option.name) for option in page.options] if page else []
        return (words[0], words[1]) if len(words) == 2 and (words[0] in self.values or words[0] in on_page) else None

    def phrases(self, task: str) -> list[str]:
        """The attributes and, last, the product that the task asks for."""
        return [item for item in task_items(task) if limit_of(item) is None and not self.option(item)]

    def kind(self, state: str) -> str:
        mark = state.split(" ", 1)[0]
        if (kind := mark[1:-1]) not in KINDS or mark != f"[{kind}]":
            raise ValueError(f"not a page of this shop: {state[:80]!r}")
        return kind

    def admissible(self, state: str) -> list[str]:
        """Order: what the page offers, then its buttons.  (Searching works on every page but is offered at home;
        the shop shows no attributes page unless told to, so its button is not listed.)"""
        page = parse(state)
        if page.kind == "home":
            return ["search <words>"]
        if page.kind == "results":
            turn = ["click next"] + (["click prev"] if page.number > 1 else [])
            return [f"click {number}" for number in range(1, len(page.items) + 1)] + turn + ["click back"]
        if page.kind == "item":
            words = dict.fromkeys(option_word(value) for option in page.options for value in option.values)
            return [f"click {word}" for word in words] + [f"click {word}" for word in (
                "buy", "back", "prev", "description", "features", "reviews")]
        return ["click back", "click prev"] if page.kind in SUB_PAGES else []

    def key(self, state: str, action: str) -> str:
        """Page kind and action, the link resolved: pairs with the same key lead to the same page.

        A search leads to the same page from everywhere.  ``click 3`` means another product on every page, so the
        product's title stands in its place; a sub page belongs to a title too; the next results page to the first
        products of this one.
        """
        if action.startswith("search "):                           # the engine does not care for the order of words
            return " ".join(["search", *sorted(action.split(" ")[1:])])
        page = parse(state)
        key = f"{page.kind} {action}"
        link = action.removeprefix("click ")
        if page.kind == "results":
            for number, item in enumerate(page.items, 1):
                if link in (str(number), option_word(item.id)):
                    return f"results click{_running(_segments(item.title))}"
            if link == "next":
                return " ".join([f"{key} p{page.number}"] + [option_word(item.id) for item in page.items[:5]])
        if page.kind == "item" and link in SUB_PAGES:
            return key + _running(_segments(page.title))
        return key

    # ---------------------------------------------------------------- edits
    def diff(self, state: str, action: str, next_state: str, memory: Sequence[str],
             past: Sequence[str] = ()) -> str:
        """The next state as an edit, in this order: ``[pick] v`` (option v is chosen), ``[same]`` (nothing
        happens), ``[home]``, ``[done]``, ``[prevpage]`` (the page that prev leads to, read off ``past``), ``[mem]``
        (the first of ``memory``), else its full text.

        ``memory``: next states of the retrieved transitions, nearest first.  ``past``: earlier states of this
        episode, newest last.  Lossy in one place: ``[mem]`` also stands for a results page of which at
        least SAME_RESULTS of the products are those of the remembered page.
        """
        word = action.removeprefix("click ")
        if self.kind(state) == "item" and word not in BUTTONS and action in self.admissible(state) and (
                render(pick(parse(state), word)) == next_state):
            return f"[pick] {word}"
        if next_state == state:
            return "[same]"
        if " " not in next_state:                                  # [home], [done], an empty page
            return next_state
        if action == "click prev" and next_state == self._previous(state, past):
            return "[prevpage]"
        if memory and (memory[0] == next_state or self._similar(memory[0], next_state)):
            return "[mem]"
        return next_state

    def patch(self, state: str, action: str, edit: str, memory: Sequence[str],
              past: Sequence[str] = ()) -> str:
        """Inverse of ``diff``.  Raises ValueError where the edit is none, or has nothing to work on."""
        if edit == "[same]":
            return state
        if edit.startswith("[pick] "):
            return render(pick(parse(state), edit.removeprefix("[pick] ")))
        if edit == "[prevpage]":
            previous = self._previous(state, past)
            if previous is None:
                raise ValueError("[prevpage], but the episode has no such page")
            return previous
        if edit == "[mem]":
            if not memory:
                raise ValueError("[mem], but nothing was retrieved")
            return memory[0]
        return render(parse(edit))

    def _previous(self, state: str, past: Sequence[str]) -> str | None:
        """Where ``click prev`` leads: sub page -> item page (its options stay chosen), item -> results page,
        results page p -> p - 1; each the newest such page of the episode."""
        kind = self.kind(state)
        if kind == "results":
            wanted = f"[results] p{parse(state).number - 1}"
            fits = [page for page in past if page == wanted or page.startswith(wanted + " ")]
        else:
            wanted = "item" if kind in SUB_PAGES else "results" if kind == "item" else None
            fits = [page for page in past if self.kind(page) == wanted]
        return fits[-1] if fits else None

    def _similar(self, first: str, second: str) -> bool:
        if self.kind(first) != "results" or self.kind(second) != "results":
            return False
        first, second = parse(first), parse(second)
        common = set(first.items) & set(second.items)
        return first.number == second.number and 0 < SAME_RESULTS * len(second.items) <= len(common)

    # ---------------------------------------------------------------- judging
    def judge(self, task: str, state: str) -> list[tuple[str, str, bool]]:
        """One look-up per word that the task asks for: (word, the token that follows it, fine?).

        The token is looked up on the page or, for a word that the page lacks, in the task: so a wanted word
        is met exactly if ``|`` follows (attribute, product), or ``*`` (option).  A price is met by what stands on
        the tag: (``price 60.00``, ``$49.5``, True).  On a state that is no item page nothing is met.
        """
        page = parse(state)
        title = " | ".join(_segments(page.title) + [""]).split()
        listed = {option_word(v): "*" if v == o.chosen else "|" for o in page.options for v in o.values}
        chosen = {option_word(o.chosen): "*" for o in page.options if o.chosen is not None}
        checks = []
        for item in task_items(task):
            option = self.option(item, page)
            if (limit := limit_of(item)) is not None:
                checks.append((item, page.price or ",", bool(page.price) and dollars(page.price) <= limit))
            elif option:
                follows = {**listed, **chosen}.get(option[1], ",")
                checks.append((option[1], follows, follows == "*"))
            else:
                checks += _look_up(item.split(" "), [_escape(word) if word != "|" else word for word in title])
        return checks

    def met(self, task: str, state: str) -> bool:
        """Whether buying here fulfils the task, as far as the page tells."""
        checks = self.judge(task, state)
        return bool(checks) and all(fine for _, _, fine in checks)

    def decides(self, state: str, action: str) -> bool:
        """A purchase, and nothing else, ends an episode and may fulfil a task."""
        return action == "click buy" and self.kind(state) == "item"

    def decisive(self, state: str, next_state: str) -> str:
        """The page that decides a purchase: the one it is made on."""
        return state

    def outcome(self, task: str, state: str, action: str, next_state: str) -> tuple[bool, bool]:
        """(done, success) by the rule on the text."""
        done = next_state == "[done]"
        return done, done and self.decides(state, action) and self.met(task, state)      # to say so buys nothing

    def explain(self, task: str, state: str, action: str, next_state: str) -> str:
        """Trace of one transition: on a purchase every look-up of ``judge``; on an item page what follows the clicked
        word there (``none`` where the page lacks it), then, as elsewhere, one word for what happens."""
        if next_state == "[done]":
            return " ".join(f"{word} {follows} {'ok' if fine else 'no'}"
                            for word, follows, fine in self.judge(task, state))
        word = action.removeprefix("click ")
        if self.kind(state) == "item" and action.startswith("click ") and word not in BUTTONS:
            listed = {option_word(v): "*" if v == o.chosen else "|" for o in parse(state).options for v in o.values}
            return f"{word} {listed.get(word, 'none')} {'choose' if word in listed else 'nothing'}"
        if next_state == state:
            return "nothing"
        if action == "click prev":
            return "back"
        kind = self.kind(next_state)
        return {"results": "results", "item": "open", "home": "home"}.get(kind, "read")

    def consider(self, task: str, state: str, history: Sequence[str]) -> str:
        """What an agent should look at before it acts, in look-up form; a function of what it reads, not of what it
        does.  Item page: each wanted option with what follows it, the price pair, and whether it can be bought here: all
        wanted options offered and the price fine.  Results page: hit by hit, whether it was opened before, else its price
        and whether that is fine, up to the first that is; then its link as the action would name it, or a copying head
        would find the one that was clicked last."""
        page = parse(state)
        limit = next((item for item in task_items(task) if limit_of(item) is not None), None)
        if page.kind == "item":
            wanted = [item for item in task_items(task) if item == limit or self.option(item, page)]
            checks = self.judge(" , ".join(wanted) + " ,", state) if wanted else []
            seen = [f"{word} {follows}" if word != limit else f"{word} {follows} {'ok' if fine else 'no'}"
                    for word, follows, fine in checks]
            fits = all(fine if word == limit else follows != "," for word, follows, fine in checks)
            return " ".join([*seen, "fits" if fits else "misses"]) if seen else ""
        words = []
        if page.kind == "results" and limit:
            since = max((at for at, action in enumerate(history)       # hits are counted anew on every page
                         if action.startswith("search ") or action == "click next"), default=-1)
            for number, item in enumerate(page.items, 1):
                fine = dollars(item.price) <= limit_of(limit)
                if f"click {number}" in history[since + 1:]:
                    words += [str(number), "opened"]
                elif fine:
                    return " ".join([*words, str(number), item.price, "ok", f"click {number}"])
                else:
                    words += [str(number), item.price, "no"]
        return " ".join(words)

    # ---------------------------------------------------------------- augmentation
    def advice(self, task: str, state: str, history: Sequence[str]) -> str | None:
        """The hit that the thought about a results page ends with; None elsewhere."""
        *_, last, link = ["", *self.consider(task, state, history).split(" ")]
        return f"click {link}" if last == "click" else None

    def varied(self, task: str, state: str, action: str, history: Sequence[str],
               rng: random.Random) -> tuple[str, list[str]]:
        """A history of a results page in which one to four more hits were opened, in the order of the thoughts, as far as
        one is left to open; that of any other page as it is."""
        for _ in range(rng.randint(1, 4) if self.kind(state) == "results" else 0):
            link = self.advice(task, state, history)
            more = [*history, link, "click prev"]
            if not (link and self.advice(task, state, more)):
                break
            history = more
        return task, list(history)

    def counterfactual(self, task: str, state: str, action: str, next_state: str, rng: random.Random) -> str | None:
        """Another task for the same purchase; ``judge`` on the page gives its label, no environment is asked.

        First a task that the page meets (options that nobody chose are left out).  Half of the tasks stay so; in a
        quarter one check is broken, in a quarter each check on its own with probability 1/2: another
        attribute, product or option value, a limit below the price.  None where the state is no item page or its
        title names no known product or no known attribute.
        """
        wishes = self._wishes(task, parse(state), rng) if self.kind(state) == "item" else []
        breakable = [number for number, (_, unmet) in enumerate(wishes) if unmet]
        if not breakable:
            return None
        broken: set[int] = set()
        if rng.random() < 0.5:
            independently = rng.random() < 0.5
            broken = {number for number in breakable if independently and rng.random() < 0.5}
            broken = broken or {rng.choice(breakable)}
        items = [rng.choice(unmet) if number in broken else met for number, (met, unmet) in enumerate(wishes)]
        return " , ".join(item for item in items if item) + " ,"

    def _wishes(self, task: str, page: Page, rng: random.Random) -> list[tuple[str | None, list[str]]]:
        """Per wish an item that the page meets (None: an option that was not chosen) and items that it does not."""
        segments = [" ".join(map(_escape, segment.split(" "))) for segment in _segments(page.title)]
        product = next((p for p in self.products if segments and f" {segments[0]}".endswith(f" {p}")), None)
        known = [segment for segment in segments[1:] if segment in self.attributes]
        if product is None or not known:
            return []
        asked = max(1, len(self.phrases(task)) - 1)
        absent = [attribute for attribute in self.attributes if attribute not in segments]
        wishes = [(attribute, absent) for attribute in rng.sample(known, min(asked, len(known)))]
        wishes.append((product, [other for other in self.products if other != product]))
        for option in page.options:
            name, values = option_word(option.name), list(map(option_word, option.values))
            chosen = option_word(option.chosen) if option.chosen is not None else None
            elsewhere = [value for value in self.values.get(name, []) if value not in values]
            others = values + rng.sample(elsewhere, min(2, len(elsewhere)))     # mostly values that the page offers
            wishes.append((f"{name} {chosen}" if chosen else None, [f"{name} {v}" for v in others if v != chosen]))
        tens = range(10, 1000, 10)
        above = [ten for ten in tens if ten >= dollars(page.price)][:4]         # as near as the limits of real tasks
        below = [ten for ten in tens if ten < dollars(page.price)][-4:]
        if above and any(limit_of(item) is not None for item in task_items(task)):
            wishes.append((f"price {rng.choice(above):.2f}", [f"price {ten:.2f}" for ten in below]))
        return wishes

    def task_parts(self, task: str, start: str = "[home]") -> tuple[frozenset[str], frozenset[str]]:
        """(action types, items) of a task.  Raises ValueError with one word: ``malformed``; ``product`` (not exactly one
        known product, at the end of the phrases), ``attribute``, ``option`` or ``price`` (never seen in training),
        ``nowhere`` (seen, but on no single page of the product, as far as its pages were seen).

        An option counts as seen with a product if some page of that product in training offered it.
        """
        items = task_items(task)
        options = [option for item in items if (option := self.option(item))]
        limits = [item for item in items if limit_of(item) is not None]
        if " , ".join(items) + " ," != task or len(set(items)) < len(items) or len({n for n, _ in options}) < len(options):
            raise ValueError("malformed")
        *attributes, product = self.phrases(task) or [""]
        if product not in self.offers or set(attributes) & set(self.offers):
            raise ValueError("product")
        if not attributes or not set(attributes) <= set(self.attributes):
            raise ValueError("attribute")
        if not set(options) <= self.offers[product]:
            raise ValueError("option")
        if len(limits) > 1 or not set(limits) <= self.limits:
            raise ValueError("price")
        pages = self.shelf[product].values()
        if pages and not any(self.met(task, render(_with_choice(page, dict(options)))) for page in pages):
            raise ValueError("nowhere")
        actions = frozenset({"search", "click", "buy"} | ({"choose"} if options else set()))
        return actions, frozenset(items)

    def content_words(self, text: str) -> set[str]:
        """Words of a task, state, action, key or trace that may be renamed consistently: brands, nouns, attributes,
        option values.  Left out: option names, product ids and numbers, separators, markers, function words."""
        return {word for word in text.split(" ") if word not in STRUCTURE and word not in FUNCTION_WORDS
                and word not in self.values and word[:1] not in ("[", "<") and re.search(r"[^\W\d]", word)
                and not re.search(r"\d", word)}


def _with_choice(page: Page, wanted: dict[str, str]) -> Page:
    """The page with the wanted options (name -> value word) chosen where it offers them."""
    def choose(option: Option) -> Option:
        value = next((v for v in option.values if option_word(v) == wanted.get(option_word(option.name))), None)
        return option if value is None else option._replace(chosen=value)

    return replace(page, options=tuple(map(choose, page.options)))


def _look_up(phrase: list[str], title: list[str]) -> list[tuple[str, str, bool]]:
    """The look-ups of a phrase in a title (words, each segment followed by ``|``)."""
    for at in range(len(title) - len(phrase)):
        if title[at:at + len(phrase)] == phrase:
            return [(word, title[at + n + 1], True) for n, word in enumerate(phrase)]
    checks = []
    for n, word in enumerate(phrase):
        in_task = (phrase + [","])[n + 1]
        follows = title[title.index(word) + 1] if word in title else in_task
        checks.append((word, follows, n + 1 < len(phrase) and follows == in_task))
    return checks


# ----------------------------------------------------------------------------------------------------- policies
Policy = Callable[[str, str, list[str], random.Random], str]
EXPERT_TRIES = 3            # products opened before it settles for the one at hand
NOISY_MIX = (40, 50, 10)    # of 100 actions of the noisy expert: by the expert, the mediocre, the random rule
RANDOM_MISFITS = 0.3                 # share of random clicks on what the page need not offer
MEDIOCRE_FORGETS = 0.31     # probability, per option, to buy without it
CURIOUS_PAGES = 3           # results pages of a search that the curious look through
CURIOUS_TIMES = 2           # visits of each page: a memory is learned from two episodes that saw the same


def _query(grammar: WebShopGrammar, task: str) -> str:
    """What a results page can answer: attributes and product.  (Options and limits are seen on the item page.)"""
    return "search " + " ".join(grammar.phrases(task))


def _misses(grammar: WebShopGrammar, task: str, title: str, price: str) -> int:
    """How many look-ups fail of those that a results page can answer too: all but the options."""
    items = [item for item in task_items(task) if not grammar.option(item)]
    checks = grammar.judge(" , ".join(items) + " ,", render(Page("item", title=title, price=price)))
    return sum(not fine for _, _, fine in checks)


def _wanted_links(grammar: WebShopGrammar, task: str, page: Page) -> list[str]:
    """The wanted options that are not chosen yet, whether the page offers them or not."""
    chosen = {option_word(option.chosen) for option in page.options if option.chosen is not None}
    options = [grammar.option(item, page) for item in task_items(task)]
    return [f"click {option[1]}" for option in options if option and option[1] not in chosen]


def _expert(grammar: WebShopGrammar, task: str, state: str, history: list[str], rng: random.Random) -> str:
    page = parse(state)
    if page.kind == "home":
        return _query(grammar, task)
    since = max((at for at, action in enumerate(history) if action.startswith("search ")), default=-1)
    opened = [action for action in history[since + 1:] if re.fullmatch(r"click \d+", action)]
    if page.kind == "results":
        misses = {f"click {number}": _misses(grammar, task, item.title, item.price)
                  for number, item in enumerate(page.items, 1)}
        fresh = {link: count for link, count in misses.items() if link not in opened} or misses
        return min(fresh, key=fresh.get, default="click back")
    if page.kind == "item":
        links, offered = _wanted_links(grammar, task, page), grammar.admissible(state)
        fits = set(links) <= set(offered) and not _misses(grammar, task, page.title, page.price)
        if not fits and len(opened) < EXPERT_TRIES:
            return "click prev"
        return next((link for link in links if link in offered), "click buy")
    return "click prev"


def _noisy(grammar: WebShopGrammar, task: str, state: str, history: list[str], rng: random.Random) -> str:
    rule = rng.choices((_expert, _mediocre, _random), NOISY_MIX)[0]
    return rule(grammar, task, state, history, rng)


def _mediocre(grammar: WebShopGrammar, task: str, state: str, history: list[str], rng: random.Random) -> str:
    page = parse(state)
    if page.kind == "results" and page.items:
        return f"click {rng.randint(1, min(len(page.items), 3))}"
    if page.kind == "item":
        offered = grammar.admissible(state)
        links = [link for link in _wanted_links(grammar, task, page) if link in offered]
        return links[0] if links and rng.random() > MEDIOCRE_FORGETS else "click buy"
    return _expert(grammar, task, state, history, rng)


def _random(grammar: WebShopGrammar, task: str, state: str, history: list[str], rng: random.Random) -> str:
    if rng.random() < RANDOM_MISFITS:
        return f"click {rng.choice([*(v for values in grammar.values.values() for v in values), *BUTTONS, '1', '9'])}"
    action = rng.choice(grammar.admissible(state))
    if action == "search <words>":
        words = _query(grammar, task).split(" ")[1:]
        return "search " + " ".join(rng.sample(words, rng.randint(1, len(words))))
    return action


def _curious(grammar: WebShopGrammar, task: str, state: str, history: list[str], rng: random.Random,
             taken: Counter[str]) -> str:
    page = parse(state)
    times = {}                                                 # link -> how often it was taken, of those worth it
    if page.kind == "item":
        links = {link: taken[grammar.key(state, link)] for link in ("click features", "click description")}
        times = {link: n for link, n in links.items() if n <= taken[page.title]}       # each once in every visit
        taken[page.title] += not times
    elif page.kind == "results":
        times = {f"click {number}": taken[item.title] for number, item in enumerate(page.items, 1)}
        if page.items and page.number < CURIOUS_PAGES:
            times = {"click next": taken[grammar.key(state, "click next")]} | times
    times = {link: n for link, n in times.items() if n < CURIOUS_TIMES}
    ways_out = {"home": _query(grammar, task), "results": "click next" if page.items else "click back"}
    action = min(times, key=times.get) if times else ways_out.get(page.kind, "click prev")
    taken[grammar.key(state, action)] += 1
    return action


POLICIES = {"expert": _expert, "noisy": _noisy, "mediocre": _mediocre, "random": _random, "curious": _curious}


def policy(name: str, grammar: WebShopGrammar) -> Policy:
    """A scripted policy ``(task, state, own earlier actions, rng) -> action`` that reads text alone.

    ``expert`` compares the hits with the task, opens the best, and goes back where a page does not fit; ``noisy``
    mixes it with ``mediocre`` and ``random``; ``mediocre`` buys what it opens first and forgets options; ``random``
    clicks anything, now and then what the page does not offer, so that the data show what happens then.  ``curious``
    buys nothing: it takes the links that it took least often, in earlier episodes too (further results, products,
    their sub pages).
    Raises ValueError on an unknown name.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown scripted policy {name!r}; known: {', '.join(POLICIES)}")
    return partial(POLICIES[name], grammar, **({"taken": Counter()} if name == "curious" else {}))
