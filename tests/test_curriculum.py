"""Task curriculum: Eq. 7, prediction of V, sampling, Eq. 6 with a fake and with a trained writer, exact resumption."""
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import curriculum as C
import formats
import llm
import rl
import rollouts
from buffer import HashEncoder
from config import Config, UserError
from envs import Task

PRODUCTS = {"travel headphones": ("black", "blue"), "desk chair": ("black", "gray"), "silk scarf": ("red", "pink"),
            "wall clock": ("white", "gray"), "hair dryer": ("pink", "blue"), "lunch box": ("red", "green")}
ATTRIBUTES = ("wireless", "padded", "vegan", "durable", "compact")


def text_of(product, attributes, color, price):
    return " , ".join([*attributes, product, f"color {color}", f"price {price}.00"]) + " ,"


class ShopGrammar:
    """Stand-in for a real grammar: one product, its colours, known attributes, a price of the grid."""

    def task_parts(self, task, start):
        items = task.removesuffix(" ,").split(" , ")
        products = [item for item in items if item in PRODUCTS]
        if len(products) != 1 or len(set(items)) < len(items):
            raise ValueError("product")
        kinds = {"search", "click", "buy"}
        for item in items:
            if item.startswith("color "):
                kinds.add("choose")
                if item.removeprefix("color ") not in PRODUCTS[products[0]]:
                    raise ValueError("option")
            elif item.startswith("price "):
                if item not in {f"price {ten}.00" for ten in range(20, 100, 20)}:
                    raise ValueError("price")
            elif item not in ATTRIBUTES and item not in PRODUCTS:
                raise ValueError("attribute")
        return frozenset(kinds), frozenset(items)


def shop_tasks(number, seed=0):
    rng = random.Random(seed)
    tasks = {}
    while len(tasks) < number:
        product = rng.choice(list(PRODUCTS))
        text = text_of(product, rng.sample(ATTRIBUTES, 2), rng.choice(PRODUCTS[product]), rng.choice((20, 40, 60, 80)))
        tasks[text] = Task(f"train-{len(tasks)}", text, "train", "[home]")
    return list(tasks.values())


def make(tasks=None, held_out=(), rl_keys=None, **keys):
    cfg = Config(rl={"tasks_per_step": 8, **(rl_keys or {})}, curriculum=keys)
    return C.Curriculum(cfg, tasks or shop_tasks(60), held_out, ShopGrammar(), HashEncoder())


def stats(curriculum, tasks, p, size=8):
    """Group statistics as if each task succeeded in round(p(task) * size) of ``size`` rollouts."""
    out = {}
    for task in tasks:
        wins = round(p(task) * size)
        rewards = torch.tensor([1.0] * wins + [0.0] * (size - wins))
        out[f"{curriculum.iteration}/{task.id}"] = rl.GroupStat(task, size, rewards.mean().item(),
                                                                C.reward_entropy(rewards).item())
    return out


class FakeWriter(C.TaskWriter):
    """Writes what it is told; everything after the language model is the real thing."""

    def __init__(self, write):
        super().__init__(SimpleNamespace(device=torch.device("cpu"), chat=False), candidates=4)
        self.write = write

    def generate(self, seeds, generator):
        return [[C.Candidate(text, 0.5) for text in self.write(texts)] for texts in seeds]


# ------------------------------------------------------------------------------------------------ Eq. 7
def test_reward_entropy_is_the_population_variance_and_equals_the_statistics_of_the_rollout():
    r = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert C.reward_entropy(r).tolist() == pytest.approx([3 / 16, 1 / 4, 0, 0])
    task = shop_tasks(1)[0]
    episodes = [rollouts.Episode(task, "0/a", [rollouts.Turn("", [1], [1], "", "", r, False, False)], success=r == 1, score=score)
                for r, score in ((1.0, 1.0), (0.0, 0.5), (0.0, 0.0), (0.0, 0.5))]
    stat = rl.group_stats(episodes)["0/a"]
    assert stat.variance == pytest.approx(3 / 16)
    graded = C.graded_stats(episodes)["0/a"]
    assert (graded.mean, graded.variance) == pytest.approx((0.5, 0.125))


def test_graded_scores_tell_failures_apart():
    task = shop_tasks(1)[0]
    failed = [rollouts.Episode(task, "0/a", score=score) for score in (0.0, 0.8)]
    assert rl.group_stats(failed)["0/a"].variance == 0 and C.graded_stats(failed)["0/a"].variance == pytest.approx(0.16)
    tasks = shop_tasks(20)
    plain, graded = make(tasks), make(tasks)
    zero = stats(plain, tasks[:8], lambda t: 0.0)
    plain.record(zero)
    graded.record(zero, {g: rl.GroupStat(s.task, 8, 0.4, 0.16) for g, s in zero.items()})
    row = {r["id"]: r for r in graded.table()}[tasks[0].id]
    assert plain.metrics()["zero_variance"] == 1 and graded.metrics()["zero_variance"] == 0
    assert row["V"] > 0.15 and row["success"] < 0.05                      # V is graded, success stays the outcome


# ------------------------------------------------------------------------------------------------ prediction of V
def test_v_of_a_visited_task_follows_the_policy_and_ages_with_the_half_life():
    c = make(half_life=4.0)
    task, others = c.real[0], c.real[1:9]

    def v():
        return c.predict(c.vectors[:1])[0, 1].item()

    assert v() == 0.25                                                    # nothing is known: p = 1/2
    c.record(stats(c, [task, *others], lambda t: 0.5 if t is task else 0.0))
    first = v()
    assert first > 0.15                                                   # its own V against eight zeros
    c.record(stats(c, [task, *others], lambda t: 1.0))                    # mastered now
    assert v() < first - 0.05
    # one group alone, checked by hand: own weight 1 after 0 iterations and 1/2 after one half-life
    c = make(half_life=1.0)
    c.record(stats(c, [task], lambda t: 0.0))
    k = C.PRIOR_WEIGHT
    assert v() == pytest.approx(k / (k + 1) * (k * 0.25 / (k + 1)))
    c.record({})
    assert v() == pytest.approx(k / (k + 0.5) * (k * 0.25 / (k + 0.5)))
    for _ in range(10):
        c.record({})
    assert not c.groups and v() == 0.25                                   # forgotten


def test_v_of_unvisited_tasks_is_predicted_from_similar_ones():
    """Success depends on the product; 12 of 150 tasks an iteration, tasks never visited are predicted nonetheless."""
    chance = dict(zip(PRODUCTS, (0.5, 0.0, 1.0, 0.5, 0.0, 1.0)))
    tasks = shop_tasks(150)
    c = make(tasks)
    rng = random.Random(1)

    def p(task):
        return next(value for product, value in chance.items() if product in task.text)

    for _ in range(5):
        c.record(stats(c, rng.sample(tasks[:75], 12), p))                 # the second half is never visited
    predicted = c.predict(c.vectors)[75:].T                               # (2, 75)
    truth = torch.tensor([[p(t), p(t) * (1 - p(t))] for t in tasks[75:]], dtype=torch.float64).T
    for guess, true in zip(predicted, truth):
        assert torch.corrcoef(torch.stack([guess, true]))[0, 1] > 0.7
    # and sampling makes use of it: half-and-half products (1/3 of all tasks) are drawn more than twice as often
    drawn = [t for _ in range(30) for t in c.sample(8)]
    share = sum(p(t) == 0.5 for t in drawn) / len(drawn)
    base = sum(p(t) == 0.5 for t in tasks) / len(tasks)
    assert share > 1.4 * base and {p(t) for t in drawn} == {0.0, 0.5, 1.0}


def test_ppo_takes_clusters_as_groups():
    """Eq. 7 over single rollouts: two kinds of tasks, one always solved, one every other time."""
    tasks = [t for t in shop_tasks(60) if "silk scarf" in t.text or "desk chair" in t.text]
    c = make(tasks, rl_keys={"algorithm": "ppo", "group_size": 1, "tasks_per_step": 16})
    assert c.kmeans.n_clusters == 2

    def record(chosen):
        flip = iter(range(100))
        c.record({f"g/{t.id}": rl.GroupStat(t, 1, 1.0 if "scarf" in t.text else float(next(flip) % 2), 0.0)
                  for t in chosen})

    record(tasks)
    v = dict(zip((t.id for t in tasks), c.predict(c.vectors)[:, 1].tolist()))
    scarf = [v[t.id] for t in tasks if "scarf" in t.text]
    chair = [v[t.id] for t in tasks if "chair" in t.text]
    assert max(scarf) < min(chair) and sum(chair) / len(chair) > 0.15
    before = len(c.groups)
    c.record({"g": rl.GroupStat(tasks[0], 1, 1.0, 0.0)})                   # alone in its cluster: says nothing about V
    assert len(c.groups) == before and c.visits[tasks[0].id] == 2


# ------------------------------------------------------------------------------------------------ sampling
def test_sample_caps_synthetic_tasks_and_gives_different_tasks():
    c = make(lambda_syn=0.25)
    for i in range(3):
        c.grow(FakeWriter(varied), 8)
    assert len(c.tasks) - len(c.real) == 6
    for _ in range(50):
        drawn = c.sample(8)
        assert len({t.id for t in drawn}) == 8 and sum(t.parent is not None for t in drawn) == 2
    synthetic = c.tasks[len(c.real):]
    c.record(stats(c, synthetic, lambda t: 0.0))                          # hopeless ones give their places back
    c.record(stats(c, synthetic, lambda t: 0.0))
    assert all(t.parent is None for t in c.sample(8))
    with pytest.raises(UserError, match="tasks_per_step: 61"):
        c.sample(61)


def test_the_floor_forgets_no_task_and_without_curriculum_all_are_equal():
    c = make(shop_tasks(20), floor=0.05)
    c.record(stats(c, c.real[:10], lambda t: 0.5) | stats(c, c.real[10:], lambda t: 0.0))
    assert {t.id for _ in range(60) for t in c.sample(2)} == {t.id for t in c.real}
    none = make(shop_tasks(20), floor=0.0)
    none.record(stats(none, none.real, lambda t: 0.0))
    assert len({t.id for _ in range(60) for t in none.sample(2)}) == 20   # no V anywhere: as good as uniform
    off = make(shop_tasks(20), enabled=False)
    off.record(stats(off, off.real[:10], lambda t: 0.5))
    assert off.grow(FakeWriter(varied), 8) == []
    counts = Counter(t.id for _ in range(400) for t in off.sample(2))
    assert len(counts) == 20 and min(counts.values()) > 20 and max(counts.values()) < 60                # 40 each


def test_only_training_tasks_enter():
    tasks = shop_tasks(12)
    for split in ("validation", "test"):
        with pytest.raises(ValueError, match=f"{split} split"):
            make([*tasks, Task("x", tasks[0].text, split)])
        with pytest.raises(ValueError, match=f"{split} split"):
            C.writer_rows([Task("x", tasks[0].text, split)], ShopGrammar(), None)
    c = make(tasks)
    with pytest.raises(ValueError, match="not in the curriculum"):
        c.record({"g": rl.GroupStat(Task("test-1", tasks[0].text, "test"), 8, 0.5, 0.25)})


# ------------------------------------------------------------------------------------------------ seeds
def test_seeds_are_the_tasks_of_highest_v_that_are_well_formed():
    odd = Task("train-odd", "blah blah ,", "train")
    c = make([*shop_tasks(20), odd])
    best, good = c.real[3], c.real[7]
    c.record(stats(c, [*c.real[:10], odd], lambda t: 0.5 if t in (best, odd) else 0.25 if t is good else 0.0))
    assert [group[0] for group in c.seeds(2)] == [best, good]
    assert odd not in [t for group in c.seeds(20) for t in group]


def test_seeds_at_the_cold_start_are_random_and_without_any_v_there_are_none():
    c = make()
    first, second = c.seeds(3), c.seeds(3)
    assert len(first) == 3 and first != second
    for _ in range(3):
        c.record(stats(c, c.real, lambda t: 0.0))
    assert c.seeds(3) == [] and c.grow(FakeWriter(varied), 8) == [] and len(c.sample(8)) == 8
    none = make(floor=0.0)
    none.record(stats(none, none.real, lambda t: 0.0))
    assert none.seeds(3) == []
    pairs = make(seeds=2).seeds(3)
    assert [len(group) for group in pairs] == [2, 2, 2]


# ------------------------------------------------------------------------------------------------ Eq. 6
def varied(seeds):
    """All single-part variations of the seed's attributes."""
    items = seeds[0].removesuffix(" ,").split(" , ")
    return [" , ".join([a, *items[1:]]) + " ," for a in ATTRIBUTES if a not in items]


def test_another_stage_inherits_what_is_known_of_training_tasks():
    dream = make(lambda_syn=0.5)
    dream.record(stats(dream, dream.real[:8], lambda t: 0.5))
    (new, *_) = dream.grow(FakeWriter(varied), 8)
    dream.record(stats(dream, [dream.real[0], new], lambda t: 0.0))
    real = make(lambda_syn=0.5)
    real.inherit(dream.state())
    assert [t.id for t in real.tasks] == [t.id for t in real.real] and new.id not in {g[1] for g in real.groups}
    assert len(real.groups) == 9 and real.iteration == 2
    predicted = real.predict(real.vectors)[:, 1]
    assert predicted[0] < predicted[1]                         # hopeless a moment ago


def test_candidates_are_refused_with_a_reason():
    attributes = ("wireless", "padded")
    seed = Task("train-0", text_of("desk chair", attributes, "gray", 40), "train", "[home]")
    other = Task("train-1", text_of("silk scarf", attributes, "red", 60), "train", "[home]")
    held = Task("test-0", text_of("desk chair", ("vegan", "durable"), "gray", 40), "test", "[home]")
    c = make([seed, other], [held], rl_keys={"tasks_per_step": 1}, lambda_syn=1.0)
    cases = {
        None: "malformed",
        text_of("travel chair", attributes, "gray", 40): "product",
        text_of("desk chair", attributes, "pink", 40): "option",
        text_of("desk chair", attributes, "gray", 50): "price",
        text_of("desk chair", ("shiny",), "gray", 40): "attribute",
        held.text: "held_out",
        text_of("desk chair", ("durable", "vegan"), "gray", 40): "held_out",        # in another order
        seed.text: "copy",
        text_of("silk scarf", ("padded", "wireless"), "red", 60): "copy",
        "wireless , desk chair , price 40.00 ,": "actions",                         # nothing to choose any more
        text_of("hair dryer", ("vegan",), "pink", 60): "unrelated",
        text_of("desk chair", ("vegan", "padded"), "black", 60): "",
    }
    taken = {seed.text, other.text}, set(c.parts)
    for text, reason in cases.items():
        assert c.problem(text, [seed], *taken) == reason, text
    c.record(stats(c, [seed], lambda t: 0.5))
    new = c.grow(FakeWriter(lambda texts: list(cases)), 1)
    assert [(t.id, t.parent, t.split, t.start, t.goal) for t in new] == [("syn-0", "train-0", "train", "[home]", None)]
    metrics = c.metrics()
    assert (metrics["written"], metrics["accepted"], metrics["synthetic_tasks"]) == (12, 1, 1)
    assert metrics["rejected_held_out"] == 2 and metrics["rejected_copy"] == 2
    assert c.counts["rejected_option"] == 1                                         # the grammar's own reason ..
    grammars = sum(n for name, n in c.counts.items() if name.removeprefix("rejected_") not in C.REASONS
                   and name.startswith("rejected_"))
    assert metrics["rejected_infeasible"] == grammars                               # .. has one place in the log
    assert c.grow(FakeWriter(lambda texts: list(cases)), 1) == []                   # by now it is a copy itself


def test_one_task_per_seed_and_never_twice():
    c = make(lambda_syn=0.5)
    c.record(stats(c, c.real[:8], lambda t: 0.5))
    same = text_of("lunch box", ("vegan", "compact"), "red", 20)
    new = c.grow(FakeWriter(lambda texts: [same] + varied(texts)), 8)
    assert 1 <= len(new) <= 4 and len({t.text for t in new}) == len(new) == len({t.id for t in new})
    assert {t.parent for t in new} <= {t.id for t in c.real[:8]}
    every = make(every=2)
    every.record({})
    assert every.grow(FakeWriter(varied), 8) == []
    every.record({})
    assert every.grow(None, 8) == [] and len(every.grow(FakeWriter(varied), 8)) == 2


def test_the_score_weighs_challenge_realism_and_change():
    parent = Task("train-p", text_of("silk scarf", ("vegan", "padded"), "red", 40), "train")
    c = make([*shop_tasks(60), parent])
    c.record(stats(c, c.real, lambda t: 0.5 if "silk" in t.text else 0.0))
    small = text_of("silk scarf", ("vegan", "padded"), "red", 20)                   # 2 parts of 6 differ
    hopeless = text_of("lunch box", ("vegan", "padded"), "red", 40)                 # so do these
    scores = c.rate([C.Candidate(small, 0.9), C.Candidate(small, 0.1), C.Candidate(hopeless, 0.9)], parent)
    v = c.predict(c._encode([small, hopeless]))[:, 1].tolist()
    assert v[0] > v[1] + 0.05
    expected = [(realism + 4 * V + 2 / 3) / 3 for realism, V in ((0.9, v[0]), (0.1, v[0]), (0.9, v[1]))]
    assert scores == pytest.approx(expected)


def test_instruct_models_select_with_the_second_prompt(monkeypatch):
    asked = []
    answers = ["<choice>2</choice><reason>It is  harder.</reason>", "the second",
               "<choice>9</choice><reason>x</reason>"]
    lm = SimpleNamespace(chat=True, prompt=lambda *texts: asked.append(texts), decode=lambda ids: answers[ids])
    monkeypatch.setattr(llm, "generate", lambda lm, prompts, *rest: [llm.Sample(i, False) for i in range(len(prompts))])
    offers = [("seed <go>", ["first", "second <win>"], [0.9, 0.1])] * 3
    chosen = C.TaskWriter(lm).select(offers, None)
    assert chosen == [(1, "It is harder."), (0, "score 0.90"), (0, "score 0.90")]
    assert asked[0][0] == C.SELECT_SYSTEM and asked[0][1] == "Task: seed &lt;go>\n1. first\n2. second &lt;win>"
    assert C.TaskWriter(SimpleNamespace(chat=False)).select(offers[:1], None) == [(0, "score 0.90")]


def test_writer_rows_pair_related_training_tasks():
    tasks = shop_tasks(40)
    lm = llm.tiny_lm(llm.train_tokenizer([t.text for t in tasks], 400), 1, 16, 2, 16, constructed=False)
    texts = {t.text: ShopGrammar().task_parts(t.text, "") for t in tasks}
    draw, rng = C.writer_rows(tasks, ShopGrammar(), lm), random.Random(0)
    common = []
    for _ in range(100):
        row = draw(rng)
        assert row.target[-1] == lm.eos_id
        seed = lm.decode(row.prompt).removeprefix("<vary> ").removesuffix(" <seed>")
        target = formats.parse_task(lm.decode(row.target))
        assert texts[seed] != texts[target] and texts[seed][1] & texts[target][1]
        common.append(len(texts[seed][1] & texts[target][1]))
    assert sum(common) / len(common) > 1.7
    assert lm.decode(C.writer_rows(tasks, ShopGrammar(), lm, m=2)(rng).prompt).count(" ; ") == 1
    with pytest.raises(UserError, match="no two training tasks are related"):
        C.writer_rows(tasks[:1], ShopGrammar(), lm)


def test_a_tiny_model_learns_to_write_feasible_variations():
    tasks = shop_tasks(60)
    tokenizer = llm.train_tokenizer([C.seed_prompt([t.text]) for t in tasks], 500)
    lm = llm.tiny_lm(tokenizer, 2, 48, 2, 96, constructed=False)
    llm.sft(lm, C.writer_rows(tasks, ShopGrammar(), lm), 200, 400, 1e-2, "adamw", seed=0)
    before = torch.random.get_rng_state()
    made = []
    for _ in range(2):                                                              # the same on every process
        c = make(tasks)
        c.record(stats(c, tasks[:8], lambda t: 0.5))
        made.append([c.grow(C.TaskWriter(lm, candidates=8), 16), c.metrics(), c.table()])
    new, metrics, table = made[0]
    assert made[0] == made[1] and torch.equal(before, torch.random.get_rng_state())
    assert len(new) >= 2 and metrics["accepted"] >= 3 and metrics["written"] == 32
    row = {r["id"]: r for r in table}[new[0].id]
    assert row["text"] == new[0].text and row["parent"] == new[0].parent and row["why"].startswith("score 0.")


# ------------------------------------------------------------------------------------------------ seen and saved
def test_metrics_hold_the_histogram_and_the_synthetic_success():
    c = make(lambda_syn=0.5)
    new = c.grow(FakeWriter(varied), 4)
    chance = dict(zip([*new, *c.real[:2]], (0.5, 1.0, 0.0, 0.25)))
    c.record(stats(c, chance, chance.get))
    m = c.metrics()
    assert (m["synthetic_share"], m["success_synthetic"], m["success_real"]) == (0.5, 0.75, 0.125)
    assert m["zero_variance"] == 0.5 and m["v_mean"] == pytest.approx((0.25 + 3 / 16) / 4)
    assert [m[f"v_{a}"] for a in ("0.00_0.05", "0.05_0.10", "0.10_0.15", "0.15_0.20", "0.20_0.25")] == [2, 0, 0, 1, 1]
    assert all(isinstance(x, (int, float)) for x in m.values())
    c.record(stats(c, c.real[:2], lambda t: 0.0))
    assert c.metrics().keys() == m.keys() and c.metrics()["success_synthetic"] is None     # none was rolled out


def test_resuming_is_exact_and_global_randomness_untouched():
    outside = random.getstate()

    def run(c, iterations):
        out = []
        for _ in range(iterations):
            tasks = c.sample(8)
            c.record(stats(c, tasks, lambda t: (len(t.text) % 5) / 4))
            out.append((tasks, c.grow(FakeWriter(varied), 8), c.metrics(), c.table()))
        return out

    whole = make()
    run(whole, 4)
    saved = json.loads(json.dumps(whole.state()))
    resumed = make()
    run(resumed, 1)                                                      # what was there before is replaced
    resumed.load_state(saved)
    assert resumed.state() == whole.state() and torch.equal(resumed.vectors, whole.vectors)
    assert run(whole, 4) == run(resumed, 4)
    assert random.getstate() == outside
    with pytest.raises(UserError, match="is no training task any more"):
        make(shop_tasks(3), rl_keys={"tasks_per_step": 1}).load_state(saved)
