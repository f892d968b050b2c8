"""WebShop's search engine: Lucene's English analyzer and Lucene's BM25, in numpy.

WebShop ranks with Anserini (Lucene 9): k1 = 0.9, b = 0.4, a document length stored in one lossy byte, 32-bit
scores, and an analyzer of four steps (words, possessives, stop words, Porter).  A page of results depends on every
one of these details, so nothing here is configurable.

Why no library: bm25s (0.3) has neither the one-byte lengths nor Lucene's tie order and keeps its scores in a matrix
that repeated query words cannot weight; PyStemmer's ``porter`` is the 1980 algorithm without the later departures
that Lucene has (``bli`` -> ``ble``, ``logi`` -> ``log``).  Both give other pages than the original.

    index = BM25()
    for text in texts:
        index.add(text)
    index.finish(ids)               # ids break ties
    index.search("red shoes")       # -> rows of the best 50 documents, best first
"""
from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import regex
from scipy.sparse import csr_matrix

K1, B = np.float32(0.9), np.float32(0.4)
TOP = 50
STOP = frozenset("a an and are as at be but by for if in into is it no not of on or such that the their then there "
                 "these they this to was will with".split())

# ----------------------------------------------------------------------------------------------- words (UAX#29)
# Extended_Pictographic of Unicode 12.1, the version that Lucene 9 was generated from.  Later versions are narrower:
# with the table of today's `regex` a star (U+2605) would be no token and the ranking would change.
_PICTOGRAPHS = """a9 ae 203c 2049 2122 2139 2194-2199 21a9-21aa 231a-231b 2328 2388 23cf 23e9-23f3 23f8-23fa 24c2
25aa-25ab 25b6 25c0 25fb-25fe 2600-2605 2607-2612 2614-2685 2690-2705 2708-2712 2714 2716 271d 2721 2728 2733-2734
2744 2747 274c 274e 2753-2755 2757 2763-2767 2795-2797 27a1 27b0 27bf 2934-2935 2b05-2b07 2b1b-2b1c 2b50 2b55 3030
303d 3297 3299 1f000-1f0ff 1f10d-1f10f 1f12f 1f16c-1f171 1f17e-1f17f 1f18e 1f191-1f19a 1f1ad-1f1e5 1f201-1f20f 1f21a
1f22f 1f232-1f23a 1f23c-1f23f 1f249-1f3fa 1f400-1f53d 1f546-1f64f 1f680-1f6ff 1f774-1f77f 1f7d5-1f7ff 1f80c-1f80f
1f848-1f84f 1f85a-1f85f 1f888-1f88f 1f8ae-1f8ff 1f90c-1f93a 1f93c-1f945 1f947-1fffd"""


def _word(letter: str, digit: str, join: str, letter_mid: str, digit_mid: str) -> str:
    """A word: letters, digits and joiners (``_``); one inner mark between two letters or between two digits."""
    letter, digit, join = (f"(?:{part})" for part in (letter, digit, join))
    letters = f"{letter}(?:(?:{join}*|{letter_mid}){letter})*"
    digits = f"{digit}(?:(?:{join}*|{digit_mid}){digit})*"
    run = f"(?:{digits}|{letters})+"
    return f"{join}*{run}(?:{join}+{run})*{join}*"


def _unicode_pattern() -> str:
    attach = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*"              # these stay with the character before them
    word = _word(rf"[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]{attach}", rf"\p{{WB=Numeric}}{attach}",
                 rf"\p{{WB=ExtendNumLet}}{attach}",
                 rf"[:\p{{WB=MidLetter}}\p{{WB=MidNumLet}}']{attach}",  # `:` by name: later Unicode may drop it
                 rf"[\p{{WB=MidNum}}\p{{WB=MidNumLet}}']{attach}")
    katakana = rf"(?:\p{{WB=Katakana}}{attach})"
    katakana = rf"_*{katakana}(?:_*{katakana})*_*"
    pictograph = "[" + "".join("-".join(chr(int(end, 16)) for end in item.split("-"))
                               for item in _PICTOGRAPHS.split()) + "]"
    # Variation selector 16 closes one pictograph; a zero-width joiner that a pictograph follows starts the next one.
    tail = rf"(?:(?![\ufe0e\ufe0f\u200d])[\p{{WB=Extend}}\p{{WB=Format}}]|\u200d(?!\u200d*{pictograph}))*\ufe0f?"
    skin_tone = r"[\U0001f3fb-\U0001f3ff]"
    emoji = (rf"\u200d*{pictograph}{tail}(?:(?:\u200d+{pictograph}{tail})+|[\U000e0020-\U000e007e]+\U000e007f)?"
             rf"|{skin_tone}{tail}|[#*]\ufe0f?\u20e3|(?:\p{{WB=Regional_Indicator}}{attach}){{2}}")
    single = rf"[\p{{Script=Han}}\p{{Script=Hiragana}}]{attach}"
    south_east_asian = rf"(?:\p{{LB=SA}}{attach})+"
    return "|".join([word, katakana, emoji, south_east_asian, single])


# Most product texts are ASCII, where the standard module's small classes are several times faster.
_ASCII_WORDS = re.compile(_word("[A-Za-z]", "[0-9]", "_", "[:.']", "[,;.']"))
_WORDS = regex.compile(_unicode_pattern(), regex.V1)
_LONGEST = 255


def words(text: str) -> list[str]:
    """Tokens of Lucene's StandardTokenizer: ``wi-fi 10x50 don't`` -> ``wi``, ``fi``, ``10x50``, ``don't``."""
    found = (_ASCII_WORDS if text.isascii() else _WORDS).findall(text)
    if len(text) <= _LONGEST or max(map(len, found), default=0) <= _LONGEST:
        return found
    return [word[i:i + _LONGEST] for word in found for i in range(0, len(word), _LONGEST)]


# ----------------------------------------------------------------------------------------------- Porter's stemmer
_STEP2 = [("ational", "ate"), ("tional", "tion"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"), ("bli", "ble"),
          ("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous"), ("ization", "ize"), ("ation", "ate"),
          ("ator", "ate"), ("alism", "al"), ("iveness", "ive"), ("fulness", "ful"), ("ousness", "ous"),
          ("aliti", "al"), ("iviti", "ive"), ("biliti", "ble"), ("logi", "log")]
_STEP3 = [("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""), ("ness", "")]
_STEP4 = ("al ance ence er ic able ible ant ement ment ent sion tion ou ism ate iti ous ive ize").split()


def _shape(stem: str) -> str:
    """One letter per character: ``v`` vowel, ``c`` consonant; y is a vowel after a consonant."""
    shape = ""
    for char in stem:
        vowel = char in "aeiou" or (char == "y" and shape.endswith("c"))
        shape += "v" if vowel else "c"
    return shape


def _measure(stem: str) -> int:
    """Porter's m: how often a vowel is followed by a consonant."""
    return _shape(stem).count("vc")


def _cvc(stem: str) -> bool:
    return _shape(stem).endswith("cvc") and stem[-1] not in "wxy"


def _double(stem: str) -> bool:
    return len(stem) > 1 and stem[-1] == stem[-2] and _shape(stem)[-1] == "c"


def _replace(word: str, rules: list[tuple[str, str]]) -> str:
    """The first rule whose ending fits decides, even if its stem is too short to change."""
    for ending, new in rules:
        if word.endswith(ending):
            stem = word[:-len(ending)]
            return stem + new if _measure(stem) > 0 else word
    return word


@lru_cache(maxsize=1 << 17)
def stem(word: str) -> str:
    """Martin Porter's stemmer with his published departures; words of one or two letters stay as they are."""
    if len(word) < 3:
        return word
    # 1a: plurals
    if word.endswith("sses") or word.endswith("ies"):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    # 1b: -ed, -ing
    if word.endswith("eed"):
        if _measure(word[:-3]) > 0:
            word = word[:-1]
    else:
        base = word[:-2] if word.endswith("ed") else word[:-3] if word.endswith("ing") else ""
        if "v" in _shape(base):
            if base.endswith(("at", "bl", "iz")):
                word = base + "e"
            elif _double(base):
                word = base if base[-1] in "lsz" else base[:-1]
            else:
                word = base + "e" if _measure(base) == 1 and _cvc(base) else base
    # 1c
    if word.endswith("y") and "v" in _shape(word[:-1]):
        word = word[:-1] + "i"
    word = _replace(_replace(word, _STEP2), _STEP3)
    for ending in _STEP4:
        if word.endswith(ending):
            base = word[:-3] if ending in ("sion", "tion") else word[:-len(ending)]     # the s or t stays
            if _measure(base) > 1:
                word = base
            break
    # 5: final e, final ll
    if word.endswith("e"):
        m = _measure(word[:-1])
        if m > 1 or (m == 1 and not _cvc(word[:-1])):
            word = word[:-1]
    if word.endswith("ll") and _measure(word) > 1:
        word = word[:-1]
    return word


@lru_cache(maxsize=1 << 17)
def _term(word: str) -> str:
    """One token through possessive, lower-case, stop-word and stemming filter; empty for a stop word."""
    if word[-1] in "sS" and word[-2:-1] in ("'", "\u2019", "\uff07"):
        word = word[:-2]
    word = word.lower() if word.isascii() else "".join(char.lower()[0] for char in word)  # one for one, as in Java
    return "" if word in STOP else stem(word)


def analyze(text: str) -> list[str]:
    """Index terms of a text, in order: ``the Ponies' hopping`` -> ``poni``, ``hop``."""
    return [term for term in map(_term, words(text)) if term]


# ----------------------------------------------------------------------------------------------- ranking
def encode_length(length: int) -> int:
    """Lucene's SmallFloat: a length as one byte; exact below 40, then three significant bits."""
    if length < 24:
        return length
    rest = length - 24
    if rest < 8:
        return 24 + rest
    shift = rest.bit_length() - 4
    return 24 + (((rest >> shift) & 7) | ((shift + 1) << 3))


def decode_length(byte: int) -> int:
    if byte < 24:
        return byte
    bits, shift = (byte - 24) & 7, ((byte - 24) >> 3) - 1
    return 24 + (bits if shift == -1 else (bits | 8) << shift)


class BM25:
    """Inverted index: per term the documents and counts, in compressed sparse column form.

    Memory: 12 bytes per posting at most while it is built, 8 afterwards (document 4, part of the score 4), and the
    vocabulary.
    """

    def __init__(self) -> None:
        self._vocabulary: dict[str, int] = {}
        self._terms, self._counts = array("i"), array("H")      # document after document, while building
        self._starts, self._lengths = array("q", [0]), array("I")

    def add(self, text: str) -> None:
        """Append one document."""
        terms = analyze(text)
        vocabulary = self._vocabulary
        for term, count in Counter(terms).items():
            self._terms.append(vocabulary.setdefault(term, len(vocabulary)))
            self._counts.append(min(count, 65535))
        self._starts.append(len(self._terms))
        self._lengths.append(len(terms))

    def finish(self, ids: Sequence[str]) -> None:
        """Turn the documents into postings.  ``ids``: one per document, in the order of ``add``."""
        lengths = np.frombuffer(self._lengths, np.uint32) if self._lengths else np.zeros(0, np.uint32)
        rows, columns = len(lengths), len(self._vocabulary)
        postings = csr_matrix((np.array(self._counts, copy=False), np.array(self._terms, copy=False),
                               np.array(self._starts, copy=False)), shape=(rows, columns)).tocsc()
        del self._terms, self._counts, self._starts, self._lengths
        self._docs, self._ptr = postings.indices, postings.indptr
        self._rank = np.empty(rows, np.int32)                   # position among the sorted ids: breaks ties
        self._rank[sorted(range(rows), key=ids.__getitem__)] = np.arange(rows, dtype=np.int32)
        self._n = int((lengths > 0).sum())
        average = np.float32(int(lengths.sum(dtype=np.int64)) / max(self._n, 1))    # of the exact lengths
        one = np.float32(1)
        bytes_ = np.arange(256)
        decoded = np.array([decode_length(byte) for byte in bytes_], np.float32)
        table = one / (K1 * ((one - B) + B * decoded / max(average, one)))
        codes = {int(length): encode_length(int(length)) for length in np.unique(lengths)}
        norm = np.array([table[codes[int(length)]] for length in lengths], np.float32)
        self._saturation = postings.data.astype(np.float32)     # 1 + tf * norm, in place: this is the largest array
        del postings
        for begin in range(0, len(self._docs), 1 << 20):
            part = slice(begin, begin + (1 << 20))
            self._saturation[part] *= norm[self._docs[part]]
        self._saturation += one
        self.search = lru_cache(maxsize=4096)(self._search)

    def scores(self, query: str) -> np.ndarray:
        """float32 (documents,): sum over query terms of w - w / (1 + tf * norm), w = count in query * idf."""
        docs, saturation, weights, counts = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)], [], []
        for term, repeats in Counter(analyze(query)).items():
            column = self._vocabulary.get(term)
            if column is not None:
                here = slice(self._ptr[column], self._ptr[column + 1])
                docs.append(self._docs[here])
                saturation.append(self._saturation[here])
                counts.append(df := len(docs[-1]))
                weights.append(np.float32(repeats) * np.float32(math.log(1 + (self._n - df + 0.5) / (df + 0.5))))
        w = np.repeat(np.array(weights, np.float32), counts)
        # Lucene adds in double and casts the sum; bincount adds in double, too, one term after the other
        total = np.bincount(np.concatenate(docs), w - w / np.concatenate(saturation), minlength=len(self._rank))
        return total.astype(np.float32)

    def _search(self, query: str) -> tuple[int, ...]:
        """Rows of the best ``TOP`` documents that share a term with the query; ties in order of their ids."""
        scores = self.scores(query)
        rows = np.flatnonzero(scores > 0)
        if len(rows) > TOP:
            last = -np.partition(-scores[rows], TOP - 1)[TOP - 1]
            rows = rows[scores[rows] >= last]                   # all that tie with the last place compete for it
        order = np.lexsort((self._rank[rows], -scores[rows]))[:TOP]
        return tuple(rows[order].tolist())
