"""The search engine: words, stems, one-byte lengths and scores, each against Lucene's published rules."""
import math
import random
from collections import Counter

import numpy as np
import pytest

from envs import bm25
from envs.bm25 import BM25, analyze, decode_length, encode_length, stem, words

# ------------------------------------------------------------------------------------------------------------ words
WORDS = {
    # inner marks join two letters or two digits, each its own kind
    "a:b": ["a:b"], "1,000": ["1,000"], "3.5": ["3.5"], "x.y": ["x.y"], "don't": ["don't"], "foo_bar": ["foo_bar"],
    "10x50": ["10x50"], "5'10": ["5'10"], "1;2": ["1;2"], "x.com": ["x.com"], "_x_": ["_x_"], "U.S.A.": ["U.S.A"],
    "1:2": ["1", "2"], "a;b": ["a", "b"], "a,b": ["a", "b"], "3,a": ["3", "a"], "3.a": ["3", "a"], "a.3": ["a", "3"],
    "a..b": ["a", "b"], "a_.b": ["a_", "b"], "'a'": ["a"], "1.": ["1"],
    # everything else splits
    "AT&T": ["AT", "T"], "c++": ["c"], "wi-fi": ["wi", "fi"], '28" x 28"': ["28", "x", "28"],
    "a/b%c$d+e": list("abcde"),
    "__": [], "": [], " \n\t": [], "?!": [],
}
UNICODE_WORDS = {
    "❤❤✿★": ["❤", "❤", "★"], "red★shoe": ["red", "★", "shoe"], "é.è": ["é.è"], "l’été": ["l’été"], "a·b": ["a·b"],
    "naïve": ["naïve"], "e\u0301a": ["e\u0301a"], "a\u00adb": ["a\u00adb"], "３５": ["３５"],
    "漢字かな": ["漢", "字", "か", "な"], "カタカナ": ["カタカナ"], "한국어": ["한국어"], "ไทย": ["ไทย"],
    "®x™": ["®", "x", "™"], "❤\ufe0f❤": ["❤\ufe0f", "❤"], "👍🏽": ["👍🏽"], "🏽": ["🏽"],
    "👨\u200d👩\u200d👧👍": ["👨\u200d👩\u200d👧", "👍"],
    "🇩🇪🇫🇷": ["🇩🇪", "🇫🇷"], "🇩": [], "#\ufe0f\u20e3": ["#\ufe0f\u20e3"], "1\ufe0f\u20e3": ["1\ufe0f\u20e3"], "–—“”": [],
}


@pytest.mark.parametrize("text", [*WORDS, *UNICODE_WORDS])
def test_words(text):
    assert words(text) == {**WORDS, **UNICODE_WORDS}[text]


@pytest.mark.parametrize("text", WORDS)
def test_ascii_text_gives_the_same_words_within_other_text(text):
    assert words(text + " ★ ") == WORDS[text] + ["★"]


def test_ascii_and_unicode_patterns_agree_on_random_text():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices("abZ019_.,:;'\"-/ \n&", k=rng.randint(1, 12)))
        assert bm25._ASCII_WORDS.findall(text) == bm25._WORDS.findall(text), text


def test_long_words_are_cut():
    assert [len(word) for word in words("x" * 600 + " y")] == [255, 255, 90, 1]


# ------------------------------------------------------------------------------------------------------------ terms
@pytest.mark.parametrize("word, expected", [
    ("ponies", "poni"), ("motoring", "motor"), ("hopping", "hop"), ("relational", "relat"), ("conditional", "condit"),
    ("sensibiliti", "sensibl"), ("possibly", "possibl"), ("apology", "apolog"),
    # examples of Porter's paper, one or more per step
    ("caresses", "caress"), ("ties", "ti"), ("cats", "cat"), ("feed", "feed"), ("agreed", "agre"),
    ("plastered", "plaster"),
    ("bled", "bled"), ("sing", "sing"), ("conflated", "conflat"), ("troubled", "troubl"), ("sized", "size"),
    ("falling", "fall"), ("hissing", "hiss"), ("fizzed", "fizz"), ("failing", "fail"), ("filing", "file"),
    ("happy", "happi"), ("sky", "sky"), ("rational", "ration"), ("valenci", "valenc"), ("digitizer", "digit"),
    ("vietnamization", "vietnam"), ("operator", "oper"), ("decisiveness", "decis"), ("hopefulness", "hope"),
    ("triplicate", "triplic"), ("formative", "form"), ("electrical", "electr"), ("goodness", "good"),
    ("revival", "reviv"), ("adjustable", "adjust"), ("replacement", "replac"), ("adoption", "adopt"),
    ("communism", "commun"), ("probate", "probat"), ("rate", "rate"), ("cease", "ceas"), ("controll", "control"),
    ("roll", "roll"),
    # one and two letters stay; digits are consonants
    ("is", "is"), ("s", "s"), ("as", "as"), ("12s", "12"), ("10ies", "10i"),
])
def test_stem(word, expected):
    assert stem(word) == expected


def test_analyze():
    assert analyze("The Ponies' hopping, and NOT a boat") == ["poni", "hop", "boat"]
    assert analyze("women's WOMEN’S women＇s women''s 's") == ["women"] * 4 + ["s", "s"]
    assert analyze("This is it") == []
    assert analyze("İstanbul ΑΣ") == ["istanbul", "ασ"]             # character by character: no final sigma


# --------------------------------------------------------------------------------------------------------- lengths
def test_one_byte_lengths():
    for length, decoded in [(0, 0), (23, 23), (40, 40), (41, 40), (43, 42), (57, 56), (63, 60), (71, 68), (100, 96),
                            (150, 144), (200, 200), (500, 472), (1000, 984)]:
        assert decode_length(encode_length(length)) == decoded
    codes = [encode_length(length) for length in range(5000)]
    assert codes == sorted(codes) and max(codes) < 256
    assert all(decode_length(encode_length(decode_length(code))) == decode_length(code) for code in set(codes))


# --------------------------------------------------------------------------------------------------------- ranking
def slow_score(query, terms, number, add=np.float64):
    """The formula, spelled out one posting at a time in 32 bits; ``terms``: one Counter per document."""
    f = np.float32
    filled = [sum(counts.values()) for counts in terms if counts]
    average = f(sum(filled) / len(filled))
    dl = f(decode_length(encode_length(sum(terms[number].values()))))
    norm = f(1) / (f(0.9) * ((f(1) - f(0.4)) + f(0.4) * dl / average))
    total = add(0)
    for term, repeats in Counter(analyze(query)).items():
        tf, df = terms[number][term], sum(term in counts for counts in terms)
        if tf:
            w = f(repeats) * f(math.log(1 + (len(filled) - df + 0.5) / (df + 0.5)))
            total = add(total + add(w - w / (f(1) + f(tf) * norm)))
    return f(total)


@pytest.fixture(scope="module")
def documents():
    rng = random.Random(1)
    vocabulary = [f"{a}{b}" for a in "bcdfgklmnp" for b in ("ano", "emu", "iro", "olk", "uzz")]
    texts = [" ".join(rng.choices(vocabulary[:rng.choice([8, 20, 50])], k=rng.choice([1, 5, 30, 45, 60, 130])))
             for _ in range(80)]
    return texts + ["", "the and of"]


def build(documents, ids=None):
    index = BM25()
    for document in documents:
        index.add(document)
    index.finish(ids or [f"{number:03d}" for number in range(len(documents))])
    return index


def test_scores_bit_for_bit(documents):
    index, rng, in_float32 = build(documents), random.Random(2), 0
    terms = [Counter(analyze(document)) for document in documents]
    for _ in range(12):
        query = " ".join(rng.choices(" ".join(documents).split(), k=rng.randint(1, 12))) + " unknown"
        scores = index.scores(query)
        assert scores.dtype == np.float32
        assert scores.tolist() == [float(slow_score(query, terms, n)) for n in range(len(documents))]
        in_float32 += any(slow_score(query, terms, n, np.float32) != scores[n] for n in range(0, 80, 4))
    assert in_float32 > 0                       # the queries do tell apart sums in 32 and in 64 bits


def test_repeated_query_words_weigh_more(documents):
    index = build(documents)
    once, thrice = index.scores("bano celmu"), index.scores("bano bano bano celmu")
    assert (thrice >= once).all() and (thrice > once).any()


def test_order_ties_and_limits():
    index = build(["red shoe"] * 60 + ["blue"] + ["red"], ids=[f"{60 - n:02d}" for n in range(60)] + ["x", "y"])
    rows = index.search("red")
    assert len(rows) == 50 and rows[0] == 61                        # the shortest wins
    assert list(rows[1:]) == list(range(59, 10, -1))                # the others tie: by id, not by position
    assert index.search("green") == () and index.search("") == () and index.search("the") == ()
    assert index.search("blue red")[0] == 60                        # rarer


def test_empty_documents_do_not_count():
    with_empty, without = build(["red shoe", "blue hat big", "", "the"]), build(["red shoe", "blue hat big"])
    assert with_empty.scores("red hat")[:2].tolist() == without.scores("red hat").tolist()
    assert build([""]).search("red") == () and build(["", ""]).scores("a b").tolist() == [0.0, 0.0]
