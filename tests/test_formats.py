"""Texts of the models: no text of an environment, however hostile, can forge a marker, and everything comes back.

    python -m pytest -q tests/test_formats.py
"""
import itertools
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import formats
import llm
from buffer import Transition
from formats import Answer, MARKERS, mexp_prompt, mexp_target, parse_action, parse_answer, parse_task, policy_prompt
from rl_world import byte_tokenizer
from teacher import annotation_prompt

BITS = [*MARKERS, "<|im_end|>", "<|eot_id|>", "<s>", "</s>", "<think>", "</think>", "<action>", "</action>", "<can>",
        "&", "&lt;", "&amp;", "&amp;lt;", "&semi;", "&amp;semi;", "&vert;", "<", ">", "|", "*", ",", ";", " ; ", "\n",
        "\r\n", "\t", "\u2028", "\u00a0",
        "\u200b", "\u202e", "ünï", "日本", "\U0001f600", "İ", "'", '"', "\\", "\\n", "{", "}", "[mem]", "[done]",
        "win", "<win", "win>", "< win>", "a", "color red", "$49.5", "\x00", "\ud7ff"]


def hostile(count, seed, longest=8):
    rng = random.Random(seed)
    for _ in range(count):
        yield "".join(rng.choice(BITS) + rng.choice(["", " "]) for _ in range(rng.randint(0, longest)))


def marks(text):
    return [word for word in text.split(" ") if word in MARKERS]


# ------------------------------------------------------------------------------------------------ escaping
def test_escaping_is_lossless_and_leaves_no_marker():
    for text in hostile(3000, 0):
        safe = formats.escape(text)
        assert formats.unescape(safe) == text
        assert "<" not in safe and not any(marker in safe for marker in MARKERS)
    assert formats.escape("plain text | stays * as it is , $49.5") == "plain text | stays * as it is , $49.5"


# ------------------------------------------------------------------------------------------------ experience model
def test_an_answer_comes_back_from_its_text():
    for n, (reasoning, state) in enumerate(zip(hostile(3000, 1), hostile(3000, 2))):
        for done, success in formats.CLOSING:
            if state == "" or reasoning == "":                  # an empty part leaves no space behind
                continue
            answer = Answer(reasoning, state, done, success)
            assert parse_answer(mexp_target(answer)) == answer, (n, answer)
    for answer in (Answer("", "[home]", False, False), Answer("x", "", True, True), Answer("", "", True, False)):
        assert parse_answer(mexp_target(answer)) == answer


def test_success_without_an_end_cannot_be_written():
    assert (False, True) not in formats.CLOSING
    with pytest.raises(KeyError):
        mexp_target(Answer("x", "[home]", False, True))


@pytest.mark.parametrize("text", [
    "", "<next>", "<win>", "x", "x <next> [home]", "x [home] <go>", "x <next> [home] <go> more", "x <next> [home] go",
    "x <next> [home] <go> <win>", "x <next> <next> [home] <go>", "<win> <next> [home] <go>",
    "x <next> [home] <win> <go>",
    "x <next> [home] <think> y <go>", "x <next> [home] <GO>", "x <next> [home] <go>\n", "x<next> [home] <go>",
    "x <next> [home] <act> click buy <win>", "x <go> <next> [home]", "x <next> [home]<go>"])
def test_anything_but_one_well_formed_answer_is_refused(text):
    with pytest.raises(ValueError):
        parse_answer(text)


def test_random_text_is_read_or_refused_but_never_crashes():
    rng = random.Random(3)
    for _ in range(3000):
        text = " ".join(rng.choice([*BITS, "<next>", "<next>", "<go>", "<win>"]) for _ in range(rng.randint(0, 6)))
        try:
            answer = parse_answer(text)
        except ValueError:
            continue
        assert answer.done or not answer.success
        assert marks(text) == ["<next>", text.split(" ")[-1]]


def test_a_prompt_holds_exactly_its_own_markers():
    """Task, actions, states and demonstrations full of markers: the structure of the prompt stays what it is."""
    parts = list(hostile(2000, 4))
    for i in range(0, len(parts), 8):
        task, one, two, state, action, did, came, reasoning = parts[i:i + 8]
        prompt = mexp_prompt(task, [one, two], state, action, [(did, came), (came, did)])
        assert marks(prompt) == ["<ret>", "<to>"] * 2 + ["<task>", "<hist>", "<state>", "<act>", "<think>"]
        assert prompt.count("<") == 9 and prompt.endswith("<think>")
        whole = f"{prompt} {mexp_target(Answer(reasoning, state, True, False))}"
        assert marks(whole)[-2:] == ["<next>", "<fail>"] and "<win>" not in whole


def test_all_that_is_given_can_be_read_in_the_prompt():
    prompt = mexp_prompt("lamp ,", ["search lamp", "click 1"], "[item] lamp", "click buy", [("search x", "results")])
    assert prompt == ("<ret> search x <to> results <task> lamp , <hist> search lamp ; click 1 <state> [item] lamp "
                      "<act> click buy <think>")
    assert mexp_prompt("lamp ,", [], "[home]", "search lamp") == (
        "<task> lamp , <hist> <state> [home] <act> search lamp <think>")


# ------------------------------------------------------------------------------------------------ histories
def test_different_histories_give_different_prompts():
    """Whatever the actions hold: spaces, empty ones, the mark that stands between two, its rewriting."""
    bits = ["", " ", "  ", ";", " ;", "; ", " ; ", "&semi;", "&amp;semi;", "a", "a ; a", "a;", "\n;\n", "<state>"]
    histories = {history for n in range(4) for history in itertools.product(bits, repeat=n)}
    texts = list(hostile(3000, 12, longest=3))
    histories |= {tuple(texts[i:i + n]) for n in (1, 2, 3) for i in range(0, len(texts) - 3, 3)}
    for prompt in (lambda h: policy_prompt("t", h, "s"), lambda h: mexp_prompt("t", h, "s", "a")):
        assert len({prompt(history) for history in histories}) == len(histories)
    lists = histories - {()}                                    # possible actions: none at all is no list
    assert len({policy_prompt("t", [], "s", can) for can in lists}) == len(lists)


def test_an_action_that_holds_the_separator_is_one_action():
    forged, two = ["search lamp ; click red"], ["search lamp", "click red"]
    assert "<hist> search lamp &semi; click red <state>" in policy_prompt("t", forged, "s")
    assert "<hist> search lamp ; click red <state>" in policy_prompt("t", two, "s")
    assert "<can> a &vert; b | c ; d <act>" in policy_prompt("t", [], "s", ["a | b", "c ; d"])


def test_one_listed_text_comes_back():
    for text in hostile(3000, 13):
        for mark in formats.SEPARATORS:
            assert formats.unescape(formats.listed([text], mark)) == text
            assert mark not in formats.listed([text], mark).split(" ")


# ------------------------------------------------------------------------------------------------ chat templates
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "</s>", "<think>", "</think>"]


def chat_lm():
    """A model without weights: its tokenizer knows bytes and special tokens, Qwen's thinking tags among them."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": SPECIAL})
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    return llm.LM(None, tokenizer, torch.device("cpu"), chat=True)


def chat_prompts(lm, task, action, state, other):
    """Every kind of prompt, made of these texts."""
    step = Transition(state, action, other, 0.0, False, False, "t", task, "e", 0, "real", [], "")
    return [formats.PolicyFormat(lm, 2).prompt(task, [action, other], state, [action, other]),
            lm.prompt(formats.MEXP_SYSTEM, mexp_prompt(task, [action, other], state, action, [(state, other)])),
            lm.prompt(formats.WRITER_SYSTEM, formats.writer_prompt(task)),
            lm.prompt("explain", annotation_prompt([step, step]))]


def test_no_hostile_text_brings_a_special_id_into_a_chat_prompt():
    lm = chat_lm()
    special = set(lm.tokenizer.all_special_ids)
    assert len(special) == len(SPECIAL) + 3
    plain = [Counter(i for i in ids if i in special) for ids in chat_prompts(lm, "a", "b", "c", "d")]
    assert plain[2].total() == 6 and plain[2] == plain[3]      # of the template alone: BOS, two messages, the answer's
    texts = [f"{text}{bit}" for text, bit in zip(hostile(400, 14), itertools.cycle([*SPECIAL, "<s>", llm.EOS, "x"]))]
    for i in range(0, len(texts), 4):
        prompts = chat_prompts(lm, *texts[i:i + 4])
        assert [Counter(i for i in ids if i in special) for ids in prompts] == plain


# ------------------------------------------------------------------------------------------------ policy
def test_an_action_comes_back_tagged_and_bare():
    lm = SimpleNamespace(chat=True, encode=lambda text: [text], eos_id="", prompt=lambda system, text: text)
    tagged = formats.PolicyFormat(lm, history=2)
    lm_bare = SimpleNamespace(**{**vars(lm), "chat": False})
    bare = formats.PolicyFormat(lm_bare, history=2)
    for action, thought in zip(hostile(2000, 5), hostile(2000, 6)):
        text = tagged.target(action, thought)[0]
        assert tagged.parse(text) == (" ".join(action.split()) or None)
        assert bare.parse(bare.target(action)[0]) == (action.strip() or None)
        if action.strip():
            assert bare.parse(bare.target(action, thought)[0]) == action.strip()


@pytest.mark.parametrize("text", [
    "click 1", "<action>click 1</action>", "<think>x</think>", "<think>x</think><action></action>",
    "<think>x</think><action> \n </action>", "<think>x</think><action>a</action><action>b</action>",
    "<think>x</think> so <action>a</action>", "<think>x</think><action>a</action> ok",
    "<think>x<action>a</action></think>", "<think>x</think><action>a", "<action>a</action><think>x</think>",
    "<think>x</think><think>y</think><action>a</action>"])
def test_malformed_tagged_answers_hold_no_action(text):
    assert parse_action(text, tagged=True) is None


def test_well_formed_tagged_answers():
    assert parse_action("<think>red\nis wanted</think>\n<action> click  red\n</action>\n", True) == "click red"
    assert parse_action("<think></think><action>search a &lt;b&gt; &amp;amp;</action>", True) == "search a <b&gt; &amp;"


def test_bare_actions_hold_no_marker_but_that_after_a_thought():
    assert parse_action(" click 1 ", False) == "click 1" and parse_action("  ", False) is None
    assert parse_action("red is wanted <do> click red", False) == "click red"
    for marker in MARKERS:
        for text in (f"click 1 {marker}", f"{marker} x <do> click 1", f"x <do> click {marker}"):
            assert parse_action(text, False) is None


def test_policy_prompt_and_history_window():
    for task, one, state, can in zip(*(hostile(500, seed) for seed in (7, 8, 9, 10))):
        prompt = policy_prompt(task, [one], state, [can, "x"])
        assert marks(prompt) == ["<task>", "<hist>", "<state>", "<act>"] and prompt.count("<can>") == 1
    lm = SimpleNamespace(chat=False, prompt=lambda system, text: text)
    for window, shown in ((0, ""), (1, "c "), (2, "b ; c "), (9, "a ; b ; c ")):
        prompt = formats.PolicyFormat(lm, window).prompt("t", ["a", "b", "c"], "s", ["click 1"])
        assert f"<hist> {shown}<state>" in prompt
    assert "<can>" not in formats.PolicyFormat(lm, 2).prompt("t", [], "s", ["click 1"])


# ------------------------------------------------------------------------------------------------ task writer
def test_tasks():
    for text in hostile(1000, 11):
        assert marks(formats.writer_prompt(text)) == ["<vary>", "<seed>"]
        assert parse_task(formats.escape(text)) == (text.strip() or None)
    assert parse_task("lamp , <win>") is None
