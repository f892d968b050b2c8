"""Streaming JSON: same entries as json.load, and one clear line for every damaged file."""
import json

import pytest

from config import UserError
from envs import records
from envs.records import JsonFile, Records

LIST = [{"asin": "A", "name": "Ümläut ★ 𝄞", "n": [1, 2.5, None, True]}, {"asin": "B", "text": "a\"]},{[\\"}, {}, []]
DICT = {"A": {"x": 1}, "Ключ": [{"y": "z"}], "": {}}


def write(tmp_path, text, encoding="utf-8"):
    path = tmp_path / "file.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
    return path


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
def test_entries_equal_json_load_for_any_chunk(tmp_path, monkeypatch, chunk, ascii_only, indent):
    monkeypatch.setattr(records, "_CHUNK", chunk)
    for data in (LIST, DICT, [], {}):
        path = write(tmp_path, " " + json.dumps(data, ensure_ascii=ascii_only, indent=indent) + "\n")
        file = JsonFile(path, type(data))
        scanned = list(file.scan())
        memory = Records("memory", data)
        assert scanned == list(memory.scan())
        for number, (_, entry) in enumerate(scanned):
            assert file.get(number) == entry == memory.get(number)
        assert list(file.scan()) == scanned                     # a second pass starts anew


def test_a_file_cut_anywhere_is_an_error(tmp_path):
    for data in (LIST, DICT):
        text = json.dumps(data, ensure_ascii=False).encode()
        for cut in range(0, len(text), 3):
            path = write(tmp_path, text[:cut])
            with pytest.raises(UserError, match=r"file\.json: record \d"):
                list(JsonFile(path, type(data)).scan())


@pytest.mark.parametrize("text, kind, problem", [
    ("{}", list, "expected a list"),
    ("[]", dict, "expected an object"),
    ("[1] 2", list, "text after the end"),
    ("[1 2]", list, "expected ','"),
    ("[1,]", list, "malformed"),
    ('[{"a": 1}, {"a": 1 "b": 2}]', list, "record 1 .* malformed"),
    ("{1: 2}", dict, 'expected "key": value|malformed'),
    ('[{"a": 1, "b": 2, "a": 3}]', list, "key 'a' occurs twice"),
    ('{"x": {"y": [{"a": 1, "a": 1}]}}', dict, "key 'a' occurs twice"),
    (b'["\xff\xfe"]', list, "not UTF-8"),
    ("[" + "1" * 5000 + "]", list, "a number that is too long"),
    ("[" * 200_000, list, "nested too deeply"),
])
def test_malformed_files(tmp_path, text, kind, problem):
    with pytest.raises(UserError, match=problem) as caught:
        list(JsonFile(write(tmp_path, text), kind).scan())
    assert "\n" not in str(caught.value) and "file.json" in str(caught.value)


def test_an_unreadable_entry_does_not_pull_the_whole_file_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_CHUNK", 100)
    monkeypatch.setattr(records, "_LARGEST", 1000)
    file = JsonFile(write(tmp_path, '[{"a": "never closed, ' + "x" * 100_000), list)
    with pytest.raises(UserError, match="malformed"):
        list(file.scan())
    assert file._file.tell() < 2000


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="none.json: cannot be read: No such file"):
        JsonFile(tmp_path / "none.json", list)
