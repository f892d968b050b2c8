"""Large JSON files read entry by entry: what a catalogue of five gigabytes needs.

``JsonFile`` walks once over the top-level list or object of a file and remembers where each entry lies (12 bytes an
entry); later single entries are read back from the disk.  ``Records`` is the same over objects in memory.
"""
from __future__ import annotations

import codecs
import json
import os
import re
from array import array
from collections.abc import Iterator
from pathlib import Path

from config import UserError

_CHUNK = 1 << 20
_LARGEST = 1 << 24          # bytes of text after which an unreadable entry is called malformed, not incomplete
_SPACE = re.compile(r"[ \t\r\n]*")


class _DuplicateKey(Exception):
    pass


def _unique(pairs: list[tuple[str, object]]) -> dict:
    """A JSON object; of a key that comes twice, json would silently lose the first value."""
    entry = dict(pairs)
    if len(entry) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKey(next(key for key in keys if keys.count(key) > 1))
    return entry


class Records:
    """A list or dictionary in memory, with the interface of ``JsonFile``."""

    def __init__(self, name: str, entries: list | dict):
        self.name, self._keys = name, list(entries) if isinstance(entries, dict) else None
        self._entries = list(entries.values()) if isinstance(entries, dict) else entries

    def scan(self) -> Iterator[tuple[str | None, object]]:
        """(key, entry) in order; the key is None in a list."""
        yield from zip(self._keys if self._keys is not None else [None] * len(self._entries), self._entries)

    def get(self, number: int) -> object:
        """The entry that ``scan`` gave as number ``number``, from 0."""
        return self._entries[number]


class JsonFile:
    """The entries of a file's top-level list or object (``kind``: list or dict).

    Raises UserError, with the file and the record, for a file that is missing, truncated, malformed or of the other
    kind, and for a key that occurs twice in one object.
    """

    def __init__(self, path: Path, kind: type):
        self.name, self._brackets = str(path), "[]" if kind is list else "{}"
        try:
            self._file = open(path, "rb")
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        self._starts, self._sizes = array("q"), array("I")

    def get(self, number: int) -> object:
        # pread: no shared file position, so forked workers may read at the same time
        return json.loads(os.pread(self._file.fileno(), self._sizes[number], self._starts[number]))

    def scan(self) -> Iterator[tuple[str | None, object]]:
        self._starts, self._sizes = array("q"), array("I")
        self._file.seek(0)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._byte = "", 0, 0         # _byte: position of _text[_at] in the file
        decode = json.JSONDecoder(object_pairs_hook=_unique).raw_decode
        opening, closing = self._brackets
        if self._next() != opening:
            self._fail(f"expected {'a list' if opening == '[' else 'an object'}, beginning with {opening!r}")
        self._advance(self._at + 1)
        if self._next() == closing:
            self._advance(self._at + 1)
        else:
            while True:
                key = None
                if opening == "{":
                    key = self._value(decode)
                    if not isinstance(key, str) or self._next() != ":":
                        self._fail("expected \"key\": value")
                    self._advance(self._at + 1)
                self._next()
                start = self._byte
                entry = self._value(decode)
                self._starts.append(start)
                self._sizes.append(self._byte - start)
                yield key, entry
                mark = self._next()
                if mark not in (",", closing):
                    self._fail(f"expected ',' or {closing!r}, found {mark!r}" if mark else "the file breaks off")
                self._advance(self._at + 1)
                if mark == closing:
                    break
        if self._next():
            self._fail("text after the end")

    def _fail(self, problem: str) -> None:
        raise UserError(f"{self.name}: record {len(self._starts)} (from 0), near byte {self._byte}: {problem}")

    def _advance(self, to: int) -> None:
        self._byte += len(self._text[self._at:to].encode())
        self._at = to

    def _more(self) -> bool:
        """Read on; False at the end of the file."""
        chunk = self._file.read(_CHUNK)
        try:
            self._text, self._at = self._text[self._at:] + self._decoder.decode(chunk, final=not chunk), 0
        except UnicodeDecodeError:
            self._fail("not UTF-8")
        return bool(chunk)

    def _next(self) -> str:
        """Skip white space; the character that follows, empty at the end of the file."""
        while True:
            self._advance(_SPACE.match(self._text, self._at).end())
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _value(self, decode) -> object:
        """The value at the current position; reads on while the text ends inside it."""
        self._next()
        while True:
            try:
                value, end = decode(self._text, self._at)
            except _DuplicateKey as error:
                self._fail(f"key {str(error)!r} occurs twice")
            except RecursionError:
                self._fail("nested too deeply")
            except ValueError as error:                        # JSONDecodeError, or a number of thousands of digits
                problem = getattr(error, "msg", "a number that is too long")
                if len(self._text) - self._at > _LARGEST:
                    self._fail(f"malformed JSON: {problem}")
                if not self._more():
                    self._fail(f"malformed or truncated JSON: {problem}")
            else:
                self._advance(end)
                return value
