"""The experience model: strict reading, failure never becomes success, every switch does what it says, honest rows.

    python -m pytest -q tests/test_mexp.py
"""
import random
import warnings
import zlib
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import gymnasium
import pytest
import small_run
import torch
from gymnasium.utils.env_checker import check_env

import config
import dreamgym
import envs
import fidelity
import formats
import gym_env
import llm
import mexp
from buffer import HashEncoder, ReplayBuffer, Transition
from envs import Task
from envs.webshop_text import KINDS, WebShopGrammar, parse, render, Page
from llm import Sample
from mexp import (Codec, DreamEnv, ExperienceModel, Query, Renamed, TrainingRows, action_kind, invented_words,
                  queries_of, rename)
from rollouts import INVALID_ACTION

WORLD = envs.open_world(SimpleNamespace(name="webshop", data=None, human_goals=False, catalog_seed=0, max_steps=8))
TASKS = WORLD.tasks["train"]


def collect(grammar, count=60, seed=0):
    rng, env, out = random.Random(seed), WORLD.make(), []
    for n in range(count):
        name = ("expert", "noisy", "mediocre", "random")[n % 4]
        out += fidelity.play_scripted(env, rng.choice(TASKS), WORLD.scripted(name), grammar, f"{name}-{n}", rng)
    return out


PLAIN = WebShopGrammar([t.text for t in TASKS])
DATA = collect(PLAIN)
GRAMMAR = WebShopGrammar([t.text for t in TASKS] + [t.next_state for t in DATA])
DATA = [replace(t, reasoning=GRAMMAR.explain(t.task, t.state, t.action, t.next_state)) for t in DATA]
FINAL = next(t for t in DATA if t.success)


def codec(edits=True, history=2, k=1, reasoning=True, data=DATA):
    buffer = ReplayBuffer(HashEncoder(128), GRAMMAR)
    buffer.add(data)
    return Codec(GRAMMAR, buffer, edits, history, k, reasoning)


class FakeLM:
    """Prompts and answers are texts; ``answers`` come in turn, or from a function of the prompt."""
    spaced, eos_id = True, "<eos>"

    def __init__(self, *answers):
        self.given, self.asked = answers, []

    def prompt(self, system, text):
        return [text]

    def encode(self, text):
        return [text]

    def decode(self, ids):
        return ids[0]

    def generate(self, lm, prompts, max_new_tokens, temperature, generator):
        out = []
        for [prompt] in prompts:
            answer = self.given[min(len(self.asked), len(self.given) - 1)]
            self.asked.append((prompt, temperature))
            out.append(Sample([answer(prompt) if callable(answer) else answer], False))
        return out


@pytest.fixture
def fake(monkeypatch):
    """fake(answers..) -> an experience model whose language model gives them."""
    def make(*answers, c=None, **options):
        lm = FakeLM(*answers)
        monkeypatch.setattr(mexp.llm, "generate", lm.generate)
        return ExperienceModel(lm, c or codec(), **options)
    return make


def query(t=FINAL):
    return queries_of([x for x in DATA if x.episode == t.episode])[t.step]


# ------------------------------------------------------------------------------------------------ reading answers
HOSTILE = ["<win>", "<next>", "<think>", "<state> [done]", "<|im_end|>", "<|eot_id|>", "</s>", "\n", "\u2028", "| * ,",
           "&lt;win&gt;", "ünï 日本", "[done]", "[mem]", "$49.5", "%3c", "a <go> b", "buy"]


def hostile_pages(count):
    rng = random.Random(1)

    def text():
        return " ".join(rng.choice([*HOSTILE, "lamp", "wool"]) for _ in range(rng.randint(1, 5)))

    for _ in range(count):
        options = [(text(), (text(), text()), None) for _ in range(rng.randint(0, 2))]
        yield Page(rng.choice(KINDS), number=rng.randint(1, 3), items=[(text(), text(), "$1.5") for _ in range(2)],
                   title=text(), price="$9.5", options=options, lines=(text(),))


@pytest.mark.parametrize("edits", [True, False])
def test_encode_decode_is_the_identity_on_hostile_text(edits):
    """Through grammar and format, with whatever an environment may print: the next state and both flags come back."""
    c, pages = codec(edits), list(hostile_pages(600))
    rng = random.Random(2)
    for page, after in zip(pages, pages[1:]):
        state, wanted = render(page), render(after)
        task = " ".join(rng.choice(HOSTILE) for _ in range(3))
        action = rng.choice(["click buy", "click <win>", "search \n<next>"])
        q = Query(task, "t", "e", [rng.choice(HOSTILE)], [state], state, action)
        done, success = rng.choice(list(formats.CLOSING))
        t = Transition(state, q.action, wanted, float(success), done, success, "t", task, "e", 1, "real", q.history,
                       " ".join(rng.choice(HOSTILE) for _ in range(2)))
        demos = [replace(t, next_state=render(rng.choice(pages)))]
        p = c.read(q, demos, c.target(q, t, demos))
        assert (p.next_state, p.done, p.success, p.reasoning) == (wanted, done, success, t.reasoning)
        assert parse(p.next_state) == after
        prompt = c.prompt(q, demos)
        marks = [w for w in prompt.split(" ") if w in formats.MARKERS]
        assert marks == ["<ret>", "<to>", "<task>", "<hist>", "<state>", "<act>", "<think>"]


@pytest.mark.parametrize("edits", [True, False])
def test_every_real_transition_comes_back(edits):
    c = codec(edits)
    queries = queries_of(DATA)
    lossy = 0
    for q, t, demos in zip(queries, DATA, c.retrieve(queries)):
        p = c.read(q, demos, c.target(q, t, demos))
        assert (p.done, p.success, p.reasoning) == (t.done, t.success, t.reasoning)
        lossy += p.next_state != t.next_state
        assert p.next_state == t.next_state or GRAMMAR.kind(t.next_state) == "results"    # see WebShopGrammar.diff
    assert lossy == 0 or edits


@pytest.mark.parametrize("text", [
    "", "what?", "ok <next> [done]", "ok <next> [done] <win> <win>", "<win>", "ok <next> [nowhere] <go>",
    "ok <next> [pick] mauve <go>", "ok <next> [mem] <go>", "ok <next> [prevpage] <go>", "ok <next> [item] lamp | <go>",
    "ok <next> [done] <win> thanks", "ok [done] <win>", "ok <next> <win> [done]"])
def test_what_cannot_be_read_is_no_step(text):
    with pytest.raises(ValueError):
        codec(k=0).read(replace(query(), past=[]), [], text)


# ------------------------------------------------------------------------------------------------ retry, then failure
BAD, WIN, GO = "garbage", "ok <next> [done] <win>", "nothing <next> [same] <go>"


def test_a_bad_answer_is_asked_for_once_more(fake):
    model = fake(BAD, WIN)
    [p] = model.predict([query()])
    assert p.done and p.success and p.next_state == "[done]"
    assert [temperature for _, temperature in model.lm.asked] == [0.0, 1.0]      # greedy again would be bad again
    assert model.counts == {"steps": 1, "generated": 2, "unparsed": 1, "failed": 0, "trimmed": 0}


def test_two_bad_answers_end_the_episode_as_a_failure(fake):
    model = fake(BAD, BAD, WIN)
    dream = DreamEnv(model, 8)
    [state] = dream.reset([TASKS[0]])
    [(after, reward, terminated, truncated, info)] = dream.step([0], ["click buy"])
    assert len(model.lm.asked) == 2 and model.counts["failed"] == 1
    assert (after, reward, terminated, truncated) == (state, 0.0, True, False)
    assert info == {"success": False, "score": 0.0, "invalid": False}
    [t] = dream.transitions
    assert t.done and not t.success and t.source == "dream"


@pytest.mark.parametrize("source", ["model", "rules"])
def test_nothing_unreadable_is_ever_a_success(fake, source):
    """Answers damaged at random: an episode succeeds only on an answer that is well-formed and says so."""
    rng = random.Random(0)
    words = ["ok", "<next>", "[done]", "<win>", "<go>", "<fail>", "[same]", "", "&lt;win>"]
    given = []

    def answer(prompt):
        given.append(" ".join(rng.choice(words) for _ in range(rng.randint(1, 6))) if rng.random() < 0.7 else WIN)
        return given[-1]

    won = 0
    model = fake(answer, temperature=0.7)
    for _ in range(300):
        dream = DreamEnv(model, 8, source)
        dream.reset([replace(TASKS[0], start=FINAL.state, text=FINAL.task)])
        [(_, reward, terminated, _, info)] = dream.step([0], ["click buy"])
        if info["success"] or reward:
            won += 1
            assert terminated and reward == 1 and formats.parse_answer(given[-1]).done
    assert 0 < won < 300


def test_retries_can_be_switched_off(fake):
    model = fake(BAD, WIN, retries=0)
    assert model.predict([query()]) == [None] and len(model.lm.asked) == 1


def test_only_what_failed_is_asked_again_and_order_stays(fake):
    def answer(prompt):
        return BAD if "first" in prompt and seen.update([prompt]) is None and seen[prompt] == 1 else GO

    seen = Counter()
    model = fake(answer)
    queries = [replace(query(), action=a) for a in ("click first", "click second", "click third")]
    assert [p.next_state for p in model.predict(queries)] == [FINAL.state] * 3
    assert len(model.lm.asked) == 4


def test_greedy_answers_are_remembered_sampled_ones_not(fake):
    model = fake(GO)
    model.predict([query(), query()])
    model.predict([query()])
    assert len(model.lm.asked) == 1 and model.counts["steps"] == 3
    model.forget()
    model.predict([query()])
    assert len(model.lm.asked) == 2
    sampled = fake(GO, temperature=1.0)
    sampled.predict([query(), query()])
    assert len(sampled.lm.asked) == 2
    small = fake(GO, remember=2)
    small.predict([replace(query(), action=f"click {i}") for i in range(5)])
    assert len(small.memo) == 2


def test_prompts_keep_their_limit(fake):
    """The furthest demonstration leaves first, then the oldest actions; state and action stay."""
    q = query(next(t for t in DATA if len(t.history) > 1))
    model = fake("")
    model.lm.prompt = lambda system, text: list(text)
    [demos] = model.codec.retrieve([q])
    whole = model.codec.prompt(q, demos)
    for limit, left, actions in ((len(whole), 1, 2), (len(whole) - 1, 0, 2), (1, 0, 0)):
        model.max_prompt_tokens = limit
        given, shown = model._prompt(q, demos)
        assert len(shown) == left and q.state in given and q.action in given
        assert given == model.codec.prompt(replace(q, history=q.history[len(q.history) - actions:]), shown)
    assert model.counts["trimmed"] == 2


def test_prompts_keep_their_limit_in_training_too():
    """Rows are cut as questions are: what is not shown is no ``[mem]`` in the answer either."""
    lm = FakeLM()
    lm.prompt = lambda system, text: text.split(" ")
    rows = TrainingRows(codec(), DATA, lm, rename=0.0, counterfactual=0.0, max_prompt_tokens=40)
    drawn = [rows.draw(random.Random(i)) for i in range(200)]
    shown = [row for row in drawn if row.prompt[0] == "<ret>"]
    assert 0 < len(shown) < len(drawn) and all(len(row.prompt) <= 40 for row in shown)
    assert not any("[mem]" in row.target for row in drawn if row.prompt[0] != "<ret>")


# ------------------------------------------------------------------------------------------------ switches
def test_history_switch():
    q = replace(query(), history=["search a", "click 1", "click red"])
    texts = [codec(history=h).prompt(q, []) for h in (0, 1, 2)]
    assert "<hist> <state>" in texts[0] and "<hist> click red <state>" in texts[1]
    assert "<hist> click 1 ; click red <state>" in texts[2]
    back = next(t for t in DATA if t.action == "click prev" and t.next_state != t.state and t.step > 1)
    q = query(back)
    assert codec(history=2).target(q, back, []).split(" <next> ")[1].startswith("[prevpage]")
    assert "[prevpage]" not in codec(history=0).target(q, back, [])            # the pages passed are history, too


def test_retrieval_switch():
    opened = next(t for t in DATA if t.next_state.startswith("[item]") and t.state.startswith("[results]")
                  and codec().retrieve([query(t)])[0] and codec().retrieve([query(t)])[0][0].next_state == t.next_state)
    q = query(opened)
    for k in (0, 1, 3):
        [demos] = codec(k=k).retrieve([q])
        assert len(demos) <= k and codec(k=k).prompt(q, demos).count("<ret>") == len(demos)
    [demos] = codec().retrieve([q])
    assert "[mem]" in codec().target(q, opened, demos) and "[mem]" not in codec(k=0).target(q, opened, [])
    assert codec(edits=False).prompt(q, demos).count(demos[0].next_state) == 1      # whole pages without edits


def test_reasoning_switch():
    on, off = codec().target(query(), FINAL, []), codec(reasoning=False).target(query(), FINAL, [])
    assert on == f"{FINAL.reasoning} <next> [done] <win>" and off == "<next> [done] <win>"
    p = codec(reasoning=False).read(query(), [], off)
    assert p.success and p.reasoning == ""


def test_edits_switch():
    picked = next(t for t in DATA if " * " in t.next_state and t.next_state != t.state and t.state.startswith("[item]"))
    edit, whole = (codec(edits).target(query(picked), picked, []) for edits in (True, False))
    assert edit == f"{picked.reasoning} <next> [pick] {picked.action[6:]} <go>"
    assert whole == f"{picked.reasoning} <next> {picked.next_state} <go>"


# ------------------------------------------------------------------------------------------------ training rows
def test_demonstrations_of_rows_are_those_of_run_time_and_never_of_the_same_task():
    c = codec(k=3)
    rows = TrainingRows(c, DATA, FakeLM())
    examples = rows.judged + rows.plain
    assert len(examples) == len(DATA) and any(demos for *_, demos in examples)
    for q, t, demos in examples:
        assert not any(d.task_id == t.task_id or d.episode == t.episode for d in demos)
    at_run_time = c.retrieve([q for q, *_ in examples])
    assert at_run_time == [demos for *_, demos in examples]


def drawn(count=300, **options):
    rows = TrainingRows(codec(), DATA, FakeLM(), **options)
    rng = random.Random(0)
    return rows, [(row.prompt[0], " ".join(row.target[:-1])) for row in (rows.draw(rng) for _ in range(count))]


def verdict(prompt, target):
    """(label, what the rule says about task and page of the prompt) of a purchase."""
    task = prompt.split("<task> ")[1].split(" <hist>")[0]
    state = prompt.split("<state> ")[1].split(" <act>")[0]
    checks = GRAMMAR.judge(formats.unescape(task), formats.unescape(state))
    return target.endswith("<win>"), all(met for *_, met in checks)


def test_shares_of_rows():
    _, texts = drawn(judged_share=1.0, counterfactual=0.0, rename=0.0)
    assert all("[done]" in target for _, target in texts)
    _, texts = drawn(judged_share=0.0, rename=0.0)
    assert not any("[done]" in target for _, target in texts)


def weights_of(pool):
    return [b - a for a, b in zip([0.0, *pool[1]], pool[1])]


def test_rare_kinds_of_steps_are_drawn_by_the_root_of_their_frequency_and_guessed_pages_less():
    rows = TrainingRows(codec(), DATA, FakeLM(), judged_share=0.0, counterfactual=0.0, rename=0.0)
    weight = dict(zip(map(id, rows.plain), weights_of(rows.plain_pool)))
    kinds: dict[tuple, list] = {}
    for example in rows.plain:
        q, t, demos = example
        guessed = rows.codec.guessed(*example)
        assert guessed == (rows.codec.target(q, t, demos).count(t.next_state) == 1 and " " in t.next_state)
        kinds.setdefault((action_kind(GRAMMAR, t.state, t.action), t.next_state == t.state), []).append(
            weight[id(example)] / (0.3 if guessed else 1.0))
    assert any(map(rows.codec.guessed, *zip(*rows.plain))) and len(kinds) > 5
    for weights in kinds.values():
        assert weights == pytest.approx([len(weights) ** -0.5] * len(weights))
    assert not any(codec(edits=False).guessed(*example) for example in rows.plain)


def test_rare_ways_to_succeed_or_fail_are_drawn_by_the_root_of_their_frequency():
    """Successes among themselves and failures among themselves: their shares stay what they are."""
    rows = TrainingRows(codec(), DATA, FakeLM())
    pool, weights = rows.judged_pool[0], weights_of(rows.judged_pool)
    assert sum(weights) == pytest.approx(len(pool)) and len(pool) == mexp.VERSIONS * len(rows.judged)
    for success in (True, False):
        own = [(" ".join(w for w in t.reasoning.split(" ") if w in GRAMMAR.verdict_words), weight)
               for (_, t, _), weight in zip(pool, weights) if t.success == success]
        assert sum(weight for _, weight in own) == pytest.approx(len(own))
        number = Counter(kind for kind, _ in own)
        assert len(number) > 2 and len({round(weight * number[kind] ** 0.5, 9) for kind, weight in own}) == 1


def test_plain_rows_are_the_data_itself():
    rows, texts = drawn(counterfactual=0.0, rename=0.0)
    assert rows.judged and all(version in rows.judged for version in rows.judged_pool[0])
    assert {f"{prompt} {target}" for prompt, target in texts} <= set(rows.texts())
    assert len(rows.texts()) == len(DATA)


def test_counterfactual_purchases_have_the_label_of_the_rule():
    _, texts = drawn(judged_share=1.0, counterfactual=1.0, rename=0.0)
    known = {t.task for t in DATA}
    assert sum(prompt.split("<task> ")[1].split(" <hist>")[0] not in known for prompt, _ in texts) > 200
    labels = [verdict(*text) for text in texts]
    assert all(label == rule for label, rule in labels)
    assert 0.3 < sum(label for label, _ in labels) / len(labels) < 0.7          # both kinds, about as many


@pytest.mark.parametrize("invent", [0.0, 1.0])
def test_renamed_rows_are_consistent(invent):
    """One name per word over prompt and target: what the rule says of the renamed page is still the label."""
    rows, texts = drawn(judged_share=1.0, counterfactual=1.0, rename=1.0, invent=invent)
    assert all(label == rule for label, rule in map(lambda text: verdict(*text), texts))
    known = {*rows.words, *(w for t in TASKS for w in GRAMMAR.content_words(t.text))}
    assert bool({w for prompt, _ in texts for w in GRAMMAR.content_words(prompt)} - known) == bool(invent)


def test_a_row_is_renamed_only_if_the_prompt_holds_all_words_of_the_target():
    rows, texts = drawn(count=400, judged_share=0.0, rename=1.0, invent=1.0)
    for prompt, target in texts:
        shown = set(prompt.split(" "))
        if any(w in rows.words for w in target.split(" ") if w not in shown):
            assert not any(w not in rows.words for w in GRAMMAR.content_words(prompt.split("<state>")[0]) - {"can"})


def test_verdicts_weigh_more_and_the_end_is_taught():
    rows = TrainingRows(codec(), DATA, FakeLM(), emphasis=2.5)
    row = rows.row("p", "lamp | ok red * no <next> [done] <fail>")
    assert row.emphasis == [1, 2.5, 2.5, 1, 2.5, 2.5, 1, 1, 2.5, 1] and row.target[-1] == "<eos>"


# ------------------------------------------------------------------------------------------------ invented words
def test_invented_words():
    training = invented_words(3000, random.Random(0))
    measuring = invented_words(300, random.Random(0), measuring=True)
    assert len(set(training)) == 3000 and not set(training) & set(measuring)
    assert measuring == invented_words(300, random.Random(0), measuring=True)
    assert not set(invented_words(500, random.Random(1), taken=set(training))) & set(training)
    assert GRAMMAR.content_words(" ".join(training)) == set(training)           # never a word with a meaning of its own


# ------------------------------------------------------------------------------------------------ the dream
def test_a_dream_makes_valid_transitions_and_is_truncated(fake):
    dream = DreamEnv(fake(GO), 3, prefix="d")
    [state] = dream.reset(TASKS[:1])
    results = [dream.step([0], [f"click {i}"])[0] for i in range(3)]
    assert [r[3] for r in results] == [False, False, True] and all(r[4]["invalid"] and not r[2] for r in results)
    for i, t in enumerate(dream.transitions):
        assert Transition.from_json(t.to_json()) == t and t.step == i and t.history == [f"click {j}" for j in range(i)]
        assert t.episode == "d/0" and t.task_id == TASKS[0].id and t.source == "dream"
    dream.reset(TASKS[:2])
    assert dream.transitions == [] and [q.episode for q in dream.queries] == ["d/1", "d/2"]


def test_a_dream_never_touches_the_real_environment(fake):
    dream = DreamEnv(fake(GO), 3)
    dream.reset([Task("x", "lamp ,", "train", start="[home]")])                 # no goal: the shop would refuse it
    assert dream.step([0], ["search lamp"])[0][0] == "[home]"


@pytest.mark.parametrize("answer, reward", [(WIN, 0.0), ("no <next> [done] <fail>", 1.0)])
def test_rules_can_judge_the_dreamed_page(fake, answer, reward):
    """The flag of the model and the rule on its page disagree in both cases; ``reward_source`` says who is believed."""
    lost = next(t.state for t in DATA if t.done and not t.success and t.task_id != FINAL.task_id)
    start = FINAL.state if reward else lost
    task = replace(TASKS[0], text=FINAL.task, start=start)
    for source, wanted in (("rules", reward), ("model", 1 - reward)):
        dream = DreamEnv(fake(answer), 8, source)
        dream.reset([task])
        [(_, got, terminated, _, info)] = dream.step([0], ["click buy"])
        assert terminated and got == wanted == float(info["success"])
        assert source == "model" or info["score"] == pytest.approx(
            sum(met for *_, met in GRAMMAR.judge(task.text, start)) / len(GRAMMAR.judge(task.text, start)))


def test_episodes_in_one_batch_do_not_mix(fake):
    def answer(prompt):
        return f"open <next> [description] {prompt.split('<act> ')[1].split(' ')[1]} | <go>"

    dream = DreamEnv(fake(answer), 8)
    dream.reset(TASKS[:3])
    dream.step([0, 2], ["click a", "click c"])
    dream.step([1, 2], ["click b", "click d"])
    assert [q.history for q in dream.queries] == [["click a"], ["click b"], ["click c", "click d"]]
    assert [q.state for q in dream.queries] == [f"[description] {x} |" for x in "abd"]


def test_what_was_no_answer_is_not_remembered(fake):
    """A step that the model could not write down and one that it was never asked about are no experience."""
    dream = DreamEnv(fake(lambda prompt: "nonsense" if "click 1" in prompt else "open <next> [description] lamp | <go>"), 8)
    dream.reset(TASKS[:3])
    dream.step([0, 1, 2], ["click 1", INVALID_ACTION, "click 2"])
    assert len(dream.transitions) == 3                          # all are on record ..
    memory = ReplayBuffer(HashEncoder(128), GRAMMAR, synthetic_share=1.0)
    dreamgym.RLJob.remember(SimpleNamespace(buffer=memory), dream.transitions)
    assert [t.action for t in memory.rows()] == ["click 2"]     # .. one is remembered
    assert memory.counts["rejected: the episode cannot end or go on here"] == 1


# ------------------------------------------------------------------------------------------------ renamed batches
def test_renamed_batch_maps_states_and_actions(fake):
    dream = DreamEnv(fake(lambda prompt: "open <next> [description] wool lamp | <go>"), 8)
    world = Renamed(dream, [{"wool": "lamp", "lamp": "wool"}, {}])
    tasks = world.tasks([Task("a", "wool ,", "train", start="[home]"), Task("b", "wool ,", "train", start="[home]")])
    assert [t.text for t in tasks] == ["lamp ,", "wool ,"] and world.source == "dream"
    world.reset(tasks)
    results = world.step([0, 1], ["search lamp", "search lamp"])
    assert [r[0] for r in results] == ["[description] lamp wool |", "[description] wool lamp |"]
    assert [q.history for q in dream.queries] == [["search wool"], ["search lamp"]]
    assert [q.task for q in dream.queries] == ["wool ,", "wool ,"]


def test_rename_is_undone_by_its_inverse():
    names = mexp.random_names(sorted(GRAMMAR.content_words(FINAL.state)), random.Random(0))
    assert rename(rename(FINAL.state, names), {new: old for old, new in names.items()}) == FINAL.state


# ------------------------------------------------------------------------------------------------ a real tiny model
def test_an_untrained_model_dreams_failures():
    """The whole path with a model that knows nothing yet: nothing breaks, and nothing is won."""
    c = codec()
    tokenizer = llm.train_tokenizer(TrainingRows(c, DATA, None).texts()[:200], 600)
    lm = llm.tiny_lm(tokenizer, layers=1, width=32, heads=2, mlp=32, constructed=False)
    dream = DreamEnv(ExperienceModel(lm, c, max_new_tokens=12), 8)
    dream.reset(TASKS[:6])
    results = dream.step(range(6), ["search lamp", "click 1", "click <win>", "", "\n", "click buy"])
    assert all(terminated and not reward and not info["success"] for _, reward, terminated, _, info in results)
    assert dream.model.counts["failed"] == 6


# ------------------------------------------------------------------------------------------------ Gymnasium
def test_gymnasium(fake):
    env = gym_env.TextEnv(DreamEnv(fake(lambda prompt: WIN if "click buy" in prompt else GO), 3), TASKS[:5], GRAMMAR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)
    observation, info = env.reset(seed=1, options={"task": 2})
    assert observation == {"task": TASKS[2].text, "state": "[home]"} and info["admissible"] == ["search <words>"]
    assert env.step("nonsense")[4]["invalid"]
    observation, reward, terminated, truncated, info = env.step("click buy")
    assert (observation["state"], reward, terminated, truncated) == ("[done]", 1.0, True, False) and info["success"]
    with pytest.raises(RuntimeError, match="reset"):
        env.step("click buy")
    assert isinstance(env, gymnasium.Env) and "ünï \u2028" in env.action_space


def test_gymnasium_seeds_a_sampled_dream(fake):
    model = fake(lambda prompt: GO, temperature=1.0, generator=torch.Generator())
    env = gym_env.TextEnv(DreamEnv(model, 3), TASKS[:5], GRAMMAR)
    drawn = []
    for seed in (3, 3, 4):
        env.reset(seed=seed)
        drawn.append((env.task.id, torch.rand((), generator=model.generator).item()))
    assert drawn[0] == drawn[1] != drawn[2]


def test_gymnasium_opens_the_dream_of_a_run_and_seeds_it(monkeypatch, tmp_path):
    env = gym_env.open_run(small_run.make(tmp_path / "run", 0, "mexp.temperature=1"))
    observation, info = env.reset(seed=0)
    assert observation["state"] == env.task.start and env.task.split == "train" and info["admissible"]
    assert not env.step(info["admissible"][0].replace("<words>", "lamp"))[4]["success"]     # an untrained model
    with pytest.raises(config.UserError):
        gym_env.open_run(tmp_path)

    def page(self, q, demos, text):                            # whatever was sampled decides which product is found
        return mexp.Prediction("", text, f"[results] p1 1 s{zlib.crc32(text.encode()):010} lamp | $1.5", False, False)

    def episode(seed):
        task = env.reset(seed=seed)[0]["task"]
        return [task, *(env.step("search lamp")[0]["state"] for _ in range(3))]

    monkeypatch.setattr(Codec, "read", page)
    first, again, other, unseeded = (episode(seed) for seed in (3, 3, 4, None))
    assert first == again and not {*first[1:]} & {*other[1:], *unseeded[1:]}
    assert episode(4)[1:] == other[1:] and episode(None) == unseeded           # which follows from the last seed
