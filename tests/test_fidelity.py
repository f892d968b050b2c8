"""Fidelity: every number checked against simulators whose mistakes are known.

    python -m pytest -q tests/test_fidelity.py
"""
import json
import math
import random
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import small_run

import config
import dreamgym
import envs
import fidelity
import mexp
import report
import rollouts
from buffer import HashEncoder, ReplayBuffer, validate_file, write_transitions
from fidelity import bootstrap_mean, paired, ratio, share, wilson
from llm import Sample
from mexp import Codec, DreamEnv, ExperienceModel, Prediction
from runs import save_state

PLAY = dict(max_turns=8, max_new_tokens=4, max_prompt_tokens=64, temperature=0.0, generator=None)
WORLD = envs.open_world(SimpleNamespace(name="webshop", data=None, human_goals=False, catalog_seed=0, max_steps=8))
GRAMMAR = WORLD.grammar([t.text for t in WORLD.tasks["train"]]
                        + ["[item] aldmoor floor lamp | compact | $14.5 color red | size small | pattern plain |"])
TASKS = {t.id: t for split in WORLD.tasks.values() for t in split}


def collect(split, episodes=8, seed=0):
    return fidelity.held_out_transitions(WORLD, GRAMMAR, split, {"expert": episodes, "mediocre": 2 * episodes}, seed, 8)


HELD_OUT, TRAIN = collect("validation"), collect("train")


class Oracle:
    """Plays every query's actions in the real shop; ``wrong(query, truth)`` may then change the prediction."""

    def __init__(self, wrong=lambda query, truth: truth, names=None, world=WORLD):
        buffer = ReplayBuffer(HashEncoder(64), GRAMMAR, banned_tasks=[t.id for t in WORLD.tasks["validation"]])
        buffer.add(TRAIN)
        self.codec = Codec(GRAMMAR, buffer, True, 2, 1, True)
        self.wrong, self.env, self.queries = wrong, world.make(), []
        self.names = names or {}

    def predict(self, queries):
        self.queries += [replace(q) for q in queries]
        return [self._predict(q) for q in queries]

    def _predict(self, q):
        self.env.reset(TASKS[q.task_id])
        for action in [*q.history, q.action]:
            state, _, done, _, info = self.env.step(mexp.rename(action, self.names))
        return self.wrong(q, Prediction("", "", state, done, info["success"]))


class Scripted:
    """Stands for policy and format: prompts are numbers of (task, state, history), answers follow a scripted policy
    (its name, or a function like it)."""

    def __init__(self, act, monkeypatch):
        self.act, self.asked = act if callable(act) else WORLD.scripted(act), []
        monkeypatch.setattr(rollouts.llm, "generate", lambda lm, prompts, **_: [Sample(p, False) for p in prompts])

    def prompt(self, task, history, state, admissible):
        self.asked.append((task, state, list(history)))
        return [len(self.asked) - 1]

    def decode(self, ids):
        return self.act(*self.asked[ids[0]], random.Random(str(self.asked[ids[0]])))

    def parse(self, text):
        return text


# ------------------------------------------------------------------------------------------------ intervals
def test_wilson_interval():
    low, high = wilson(22, 165)                                # WebArena-Lite's 13.3 %: 9.0 to 19.4
    assert (round(100 * low, 1), round(100 * high, 1)) == (9.0, 19.4)
    assert wilson(0, 0) == (0, 1)
    assert wilson(0, 120)[0] == 0 and wilson(0, 120)[1] == pytest.approx(0.031, abs=5e-4)
    assert wilson(5, 5)[1] == 1 and wilson(50, 100)[0] == pytest.approx(1 - wilson(50, 100)[1])


def test_wilson_covers():
    rng = random.Random(0)
    for p in (0.02, 0.3, 0.9):
        intervals = [wilson(sum(rng.random() < p for _ in range(60)), 60) for _ in range(1500)]
        hits = [low <= p <= high for low, high in intervals]
        assert 0.92 < sum(hits) / len(hits) < 0.985


def test_share_widens_where_errors_come_in_clusters():
    values, episodes = [1] * 80 + [0] * 20, [i // 10 for i in range(100)]
    alone, together = share(values), share(values, episodes)
    assert alone == {"value": 0.8, "low": wilson(80, 100)[0], "high": wilson(80, 100)[1], "n": 100}
    assert (together["low"], together["high"]) == pytest.approx(wilson(8, 10))     # ten episodes, each all or nothing
    assert share(values, range(100)) == alone                                      # one value an episode
    assert share([]) == {"value": None, "low": 0.0, "high": 1.0, "n": 0}


def test_ratios_are_paired():
    dreamed, real = [1, 1, 1, 0] * 25, [1, 1, 0, 0] * 25
    one = paired(ratio, real, dreamed)
    assert one["value"] == pytest.approx(2 / 3) and one["low"] < 2 / 3 < one["high"] and one["n"] == 100
    assert one["high"] - one["low"] < 0.25
    independent = paired(ratio, real, dreamed[2:] + dreamed[:2])               # the same shares, other pairs
    assert independent["value"] == one["value"] and independent["high"] - independent["low"] > 0.25
    same = paired(ratio, dreamed, dreamed)                     # no task differs: narrow, but not without any doubt
    assert same["value"] == 1 and 0.9 < same["low"] < 1 < same["high"] < 1.1
    assert paired(ratio, [], []) == {"value": None, "low": None, "high": None, "n": 0}
    assert paired(ratio, [0] * 9, [0] * 9)["value"] is None


def test_paired_differences_cover():
    rng = random.Random(0)
    hits = 0
    for number in range(300):
        pairs = [(rng.random() < 0.9, rng.random()) for _ in range(80)]
        first, second = [a for a, _ in pairs], [a if u < 0.9 else not a for a, u in pairs]     # differ in a tenth
        found = paired(lambda a, b: a - b, first, second, seed=number, draws=400)
        hits += found["low"] <= 0.9 - (0.9 * 0.9 + 0.1 * 0.1) <= found["high"]
    assert 0.92 < hits / 300 < 0.99


def test_mean_of_episodes():
    one = bootstrap_mean([0, 0, 0, 4] * 30)
    assert one["value"] == 1 and 0.6 < one["low"] < 1 < one["high"] < 1.4


# ------------------------------------------------------------------------------------------------ real transitions
def test_held_out_transitions_are_real_data_of_that_split(tmp_path):
    assert {t.task_id for t in HELD_OUT} <= {t.id for t in WORLD.tasks["validation"]}
    assert HELD_OUT == collect("validation") != collect("validation", seed=1)
    write_transitions(tmp_path / "held_out.jsonl", HELD_OUT)
    assert validate_file(tmp_path / "held_out.jsonl") == []
    cut = fidelity.held_out_transitions(WORLD, GRAMMAR, "test", {"random": 5}, 0, 3)
    assert max(t.step for t in cut) == 2


# ------------------------------------------------------------------------------------------------ single steps
def test_a_perfect_model_is_perfect():
    found = fidelity.teacher_forced(Oracle(), HELD_OUT)
    measures = [found[k] for k in ("exact", "done", "done_precision", "done_recall", "success_precision",
                                  "success_recall")]
    measures += [*found["by_move"].values(), *found["by_action"].values(), *found["fields"].values()]
    assert all(one["value"] == 1 for one in measures) and found["unparsed"]["value"] == 0
    for name in ("by_move", "by_action"):
        assert sum(one["n"] for one in found[name].values()) == len(HELD_OUT) == found["exact"]["n"]
    assert {"home: search ..", "results: click ..", "item: click buy"} <= found["by_action"].keys()
    assert {"kind", "items", "title", "price", "options", "chosen", "clickable"} <= found["fields"].keys()


def test_mistakes_are_counted_where_they_are_made():
    def wrong(q, truth):
        if truth.done:
            return None if truth.success else replace(truth, success=True)      # failures only are successes
        return replace(truth, next_state=q.state)                               # nothing ever changes

    found = fidelity.teacher_forced(Oracle(wrong), HELD_OUT)
    final = [t for t in HELD_OUT if t.done]
    unmoved = [t for t in HELD_OUT if not t.done and t.next_state == t.state]
    won = sum(t.success for t in final)
    assert 0 < won < len(final)
    assert found["exact"]["value"] == pytest.approx((len(unmoved) + len(final) - won) / len(HELD_OUT))
    assert found["by_move"]["home -> results"]["value"] == found["by_action"]["home: search .."]["value"] == 0
    assert found["done"]["value"] == pytest.approx(1 - won / len(HELD_OUT))
    assert found["done_precision"] == share([1] * (len(final) - won)) and found["done_recall"]["n"] == len(final)
    assert found["done_recall"]["value"] == pytest.approx(1 - won / len(final))
    assert found["success_precision"]["value"] == found["success_recall"]["value"] == 0
    assert found["success_precision"]["n"] == len(final) - won and found["success_recall"]["n"] == won
    assert found["unparsed"]["value"] == pytest.approx(won / len(HELD_OUT))


def test_an_early_end_costs_precision_of_the_done_flag_a_late_one_recall():
    final = sum(t.done for t in HELD_OUT)
    searches = sum(t.state == "[home]" and not t.done for t in HELD_OUT)
    soon = Oracle(lambda q, truth: replace(truth, done=truth.done or q.state == "[home]"))
    early = fidelity.teacher_forced(soon, HELD_OUT)
    assert early["done_precision"]["value"] == pytest.approx(final / (final + searches)) and searches > 0
    assert early["done_recall"]["value"] == 1 and early["done"]["value"] == pytest.approx(1 - searches / len(HELD_OUT))
    late = fidelity.teacher_forced(Oracle(lambda q, truth: replace(truth, done=False)), HELD_OUT)
    assert late["done_precision"]["value"] is None and late["done_recall"]["value"] == 0


def test_field_scores_by_hand():
    real = "[item] keldon wool sweater | vegan | $19.5 color black | blue * size small | large |"
    said = "[item] keldon wool scarf | vegan | $19.5 color black * blue | size small |"
    found = fidelity.field_scores(GRAMMAR, real, said)
    assert found == {"kind": 1, "title": 0, "price": 1, "options": 0.75, "chosen": 0,
                     "clickable": pytest.approx(9 / 10)}
    nothing = fidelity.field_scores(GRAMMAR, real, None)
    assert set(nothing.values()) == {0} and nothing.keys() == found.keys()
    shelf = "[results] p1 1 s1 a | $1.5 2 s2 b | $2.5"
    other = "[results] p1 1 s2 b | $2.5 2 s3 c | $3.5"
    assert fidelity.field_scores(GRAMMAR, shelf, other)["items"] == pytest.approx(1 / 3)


# ------------------------------------------------------------------------------------------------ the judge
@pytest.mark.parametrize("says, false_success, false_failure", [
    (lambda truth: truth.success, 0, 0), (lambda truth: True, 1, 0), (lambda truth: False, 0, 1)])
def test_balanced_purchases(says, false_success, false_failure):
    model = Oracle(lambda q, truth: replace(truth, success=says(truth)))
    found = fidelity.balanced_purchases(model, HELD_OUT, 5, random.Random(0))
    assert found["false_success"]["value"] == false_success and found["false_failure"]["value"] == false_failure
    assert found["false_success"]["n"] == found["false_failure"]["n"] == 5
    many = fidelity.balanced_purchases(model, HELD_OUT, 10 ** 6, random.Random(0))          # as many as there are
    assert many["false_failure"]["n"] == sum(t.success for t in HELD_OUT)
    assert many["false_success"]["n"] == sum(t.done and not t.success for t in HELD_OUT)


def test_an_answer_that_cannot_be_read_is_no_success():
    found = fidelity.balanced_purchases(Oracle(lambda q, truth: None), HELD_OUT, 5, random.Random(0))
    assert found["false_success"]["value"] == 0 and found["false_failure"]["value"] == 1


def test_unseen_words_are_new_and_keep_the_verdict():
    words = mexp.content_words(GRAMMAR, HELD_OUT)
    new = fidelity.unseen_words(len(words), TRAIN)
    assert new == fidelity.unseen_words(len(words), TRAIN) and len(set(new)) == len(words)
    model = Oracle(names=dict(zip(new, words)))
    found = fidelity.balanced_purchases(model, HELD_OUT, 5, random.Random(0), renamed="unseen")
    assert found["unseen_false_success"]["value"] == found["unseen_false_failure"]["value"] == 0
    training = {w for t in TRAIN for text in (t.task, t.state, t.next_state) for w in text.split(" ")}
    for q in model.queries:
        assert not GRAMMAR.content_words(q.task) & training and GRAMMAR.content_words(q.task) <= set(new)
        plain = mexp.rename(q.task, dict(zip(new, words)))
        checks = [(fine for *_, fine in GRAMMAR.judge(task, state)) for task, state in
                  ((q.task, q.state), (plain, mexp.rename(q.state, dict(zip(new, words)))))]
        assert list(checks[0]) == list(checks[1])              # the rule judges the renamed page as it did the page


# ------------------------------------------------------------------------------------------------ whole episodes
def test_a_perfect_dream_is_consistent(monkeypatch):
    policy = Scripted("mediocre", monkeypatch)
    tasks = WORLD.tasks["validation"][:25]
    found = fidelity.measure(policy, policy, DreamEnv(Oracle(), 8), WORLD, tasks, HELD_OUT[:40], 5, **PLAY)
    assert 0 < found["real_success"]["value"] < 1
    assert found["dreamed"] == found["replayed"] == found["real"]
    for name in ("consistency", "wm2real_over_real"):
        assert found[name]["value"] == 1
    for name in ("imagined_false_success", "failed_declared", "eps_P", "eps_R", "bound", "coupled_bound", "gap"):
        assert found[name]["value"] == 0
    assert found["real_episodes"] == 50 and found["real_transitions"] == 2 * found["eps_P"]["n"]
    text = fidelity.table(json.loads(json.dumps(found)))
    assert len(text.splitlines()) > 30 and max(map(len, text.splitlines())) <= 100
    for label in ("success of its action lists, replayed", "field: price", "bound: sum of eps_P + eps_R"):
        assert label in text


def test_an_optimistic_dream_is_found_out(monkeypatch):
    policy, tasks = Scripted("mediocre", monkeypatch), WORLD.tasks["validation"][:25]
    dream = DreamEnv(Oracle(lambda q, truth: replace(truth, success=truth.done)), 8)
    found = fidelity.imagined(policy, policy, dream, WORLD, tasks, **PLAY)
    errors = fidelity.on_policy_errors(policy, policy, dream, WORLD, tasks, **PLAY)
    lost = 25 - sum(errors["real"])
    bought = sum(found["dreamed"])                             # every purchase counts as a success
    assert found["imagined_success"]["value"] == bought / 25 and found["wm2real"]["value"] == 1 - lost / 25
    assert found["imagined_false_success"]["value"] == pytest.approx((bought - (25 - lost)) / bought)
    assert found["failed_declared"]["value"] == pytest.approx((bought - (25 - lost)) / lost)
    assert found["consistency"]["value"] == pytest.approx((25 - lost) / bought) and bought > 25 - lost
    steps = errors["eps_R"]["n"]
    assert errors["eps_P"]["value"] == 0 and errors["eps_R"]["value"] == pytest.approx((bought - (25 - lost)) / steps)
    # only the reward errs, and only once an episode: the bound is tight
    assert errors["bound"]["value"] == errors["coupled_bound"]["value"] == pytest.approx(bought / 25 - (1 - lost / 25))


def test_wrong_next_states_along_the_policy(monkeypatch):
    policy, tasks = Scripted("expert", monkeypatch), WORLD.tasks["validation"][:12]

    def wrong(q, truth):                                       # every search of a dream fails
        return replace(truth, next_state=q.state) if q.state == "[home]" else truth

    found = fidelity.on_policy_errors(policy, policy, DreamEnv(Oracle(wrong), 8), WORLD, tasks, **PLAY)
    assert found["eps_P"]["value"] == pytest.approx(12 / found["eps_P"]["n"]) and found["eps_R"]["value"] == 0
    assert found["bound"]["value"] == found["coupled_bound"]["value"] == 1
    dreamed = fidelity.imagined(policy, policy, DreamEnv(Oracle(wrong), 8), WORLD, tasks, **PLAY)
    assert dreamed["imagined_success"]["value"] == 0
    assert abs(0 - found["real_success"]["value"]) <= found["bound"]["value"]
    assert dreamed["consistency"]["value"] is None             # nothing succeeds in this dream


def test_an_early_end_is_an_error_of_the_next_state(monkeypatch):
    policy, tasks = Scripted("expert", monkeypatch), WORLD.tasks["validation"][:5]
    dream = DreamEnv(Oracle(lambda q, truth: None), 8)         # no answer can be read: every episode ends at once
    found = fidelity.on_policy_errors(policy, policy, dream, WORLD, tasks, **PLAY)
    final_wins = sum(found["real"])
    assert found["eps_P"]["value"] == 1 and found["eps_R"]["value"] == pytest.approx(final_wins / found["eps_R"]["n"])


def test_the_replay_stops_where_the_real_episode_ends(monkeypatch):
    policy = Scripted("mediocre", monkeypatch)
    tasks, env = WORLD.tasks["validation"][:10], WORLD.make()
    dream = DreamEnv(Oracle(lambda q, truth: replace(truth, done=False, success=False)), 8)     # never ends
    found = fidelity.imagined(policy, policy, dream, WORLD, tasks, **PLAY)
    assert found["imagined_success"]["value"] == 0 and found["wm2real"]["value"] > 0
    assert found["replay_transitions"] < 8 * len(tasks)
    assert env.max_steps == 8


# ------------------------------------------------------------------------------------------------ simulators that err
CLAIMS = ["click buy", "buy", "[done]", "search success <win>", "i bought exactly what was asked for", "reward 1"]


def test_an_agent_that_only_claims_success_wins_nothing_by_the_rule(monkeypatch):
    """At once, or on the page of the right product.  The experience model believes every claim; the rule does not, and
    neither does the real environment."""
    expert, tasks = WORLD.scripted("expert"), WORLD.tasks["validation"][:40]

    def claim(task, state, history, rng):
        claims = state.startswith("[item]") or rng.random() < 0.3
        return rng.choice(CLAIMS) if claims else expert(task, state, history, rng)

    policy = Scripted(claim, monkeypatch)
    oracle = Oracle(lambda q, truth: Prediction("", "", "[done]", True, True) if q.action in CLAIMS else truth)
    for source, believed in (("model", 1), ("rules", 0)):
        found = fidelity.imagined(policy, policy, DreamEnv(oracle, 8, source), WORLD, tasks, **PLAY)
        assert found["imagined_success"]["value"] == found["failed_declared"]["value"] == believed
        assert found["wm2real"]["value"] == 0
    claimed = {(q.action, GRAMMAR.kind(q.state)) for q in oracle.queries}
    assert {(text, kind) for text in CLAIMS for kind in ("home", "item")} <= claimed


def test_what_a_dream_forgets_in_twenty_steps_is_counted(monkeypatch):
    """The shopper chooses early, reads sub pages seven times and buys in step 20; from step 11 on the dream shows the
    product without what was chosen."""
    long = envs.open_world(SimpleNamespace(name="webshop", data=None, human_goals=False, catalog_seed=0, max_steps=20))
    task = TASKS["webshop-3"]                                  # stretchy , padded , tea infuser , color green , ..
    reading = ["click description", "click prev", "click features", "click prev"]
    actions = ["search stretchy padded tea infuser", "click 1", "click blue", "click green", "click floral",
               *reading, *reading, *reading, *reading[:2], "click buy"]
    late = sum(action == "click prev" for action in actions[10:])
    assert len(actions) == 20 and late == 5

    def forgets(q, truth):
        if q.action == "click buy":                            # judged on the page as it is shown
            return replace(truth, success=GRAMMAR.met(q.task, q.state))
        late = len(q.history) >= 10 and q.action == "click prev"
        return replace(truth, next_state=truth.next_state.replace(" *", " |")) if late else truth

    def measure(wrong):
        policy = Scripted(lambda task, state, history, rng: actions[len(history)], monkeypatch)
        dream, play = DreamEnv(Oracle(wrong, world=long), 20), PLAY | {"max_turns": 20}
        found = fidelity.imagined(policy, policy, dream, long, [task], **play)
        env = long.make()
        env.reset(task)
        real = [env.step(action)[0] for action in actions]
        contradictions = sum(t.next_state != state for t, state in zip(dream.transitions, real, strict=True))
        return contradictions, found, fidelity.on_policy_errors(policy, policy, dream, long, [task], **play)

    contradictions, found, errors = measure(lambda q, truth: truth)
    assert contradictions == errors["eps_P"]["value"] == 0 and found["dreamed"] == found["replayed"] == [True]
    contradictions, found, errors = measure(forgets)
    assert contradictions == late and errors["eps_P"] == fidelity.share([1] * late + [0] * (20 - late), [0] * 20)
    assert errors["bound"]["value"] == late and errors["coupled_bound"]["value"] == 1
    assert found["dreamed"] == [False] and found["replayed"] == errors["real"] == [True]        # and the price of it


# ------------------------------------------------------------------------------------------------ leaks
def test_nothing_of_held_out_tasks_is_ever_retrieved_or_kept(monkeypatch):
    """Not even if somebody adds it: the buffer refuses banned tasks."""
    buffer = ReplayBuffer(HashEncoder(64), GRAMMAR, banned_tasks=[t.id for t in WORLD.tasks["validation"]])
    buffer.add(TRAIN)
    before = buffer.rows()
    buffer.add(HELD_OUT)
    assert buffer.rows() == before
    seen = []

    def generate(lm, prompts, *rest):
        seen.extend(prompts)
        return [Sample([0], False) for _ in prompts]

    monkeypatch.setattr(mexp.llm, "generate", generate)
    lm = SimpleNamespace(prompt=lambda system, text: [text], decode=lambda ids: "nothing <next> [same] <go>")
    codec = Codec(GRAMMAR, buffer, False, 2, 3, True)
    retrieved = [d for demos in codec.retrieve(mexp.queries_of(HELD_OUT)) for d in demos]
    banned = {t.id for t in WORLD.tasks["validation"]}
    assert retrieved and not any(d.task_id in banned for d in retrieved)
    fidelity.teacher_forced(ExperienceModel(lm, Codec(GRAMMAR, buffer, True, 2, 1, True)), HELD_OUT[:30])
    assert seen and buffer.rows() == before


def test_nan_and_none_are_printed_as_dashes():
    found = {"consistency": paired(ratio, [0.0], [0.0]), "success_recall": share([])}
    assert fidelity.table(found).count(" - ") == 2 and math.isnan(ratio(1, 0))


# ------------------------------------------------------------------------------------------------ command line
@pytest.fixture
def main(monkeypatch, capsys):
    """main(words) -> what ``python fidelity.py WORDS`` prints."""
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["fidelity.py", *map(str, words)])
        capsys.readouterr()
        assert fidelity.main() == 0
        return capsys.readouterr().out
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run whose policies and experience model know nothing."""
    return small_run.make(tmp_path_factory.mktemp("runs") / "s0")


def test_command_line_writes_and_prints_one_table(folder, main):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    shown = main(folder, "--after", "dream", "--tasks", 3, "--temperature", 0.5)
    path = folder / "fidelity-dream-test.json"
    found = json.loads(path.read_text())
    assert {name: found[name] for name in ("stage", "step", "split", "temperature", "reward_source")} == {
        "stage": "dream", "step": 3, "split": "test", "temperature": 0.5, "reward_source": "model"}
    measured = {name for name, *_ in fidelity.ROWS} - {"", "exact_known"}      # the shop hides nothing
    assert measured <= found.keys() and "exact_known" not in found
    assert fidelity.table(found) in shown and str(path) in shown
    assert found["unparsed"]["value"] == 1 and found["exact"]["value"] == found["real_success"]["value"] == 0
    scripted = sum(dreamgym.gate_episodes(config.load_run(folder)).values())
    assert found["real_episodes"] == 2 * 3 + scripted and len(found["real"]) == 3
    steps = found["exact"]["n"] + found["rollout_transitions"] + found["replay_transitions"]
    assert found["real_transitions"] == steps and f"table: {steps:,} (evaluation)" in shown
    assert "dream, step 3, at temperature 0.5, test tasks" in shown
    # nothing else of the run has changed, its ledger neither; the report shows the new file
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path in before} == before
    assert {path.name for path in folder.rglob("*") if path.is_file()} - {path.name for path in before} == {path.name}
    assert "fidelity-dream-test.json" in report.read_run(folder).fidelity


def test_command_line_takes_any_stage_or_checkpoint(folder, main, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    shutil.copytree(run / "checkpoints/dream", run / "checkpoints/real")
    few = ["--tasks", 2, "--temperature", 0, "--split", "validation"]
    assert "policy of stage real, step 3," in main(run, *few)                  # the newest
    wanted = json.loads((run / "fidelity-real-validation.json").read_text())
    assert (wanted.pop("stage"), wanted.pop("step")) == ("real", 3)
    file = run / "checkpoints/real/00000003.safetensors"
    assert f"along the policy {file}" in main(run, "--checkpoint", file, *few)
    found = json.loads((run / "fidelity-real-00000003-validation.json").read_text())
    assert found.pop("checkpoint") == str(file) and found == wanted
    assert "stage policy, step 20," in main(run, "--after", "policy", *few)
    with pytest.raises(config.UserError, match="do not fit the policy_model"):
        other = dreamgym.new_lm(config.load_run(run, ["policy_model.tiny.layers=1"]), "policy", run)
        save_state(tmp_path / "other.safetensors", {"state": {"weights": other.weights()}})
        main(run, "--checkpoint", tmp_path / "other.safetensors", *few)


@pytest.mark.parametrize("words, named", [
    (["--after", "s2r"], "no checkpoint of stage s2r; it has dream, policy"), (["--after", "mexp"], "invalid choice"),
    (["--after", "dream", "--checkpoint", "x"], "--after and --checkpoint name two policies"),
    (["--checkpoint", "nope.safetensors"], "nope.safetensors: "), (["--temperature", "-1"], "between 0 and 5"),
    (["--tasks", "0"], "at least 1"), (["--split", "train"], "invalid choice")])
def test_command_line_says_what_is_wrong(folder, main, words, named):
    with pytest.raises(config.UserError, match=named):
        main(folder, *words)


@pytest.mark.parametrize("arguments, named", [(["{}/nowhere"], "no such folder"), (["{}"], "no checkpoint"),
                                              (["{}", "--after", "s2r"], "no checkpoint of stage s2r yet")])
def test_command_line_says_what_is_missing(tmp_path, main, arguments, named):
    (tmp_path / "config.yaml").write_text(config.to_yaml(config.Config()))
    with pytest.raises(config.UserError, match=named):
        main(*(a.format(tmp_path) for a in arguments))
