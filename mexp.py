"""The experience model M_exp: one LLM that plays the environment (Eq. 4), its training (Eq. 5), and the dream.

``ExperienceModel.predict`` is Eq. 4, ``TrainingRows`` makes the data of Eq. 5, ``DreamEnv`` is the synthetic MDP
behind the protocol that the real environments speak.
"""
from __future__ import annotations

import functools
import itertools
import random
import re
import zlib
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from typing import Hashable, Sequence

import torch

import formats
import llm
from buffer import ReplayBuffer, Transition
from endpoint import EndpointLM
from envs import Grammar, Task
from rollouts import INVALID_ACTION


GUESSED = 0.3                # a page that nothing foretells teaches little: how much less often it is drawn in training
VERSIONS = 4                 # of each judged step to draw from: its own task, or one for which it would have counted otherwise


@dataclass
class Query:
    """What Eq. 4 conditions on: tau (task), H_t (history and the states passed), s_t, a_t."""
    task: str
    task_id: str
    episode: str
    history: list[str]                # earlier actions, oldest first
    past: list[str]                   # earlier states, oldest first
    state: str
    action: str


@dataclass
class Prediction:
    """(R_t, s_{t+1}, r_{t+1}) of Eq. 4; ``next`` is the text as written, ``next_state`` what it stands for."""
    reasoning: str
    next: str
    next_state: str
    done: bool
    success: bool


class Codec:
    """Between transitions and the experience model's text: history window, demonstrations, edits or full pages."""

    def __init__(self, grammar: Grammar, buffer: ReplayBuffer, edits: bool, history: int, k: int, reasoning: bool):
        self.grammar, self.buffer = grammar, buffer
        self.edits, self.history, self.k, self.reasoning = edits, history, k, reasoning

    def retrieve(self, queries: Sequence[Query]) -> list[list[Transition]]:
        """D_k: the top-k transitions of the replay buffer, never of the same episode or task."""
        if not self.k or not queries:
            return [[] for _ in queries]
        return self.buffer.query([q.state for q in queries], [q.action for q in queries], self.k,
                                 [q.task_id for q in queries], [q.episode for q in queries])

    def prompt(self, q: Query, demos: list[Transition]) -> str:
        """The conditioning of Eq. 4.  With edits a demonstration is its key and page kind: its page is in memory."""
        if self.edits:
            shown = [(self.grammar.key(d.state, d.action), self.grammar.kind(d.next_state)) for d in demos]
        else:
            shown = [(formats.join(d.state, "<act>", d.action), d.next_state) for d in demos]
        return formats.mexp_prompt(q.task, q.history[-self.history:] if self.history else [], q.state, q.action, shown)

    def past(self, q: Query) -> list[str]:
        return q.past if self.history else []

    def target(self, q: Query, t: Transition, demos: list[Transition]) -> str:
        """R*_t, s_{t+1} and the flags: the text whose log-likelihood Eq. 5 maximises."""
        nxt = t.next_state
        if self.edits:
            nxt = self.grammar.diff(t.state, t.action, nxt, [d.next_state for d in demos], self.past(q))
        return formats.mexp_target(formats.Answer(t.reasoning if self.reasoning else "", nxt, t.done, t.success))

    def guessed(self, q: Query, t: Transition, demos: list[Transition]) -> bool:
        """Is the next state a page that must be written out, as neither the state nor any memory holds it?"""
        return self.edits and " " in t.next_state and t.next_state == self.grammar.diff(
            t.state, t.action, t.next_state, [d.next_state for d in demos], self.past(q))

    def read(self, q: Query, demos: list[Transition], text: str) -> Prediction:
        """The model's text -> prediction.  Raises ValueError on anything that is not one well-formed step."""
        a = formats.parse_answer(text)
        nxt = a.next
        if self.edits:
            nxt = self.grammar.patch(q.state, q.action, nxt, [d.next_state for d in demos], self.past(q))
        else:
            self.grammar.parse(nxt)
        return Prediction(a.reasoning, a.next, nxt, a.done, a.success)


Example = tuple[Query, Transition, list[Transition]]           # asked, real answer, demonstrations


def queries_of(transitions: Sequence[Transition]) -> list[Query]:
    """The query of every transition, with the states that its episode passed before it."""
    states: dict[str, list[str]] = {}
    out = []
    for t in transitions:
        seen = states.setdefault(t.episode, [])
        out.append(Query(t.task, t.task_id, t.episode, list(t.history), list(seen), t.state, t.action))
        seen.append(t.state)
    return out


def fitting(lm: llm.LM, codec: Codec, q: Query, demos: Sequence[Transition],
            most: int) -> tuple[str, list[Transition], bool]:
    """(prompt of at most ``most`` tokens, the demonstrations in it, did anything leave?), in training as at run time: the
    furthest demonstrations leave first (what is not shown is no ``[mem]``), then the oldest actions."""
    demos = list(demos)
    text = whole = codec.prompt(q, demos)
    while (demos or q.history) and len(lm.prompt(formats.MEXP_SYSTEM, text)) > most:
        if demos:
            demos.pop()
        else:
            q = replace(q, history=q.history[1:])
        text = codec.prompt(q, demos)
    return text, demos, text != whole


class ExperienceModel:
    """Eq. 4: (s_{t+1}, r_{t+1}) = M_exp(R_t | {(s_i, a_i)}, {d_j}, tau), for many episodes at once."""

    def __init__(self, lm: llm.LM | EndpointLM, codec: Codec, max_new_tokens: int = 96, temperature: float = 0.0,
                 retries: int = 1, generator: torch.Generator | None = None, remember: int = 50_000,
                 max_prompt_tokens: int = 4096):
        self.lm, self.codec = lm, codec
        self.max_new_tokens, self.temperature, self.retries = max_new_tokens, temperature, retries
        self.max_prompt_tokens = max_prompt_tokens
        self.generator = generator
        self.memo: OrderedDict[str, str] = OrderedDict()       # greedy answers by prompt: a pure function, so exact
        self.remember = remember
        self.counts = {"steps": 0, "generated": 0, "unparsed": 0, "failed": 0, "trimmed": 0}

    def predict(self, queries: Sequence[Query]) -> list[Prediction | None]:
        """One prediction per query; None where the text did not parse even after ``retries`` further samples."""
        asked = [self._prompt(q, d) for q, d in zip(queries, self.codec.retrieve(queries))]
        prompts, demos = [prompt for prompt, _ in asked], [shown for _, shown in asked]
        out: list[Prediction | None] = [None] * len(queries)
        todo = list(range(len(queries)))
        for attempt in range(1 + self.retries):
            texts = self._write([prompts[i] for i in todo], self.temperature if attempt == 0 else 1.0)
            failed = []
            for i, text in zip(todo, texts):
                try:
                    out[i] = self.codec.read(queries[i], demos[i], text)
                except ValueError:
                    failed.append(i)
            if attempt == 0:
                self.counts["unparsed"] += len(failed)
            todo = failed
            if not todo:
                break
        self.counts["steps"] += len(queries)
        self.counts["failed"] += len(todo)
        return out

    def _prompt(self, q: Query, demos: list[Transition]) -> tuple[str, list[Transition]]:
        """The prompt within ``max_prompt_tokens``, and its demonstrations; a server sees to its own limit."""
        if isinstance(self.lm, EndpointLM):
            return self.codec.prompt(q, demos), demos
        text, shown, trimmed = fitting(self.lm, self.codec, q, demos, self.max_prompt_tokens)
        self.counts["trimmed"] += trimmed
        return text, shown

    def forget(self) -> None:
        """Drop remembered answers (a batch's shape can move the last bit: a resumed run must not depend on them)."""
        self.memo.clear()

    def _write(self, prompts: list[str], temperature: float) -> list[str]:
        fresh = [p for p in dict.fromkeys(prompts) if p not in self.memo] if temperature == 0 else prompts
        texts = self._answers(fresh, temperature) if fresh else []
        self.counts["generated"] += len(texts)
        if temperature > 0:
            return texts
        self.memo.update(zip(fresh, texts))
        answers = [self.memo[p] for p in prompts]
        while len(self.memo) > self.remember:
            self.memo.popitem(last=False)
        return answers

    def _answers(self, prompts: list[str], temperature: float) -> list[str]:
        if isinstance(self.lm, EndpointLM):
            return self.lm.answers(formats.MEXP_SYSTEM, prompts, self.max_new_tokens, temperature)
        ids = [self.lm.prompt(formats.MEXP_SYSTEM, p) for p in prompts]
        samples = llm.generate(self.lm, ids, self.max_new_tokens, temperature, self.generator)
        return [self.lm.decode(s.ids) for s in samples]


class DreamEnv:
    """The synthetic MDP: N episodes side by side inside the experience model.  No real transition is ever made.

    Speaks the batched protocol of ``rollouts.rollout``.  An answer without an action changes nothing and is not asked
    about; a step that the model could not write down ends its episode as a failure, never as a success.
    ``reward_source``: ``model`` believes the model's success flag (the paper), ``rules`` asks the grammar's judge about
    the dreamed page (dynamics stay dreamed).
    """

    source = "dream"

    def __init__(self, model: ExperienceModel, max_steps: int, reward_source: str = "model", prefix: str = "dream"):
        self.model, self.max_steps, self.reward_source, self.prefix = model, max_steps, reward_source, prefix
        self.grammar = model.codec.grammar
        self.queries: list[Query] = []
        self.started = 0
        self.transitions: list[Transition] = []               # what was dreamed since ``reset``

    def begin(self, prefix: str) -> None:
        """Episodes are numbered anew, under another name."""
        self.prefix, self.started = prefix, 0

    def reset(self, tasks: Sequence[Task]) -> list[str]:
        self.queries = [Query(t.text, t.id, f"{self.prefix}/{self.started + i}", [], [], t.start, "")
                        for i, t in enumerate(tasks)]
        self.started += len(tasks)
        self.transitions = []
        return [t.start for t in tasks]

    def step(self, index: Sequence[int], actions: Sequence[str]) -> list[tuple[str, float, bool, bool, dict]]:
        for i, a in zip(index, actions):
            self.queries[i].action = a
        queries = [self.queries[i] for i in index]
        asked = iter(self.model.predict([q for q in queries if q.action != INVALID_ACTION]))
        return [self._advance(q, next(asked) if q.action != INVALID_ACTION else
                              Prediction("", "[same]", q.state, False, False)) for q in queries]

    def outcome(self, q: Query, p: Prediction | None) -> tuple[Prediction, float]:
        """The step as this dream takes it, and its graded score."""
        if p is None:                                          # nothing well-formed came: an end without success
            return Prediction("", "", q.state, True, False), 0.0
        if self.reward_source == "rules":
            done, success = self.grammar.outcome(q.task, q.state, q.action, p.next_state)
            checks = [met for *_, met in self.grammar.judge(q.task, self.grammar.decisive(q.state, p.next_state))]
            return replace(p, done=done, success=success), sum(checks) / max(1, len(checks)) if done else 0.0
        return p, float(p.success)

    def _advance(self, q: Query, predicted: Prediction | None) -> tuple[str, float, bool, bool, dict]:
        p, score = self.outcome(q, predicted)
        success = p.success
        reward = float(p.done and success)
        invalid = not p.done and p.next_state == q.state and q.action not in self.grammar.admissible(q.state)
        self.transitions.append(Transition(q.state, q.action, p.next_state, reward, p.done, success, q.task_id, q.task,
                                           q.episode, len(q.history), "dream", list(q.history), p.reasoning))
        q.past.append(q.state)
        q.history.append(q.action)
        q.state = p.next_state
        truncated = not p.done and len(q.history) >= self.max_steps
        return p.next_state, reward, p.done, truncated, {"success": success, "score": score, "invalid": invalid}


# ------------------------------------------------------------------------------------------------ training (Eq. 5)
def rename(text: str, names: dict[str, str]) -> str:
    """The text with its words replaced by ``names``; words that it lacks stay.  The inverse of a bijection undoes it."""
    return " ".join(names.get(w, w) for w in text.split(" "))


def random_names(words: Sequence[str], rng: random.Random) -> dict[str, str]:
    """A random bijection of ``words`` onto themselves."""
    others = list(words)
    rng.shuffle(others)
    return dict(zip(words, others))


# Invented words are made of these.  A tokenizer that has PIECES spells a word that it has never seen in two or three of
# them (no coda begins a syllable, so there is one way), and few words end alike: a look-up of "what follows this word"
# needs both.
ONSETS, VOWELS, CODAS = "b d f g h j k m p s t v z br gr st".split(), "aeiou", "nrlx"
OPEN = [onset + vowel for onset in ONSETS for vowel in VOWELS]
CLOSED = [syllable + coda for syllable in OPEN for coda in CODAS]
PIECES = [*(onset for onset in ONSETS if len(onset) == 2), *OPEN, *(" " + syllable for syllable in OPEN), *CLOSED]


def invented_words(count: int, rng: random.Random, measuring: bool = False, taken: set[str] = frozenset()) -> list[str]:
    """Distinct words that mean nothing and can be pronounced, none of them ``taken``.

    Training and measuring (``measuring``) draw from disjoint sets, so that a word of the one is unseen in the other.
    """
    words: dict[str, None] = {}
    while len(words) < count:
        word = rng.choice(OPEN) + (rng.choice(OPEN) if rng.random() < 0.25 else "") + rng.choice(CLOSED)
        if (zlib.crc32(word.encode()) % 10 == 0) == measuring and word not in taken:
            words[word] = None
    return list(words)


def content_words(grammar: Grammar, transitions: Sequence[Transition]) -> list[str]:
    """All words of the tasks and states that may be renamed, in a fixed order."""
    texts = {t.task for t in transitions} | {t.state for t in transitions} | {t.next_state for t in transitions}
    return sorted(set().union(*map(grammar.content_words, texts)))


def action_kind(grammar: Grammar, state: str, action: str) -> str:
    """What a step does: as the grammar names it (``move``), else page kind and action without its content words and
    numbers (``results: click ..``)."""
    if hasattr(grammar, "move"):
        return grammar.move(state, action)
    content = grammar.content_words(action)
    words = [".." if w in content or re.search(r"\d", w) else w for w in action.split(" ")]
    return f"{grammar.kind(state)}: " + " ".join(w for w, _ in itertools.groupby(words))


def rarely(kinds: Sequence[Hashable]) -> list[float]:
    """A weight per row: what is of a kind that is 100 times rarer is drawn 10 times rarer."""
    count = Counter(kinds)
    return [count[kind] ** -0.5 for kind in kinds]


class TrainingRows:
    """Rows for Eq. 5 out of real transitions; ``draw(rng)`` makes one, augmented.

    Demonstrations are retrieved as at run time, never from the same episode or task.  Rare kinds of steps and of verdicts
    are drawn by the root of their frequency.  Two augmentations need no environment: *counterfactual purchases* (a
    deciding step with a changed task, judged by the rule on the text) and *renaming* (content words replaced by a random
    bijection of themselves, in a share ``invent`` of these rows by invented words, so that they must be copied from the
    context instead of being remembered).
    """

    def __init__(self, codec: Codec, transitions: Sequence[Transition], lm: llm.LM, judged_share: float = 0.4,
                 counterfactual: float = 0.7, rename: float = 0.5, emphasis: float = 2.5, invent: float = 0.5,
                 max_prompt_tokens: int = 4096):
        self.codec, self.lm, self.invent, self.max_prompt_tokens = codec, lm, invent, max_prompt_tokens
        self.counterfactual, self.rename, self.emphasis = counterfactual, rename, emphasis
        queries = queries_of(transitions)
        demos = []
        for start in range(0, len(queries), 256):
            demos += codec.retrieve(queries[start:start + 256])
        examples = list(zip(queries, transitions, demos))
        judges = [t.done or codec.grammar.decides(t.state, t.action) for t in transitions]
        self.judged = [e for e, judge in zip(examples, judges) if judge]
        self.plain = [e for e, judge in zip(examples, judges) if not judge]
        self.judged_share = judged_share if self.judged else 0.0
        self.words = dict.fromkeys(content_words(codec.grammar, transitions))       # in a fixed order

    def texts(self) -> list[str]:
        """Every example once, as it is: what a tokenizer is trained on."""
        return [formats.join(self.codec.prompt(q, d), self.codec.target(q, t, d))
                for q, t, d in self.judged + self.plain]

    @functools.cached_property
    def judged_pool(self) -> tuple[list[Example], list[float]]:
        """``VERSIONS`` of each judged step, and where their shares end; the kind of one is what its reasoning finds.

        There are as many kinds of failures as ways to fail; successes and failures keep their shares all the same.
        """
        rng = random.Random(0)
        rows = sorted((self._version(e, rng) for e in self.judged for _ in range(VERSIONS)), key=lambda e: e[1].success)
        weights: list[float] = []
        for _, group in itertools.groupby(rows, key=lambda e: e[1].success):
            own = rarely([tuple(filter(None, map(self._found, t.reasoning.split(" ")))) for _, t, _ in group])
            weights += [w * len(own) / sum(own) for w in own]
        return rows, list(itertools.accumulate(weights))

    def _found(self, word: str) -> str:
        """The verdict or separator that a word of a reasoning is or begins with, or nothing."""
        heavy = self.codec.grammar.verdict_words
        return word if word in heavy else word[:1] if word[:1] in heavy else ""

    @functools.cached_property
    def plain_pool(self) -> tuple[list[Example], list[float]]:
        """The other steps, and where their shares end."""
        kinds = [(action_kind(self.codec.grammar, t.state, t.action), t.next_state == t.state) for _, t, _ in self.plain]
        weights = [w * (GUESSED if self.codec.guessed(*e) else 1.0) for w, e in zip(rarely(kinds), self.plain)]
        return self.plain, list(itertools.accumulate(weights))

    def draw(self, rng: random.Random) -> llm.Row:
        rows, until = self.judged_pool if rng.random() < self.judged_share else self.plain_pool
        (q, t, demos), = rng.choices(rows, cum_weights=until)
        prompt, demos, _ = fitting(self.lm, self.codec, q, demos, self.max_prompt_tokens)
        target = self.codec.target(q, t, demos)
        if rng.random() < self.rename:
            names = self._names(set(prompt.split(" ")), rng)
            if all(w in names for w in target.split(" ") if w in self.words):
                prompt, target = rename(prompt, names), rename(target, names)
        return self.row(prompt, target)

    def _names(self, shown: set[str], rng: random.Random) -> dict[str, str]:
        """New names for the content words that are ``shown``: each other's, invented ones, or some of both."""
        names = {w: name for w, name in random_names(list(self.words), rng).items() if w in shown}
        if rng.random() < self.invent:
            share = rng.choice((0.3, 1.0))
            invented = invented_words(len(names), rng, taken=self.words)
            names = {w: new if rng.random() < share else name for (w, name), new in zip(names.items(), invented)}
        return names

    def row(self, prompt: str, target: str) -> llm.Row:
        """Encode; words that decide (verdicts, separators read in a look-up, closing markers) weigh more."""
        ids: list[int] = []
        weights: list[float] = []
        for word in target.split(" ") if self.lm.spaced else [target]:
            piece = self.lm.encode(word)
            ids += piece
            weighs = self._found(word) or word in formats.FLAGS
            weights += [self.emphasis if weighs else 1.0] * len(piece)
        return llm.Row(self.lm.prompt(formats.MEXP_SYSTEM, prompt), ids + [self.lm.eos_id], weights + [1.0])

    def _version(self, example: Example, rng: random.Random) -> Example:
        """A judged step, in a share ``counterfactual`` of the cases with another task."""
        q, t, demos = example
        grammar = self.codec.grammar
        if not grammar.decides(t.state, t.action) or rng.random() >= self.counterfactual:
            return example
        task = grammar.counterfactual(q.task, t.state, t.action, t.next_state, rng)
        if task is None:
            return example
        done, success = grammar.outcome(task, t.state, t.action, t.next_state)
        reasoning = grammar.explain(task, t.state, t.action, t.next_state)
        return replace(q, task=task), replace(t, task=task, done=done, success=success, reward=float(success),
                                              reasoning=reasoning), demos


class Renamed:
    """A batch of episodes in which whole groups see other names for the content words; actions are mapped back.

    Speaks the batched protocol around a world that speaks it.  ``names``: one mapping per episode (empty: as it is),
    the same for all episodes of a group.  The policy must read what it is shown instead of what it remembers.
    """

    def __init__(self, world, names: Sequence[dict[str, str]]):
        self.world, self.names, self.source = world, names, world.source
        self.back = [{new: old for old, new in n.items()} for n in names]

    def tasks(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks as the policy reads them."""
        return [replace(t, text=rename(t.text, n)) for t, n in zip(tasks, self.names)]

    def reset(self, tasks: Sequence[Task]) -> list[str]:
        plain = [replace(t, text=rename(t.text, b)) for t, b in zip(tasks, self.back)]
        return [rename(state, n) for state, n in zip(self.world.reset(plain), self.names)]

    def step(self, index: Sequence[int], actions: Sequence[str]) -> list[tuple[str, float, bool, bool, dict]]:
        plain = [rename(a, self.back[i]) for i, a in zip(index, actions)]
        return [(rename(state, self.names[i]), *rest)
                for i, (state, *rest) in zip(index, self.world.step(index, plain))]
