"""The task curriculum: which tasks the agent dreams next, and new ones written by the experience model (Eq. 6, 7).

One iteration of the main loop (paper section 4.3)::

    tasks = curriculum.sample(n)                     # by reward entropy, at most a share lambda_syn of them synthetic
    ...                                              # rollouts, update
    curriculum.record(rl.group_stats(episodes))      # V of every group (Eq. 7), the same that GRPO filters by
    curriculum.grow(writer, n)                       # variations of the tasks of highest V (Eq. 6)

How this differs from the paper:

1. The paper knows V only of tasks just rolled out.  With 16 of some thousand tasks an iteration most are never seen
   twice, so V is *predicted* for all of them: a kernel average over recent groups of similar tasks (``predict``).
2. V sees outcomes only and is 0 where every rollout fails.  ``curriculum.score: graded`` takes the environment's
   graded score instead, where it has one; the RL reward stays the outcome.
3. Training tasks too are drawn by V.  A floor keeps every one of them reachable.
4. "Feasible" is no opinion of a model alone: ``Grammar.task_parts`` must accept a task, from training text alone.
5. The paper selects among candidates with a second prompt.  So do we with an instruct model; a model of a million
   parameters cannot answer that, and a score takes its place (``Curriculum.rate``).

A synthetic task has no goal in any environment: its success is what the experience model says of the task's text.

Shapes: N tasks, M recorded groups still remembered, d size of an encoder vector.
"""
from __future__ import annotations

import math
import random
import re
from collections import Counter
from dataclasses import replace
from typing import Callable, Iterable, Mapping, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import formats
import llm
import rl
import rollouts
from buffer import Encoder
from config import Config, UserError
from envs import Grammar, Task

PRIOR = (0.5, 0.25)        # (success, V) of a task that nothing is known about
PRIOR_WEIGHT = 0.1         # .. and what that counts, in fresh groups
SHARPNESS = 3              # power of the cosine: many unrelated tasks must not outvote a few similar ones
FORGET = 0.01              # a group is dropped when the half-life has brought its weight below this
CLUSTER_ROLLOUTS = 8       # PPO: rollouts of a cluster per iteration, on average
REASONS = ("malformed", "held_out", "copy", "actions", "unrelated")     # for refusing a candidate, see ``problem``
BINS = 5                   # of the histogram of V over [0, 0.25]

SELECT_SYSTEM = (
    "You choose the best variation of a task for training an agent. Four criteria: it is challenging yet feasible; it "
    "is clear and grammatical; it changes the task in a meaningful way; its attributes, options and price go together "
    "in reality. Answer in exactly this form: <choice>number</choice><reason>one short sentence</reason>")
CHOICE = re.compile(r"\s*<choice>\s*(\d{1,3})\s*</choice>\s*<reason>(.*)</reason>\s*", re.DOTALL)


# ------------------------------------------------------------------------------------------------ Eq. 7
def reward_entropy(r: Tensor) -> Tensor:
    """V = (1/n) sum_i (r^i - rbar)^2 over the n rewards of a group (Eq. 7): r (..., n) -> (...).

    The paper's name; it is the population variance.  For outcomes 0 and 1 it is p (1 - p), at most 0.25.
    """
    rbar = r.mean(-1, keepdim=True)
    return ((r - rbar) ** 2).mean(-1)


def graded_stats(episodes: Sequence[rollouts.Episode]) -> dict[str, rl.GroupStat]:
    """``rl.group_stats`` with the environment's graded score in [0, 1] in place of the outcome."""
    stats = {}
    for group, stat in rl.group_stats(episodes).items():
        scores = torch.tensor([e.score for e in episodes if e.group == group], dtype=torch.float64)
        stats[group] = replace(stat, mean=scores.mean().item(), variance=reward_entropy(scores).item())
    return stats


# ------------------------------------------------------------------------------------------------ Eq. 6
class Candidate(NamedTuple):
    """One text that the writer wrote; ``text`` is None where it is malformed, ``realism`` its mean token
    probability (geometric) in (0, 1]."""
    text: str | None
    realism: float


class TaskWriter:
    """M_task of Eq. 6: the experience model's own weights under a task prompt.  Generates, then selects."""

    def __init__(self, lm: llm.LM, candidates: int = 4, max_new_tokens: int = 64, temperature: float = 1.0):
        self.lm, self.candidates = lm, candidates
        self.max_new_tokens, self.temperature = max_new_tokens, temperature

    def generate(self, seeds: Sequence[Sequence[str]], generator: torch.Generator) -> list[list[Candidate]]:
        """``candidates`` variations of each entry of ``seeds``, which holds the texts of m seed tasks."""
        prompts = [self.lm.prompt(formats.WRITER_SYSTEM, seed_prompt(texts))
                   for texts in seeds for _ in range(self.candidates)]
        samples = llm.generate(self.lm, prompts, self.max_new_tokens, self.temperature, generator)
        texts = [None if s.cut else formats.parse_task(self.lm.decode(s.ids)) for s in samples]
        realism = [math.exp(x) for x in self.mean_logprobs(prompts, [s.ids for s in samples])]
        flat = [Candidate(*pair) for pair in zip(texts, realism)]
        return [flat[i:i + self.candidates] for i in range(0, len(flat), self.candidates)]

    @torch.no_grad()
    def mean_logprobs(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[float]:
        """Mean log-prob per token of each answer after its prompt."""
        out = []
        for start in range(0, len(prompts), 32):
            pairs = list(zip(prompts, answers))[start:start + 32]
            ids, attention_mask = llm.pad_rows([p + a for p, a in pairs], self.lm.pad_id, self.lm.device)     # (B, T)
            hidden = llm.hidden_states(self.lm, ids, attention_mask)                                   # (B, T, width)
            for i, (p, a) in enumerate(pairs):
                end = len(p) + len(a)
                logprobs, _ = llm.token_logprobs(self.lm, hidden[i, len(p) - 1:end - 1], ids[i, len(p):end])
                out.append(logprobs.mean().item())
        return out

    def select(self, offers: Sequence[tuple[str, list[str], list[float]]],
               generator: torch.Generator) -> list[tuple[int, str]]:
        """For each (seed, candidates, their scores): the index of the best candidate and why it is.

        Instruct models are asked the paper's second prompt; where they answer out of form, and for all other models,
        the highest score wins, the first one of equals.
        """
        best = [(scores.index(max(scores)), f"score {max(scores):.2f}") for _, _, scores in offers]
        if not self.lm.chat:
            return best
        prompts = ["\n".join(map(formats.escape, [f"Task: {seed}", *(f"{i}. {t}" for i, t in enumerate(texts, 1))]))
                   for seed, texts, _ in offers]
        samples = llm.generate(self.lm, [self.lm.prompt(SELECT_SYSTEM, p) for p in prompts], self.max_new_tokens, 0.0,
                               generator)
        for i, (sample, (_, texts, _)) in enumerate(zip(samples, offers)):
            match = CHOICE.fullmatch(self.lm.decode(sample.ids))
            if match and 1 <= int(match[1]) <= len(texts):
                best[i] = (int(match[1]) - 1, " ".join(match[2].split()))
        return best


def seed_prompt(texts: Sequence[str]) -> str:
    """The writer's prompt for m seed tasks."""
    return formats.writer_prompt(" ; ".join(texts))


def writer_rows(tasks: Sequence[Task], grammar: Grammar, lm: llm.LM, m: int = 1) -> Callable[[random.Random], llm.Row]:
    """Task writing as one more supervised format: ``draw(rng)`` gives m training tasks -> a related training task.

    Related: the same action types, at least one part in common, not the same parts.  A seed is the closest of eight
    random ones, so most pairs differ in few parts, as a variation does.  Raises ValueError on a task that is not of
    the training split, UserError where no two tasks are related.
    """
    refuse_held_out(tasks)
    sharing: dict[tuple, list] = {}                            # (action types, part) -> the tasks that have both
    for task in tasks:
        actions, parts = parts_or_none(grammar, task) or ("", ())
        for part in sorted(parts):
            sharing.setdefault((actions, part), []).append((task.text, parts))
    related = [group for group in sharing.values() if len({parts for _, parts in group}) > 1]
    if not related:
        raise UserError("env.train_tasks: no two training tasks are related, so task writing cannot be learned: raise "
                        "it, or set curriculum.enabled: false")

    def draw(rng: random.Random) -> llm.Row:
        group = rng.choice(related)
        target, parts = rng.choice(group)
        others = [other for other in group if other[1] != parts]
        seeds = [max(rng.choices(others, k=8), key=lambda other: len(other[1] & parts))[0] for _ in range(m)]
        return llm.Row(lm.prompt(formats.WRITER_SYSTEM, seed_prompt(seeds)),
                       lm.encode(formats.escape(target)) + [lm.eos_id])

    return draw


def parts_or_none(grammar: Grammar, task: Task) -> tuple[frozenset[str], frozenset[str]] | None:
    try:
        return grammar.task_parts(task.text, task.start)
    except ValueError:
        return None


def refuse_held_out(tasks: Iterable[Task]) -> None:
    for task in tasks:
        if task.split != "train":
            raise ValueError(f"task {task.id} is of the {task.split} split: the curriculum takes training tasks only")


# ------------------------------------------------------------------------------------------------ the curriculum
class Curriculum:
    """The task set with its statistics.  All randomness is its own; the same calls give the same tasks everywhere,
    so with several processes each holds one and records the statistics gathered from all.

    tasks: of the training split.  held_out: validation and test tasks, read only to refuse copies of them.
    Raises ValueError on a task of another split among ``tasks``.
    """

    def __init__(self, cfg: Config, tasks: Sequence[Task], held_out: Iterable[Task], grammar: Grammar,
                 encoder: Encoder):
        refuse_held_out(tasks)
        self.cfg, self.grammar, self.encoder = cfg.curriculum, grammar, encoder
        self.floor = max(self.cfg.floor, 1e-6)                 # without a floor, too, V = 0 makes no seed
        self.rng = random.Random(f"curriculum {cfg.run.seed}")
        self.real = list(tasks)
        self.held_out_texts, self.held_out_parts = set(), set()
        for task in held_out:
            self.held_out_texts.add(task.text)
            self.held_out_parts.add(parts_or_none(grammar, task))
        raw = encoder.encode([task.text for task in tasks])                                    # (N, d)
        self.centre = raw.mean(0)
        self.kmeans = None
        if cfg.rl.group_size == 1:                             # PPO: clusters of tasks take the place of groups
            from sklearn.cluster import KMeans                 # slow import, needed here only
            clusters = min(len(tasks), max(1, cfg.rl.tasks_per_step // CLUSTER_ROLLOUTS))
            self.kmeans = KMeans(clusters, n_init=1, random_state=cfg.run.seed).fit(self._centred(raw).numpy())
        self._clear()
        self._extend(self.real, self._centred(raw))

    def _clear(self) -> None:
        self.iteration = 0
        self.tasks: list[Task] = []                            # training tasks, then synthetic ones
        self.row: dict[str, int] = {}                          # task id -> row of ``tasks`` and ``vectors``
        self.vectors = torch.zeros(0, len(self.centre))        # (N, d)
        self.parts: list[tuple[frozenset[str], frozenset[str]] | None] = []
        self.groups: list[tuple[int, str, float, float]] = []  # M times (iteration, task id, success, V)
        self.visits: Counter[str] = Counter()                  # task id -> iterations in which it was rolled out
        self.why: dict[str, str] = {}                          # synthetic task -> why it was selected
        self.counts: Counter[str] = Counter()                  # written, accepted, rejected_<reason> since the start
        self.latest: dict[str, float] = {}                     # numbers of the last recorded iteration

    def _centred(self, raw: Tensor) -> Tensor:
        """(N, d) unit vectors without what all training tasks share: separators, "price", "find me".."""
        return F.normalize(raw - self.centre, dim=-1)

    def _encode(self, texts: Sequence[str]) -> Tensor:
        """(N, d); one text at a time, as numbers may depend on what shares a batch and a resumed run must agree."""
        return self._centred(torch.cat([self.encoder.encode([text]) for text in texts]))

    def _extend(self, tasks: Sequence[Task], vectors: Tensor) -> None:
        for task in tasks:
            self.row[task.id] = len(self.tasks)
            self.tasks.append(task)
            self.parts.append(parts_or_none(self.grammar, task))
        self.vectors = torch.cat([self.vectors, vectors])

    # ---------------------------------------------------------------- statistics
    def record(self, outcome: Mapping[str, rl.GroupStat], graded: Mapping[str, rl.GroupStat] | None = None) -> None:
        """Take in one iteration: group id -> statistics of all processes; V is that of ``graded`` where given.

        With one rollout a task the rollouts of a cluster are the group; a cluster that only one fell into tells
        nothing about V and is left out.  Raises ValueError on a task that is not in the task set.
        """
        names = sorted(outcome)                                # whichever process rolled a group out
        values = outcome if graded is None else graded
        ids = [outcome[g].task.id for g in names]
        if unknown := [i for i in ids if i not in self.row]:
            raise ValueError(f"task {unknown[0]} is not in the curriculum's task set")
        self.iteration += 1
        if self.kmeans is None:
            found = [([k], values[g].variance) for k, g in enumerate(names)]                   # (members, V)
        else:
            labels = self.kmeans.predict(self.vectors[[self.row[i] for i in ids]].numpy()) if ids else []
            clusters = [[k for k in range(len(ids)) if labels[k] == c] for c in sorted(set(labels))]
            rewards = torch.tensor([values[g].mean for g in names], dtype=torch.float64)
            found = [(c, reward_entropy(rewards[c]).item()) for c in clusters if len(c) > 1]
        self.groups += [(self.iteration, ids[k], outcome[names[k]].mean, v) for members, v in found for k in members]
        oldest = self.iteration + self.cfg.half_life * math.log2(FORGET)
        self.groups = [g for g in self.groups if g[0] > oldest]
        self.visits.update(ids)
        self._summarise([self.tasks[self.row[i]].parent is not None for i in ids],
                        [outcome[g].mean for g in names], [v for _, v in found])

    def _summarise(self, synthetic: list[bool], success: list[float], variances: list[float]) -> None:
        number = max(1, len(variances))
        self.latest = {"v_mean": sum(variances) / number, "zero_variance": sum(v < 1e-12 for v in variances) / number,
                       "synthetic_share": sum(synthetic) / max(1, len(synthetic))}
        for name, kind in (("success_synthetic", True), ("success_real", False)):
            own = [p for p, s in zip(success, synthetic) if s == kind]
            self.latest[name] = sum(own) / len(own) if own else None
        width = 0.25 / BINS
        bins = Counter(min(BINS - 1, int(v / width + 1e-9)) for v in variances)
        self.latest |= {f"v_{b * width:.2f}_{(b + 1) * width:.2f}": bins[b] for b in range(BINS)}

    def predict(self, vectors: Tensor) -> Tensor:
        """(success, V) expected of tasks under the current policy: vectors (N, d) -> (N, 2) fp64.

        A weighted mean over remembered groups and a prior.  A group's weight is max(0, cosine)^3 to the task, 1 for the
        task's own, halved every ``half_life`` iterations; the prior is the recent mean of all tasks, at first (1/2,
        1/4).  So a task visited just now is known by its own V, one never visited by its like, and both drift to the
        mean as the policy moves on.
        """
        start = torch.tensor(PRIOR, dtype=torch.float64)
        if not self.groups:
            return start.repeat(len(vectors), 1)
        when, ids, success, variance = zip(*self.groups)
        age = self.iteration - torch.tensor(when, dtype=torch.float64)
        fresh = 0.5 ** (age / self.cfg.half_life)                                              # (M,)
        seen = torch.tensor([success, variance], dtype=torch.float64).T                        # (M, 2)
        prior = (PRIOR_WEIGHT * start + fresh @ seen) / (PRIOR_WEIGHT + fresh.sum())           # (2,)
        known = self.vectors[[self.row[i] for i in ids]]                                       # (M, d)
        out = []
        for block in vectors.split(1024):
            weight = (block @ known.T).clamp(min=0).pow(SHARPNESS).double() * fresh           # (block, M)
            out.append((PRIOR_WEIGHT * prior + weight @ seen) / (PRIOR_WEIGHT + weight.sum(1, keepdim=True)))
        return torch.cat(out) if out else start.repeat(0, 1)

    # ---------------------------------------------------------------- which tasks next
    def quota(self, n: int) -> int:
        """The largest number of synthetic tasks among n."""
        return int(self.cfg.lambda_syn * n + 1e-9) if self.cfg.enabled else 0

    def sample(self, n: int) -> list[Task]:
        """n different tasks, drawn with probability rising in V; not below ``floor``, so that none is forgotten.

        At most ``quota(n)`` are synthetic; a synthetic task whose V is below the floor gives its place back.  With the
        curriculum off all training tasks are equally likely.  Raises UserError for more tasks than there are.
        """
        if n > len(self.real):
            raise UserError(f"rl.tasks_per_step: {n} is more than the {len(self.real)} training tasks: lower it")
        V = self.predict(self.vectors)[:, 1].tolist() if self.cfg.enabled else [1.0] * len(self.tasks)

        def draw(rows: list[int], count: int) -> list[Task]:   # weighted, without replacement (Efraimidis, Spirakis)
            key = {i: math.log(1.0 - self.rng.random()) / max(V[i], self.floor) for i in rows}
            return [self.tasks[i] for i in sorted(rows, key=key.__getitem__, reverse=True)[:count]]

        worth = [i for i in range(len(self.real), len(self.tasks)) if V[i] >= self.floor]
        synthetic = draw(worth, self.quota(n))
        chosen = draw(list(range(len(self.real))), n - len(synthetic)) + synthetic
        self.rng.shuffle(chosen)                               # whatever shares them out, shares out a mixture
        return chosen

    def seeds(self, count: int) -> list[list[Task]]:
        """``count`` times m seed tasks, of highest V first: well formed and with V >= ``floor``.

        Tasks rolled out in this iteration come first, by their own V (Eq. 7); then tasks whose V is predicted.  Equals
        are ordered by predicted V, then at random, as all are before the first iteration.  Where nothing has any
        V there is no seed: a variation of it would teach nothing either.
        """
        predicted = self.predict(self.vectors)[:, 1].tolist()
        measured = {task: v for when, task, _, v in self.groups if when == self.iteration}
        rank = {}
        for i, task in enumerate(self.tasks):
            V = measured.get(task.id, predicted[i])
            if self.parts[i] is not None and V >= self.floor:
                rank[i] = (task.id not in measured, -V, -round(predicted[i], 9), self.rng.random())
        ranked, m = [self.tasks[i] for i in sorted(rank, key=rank.__getitem__)], self.cfg.seeds
        return [ranked[i:i + m] for i in range(0, min(len(ranked), count * m), m)]

    # ---------------------------------------------------------------- Eq. 6: new tasks
    def grow(self, writer: TaskWriter | None, n: int) -> list[Task]:
        """Add variations of the best seeds, as many as an iteration of n tasks may hold; every ``every`` iterations.

        Of the candidates of one seed that pass ``problem`` the writer selects one.  A new task starts where its
        parent (the first of its seeds) starts.  Without a writer nothing is added: the real environment has no goals
        for synthetic tasks.  Returns the new tasks.
        """
        if writer is None or self.iteration % self.cfg.every or not self.quota(n):
            return []
        seeds = self.seeds(self.quota(n))
        generator = torch.Generator(writer.lm.device).manual_seed(self.rng.getrandbits(62))
        written = writer.generate([[task.text for task in group] for group in seeds], generator)
        taken_texts, taken_parts = {task.text for task in self.tasks}, set(self.parts)
        offers, parents = [], []
        for group, candidates in zip(seeds, written):
            good = []
            for candidate in candidates:
                reason = self.problem(candidate.text, group, taken_texts, taken_parts)
                self.counts.update(["written", f"rejected_{reason}" if reason else "accepted"])
                if not reason:
                    good.append(candidate)
                    taken_texts.add(candidate.text)
                    taken_parts.add(self.grammar.task_parts(candidate.text, group[0].start))
            if good:
                parents.append(group[0])
                offers.append((group[0].text, [c.text for c in good], self.rate(good, group[0])))
        new = []
        for parent, (_, texts, _), (best, why) in zip(parents, offers, writer.select(offers, generator)):
            name = f"syn-{len(self.tasks) - len(self.real) + len(new)}"
            new.append(Task(name, texts[best], "train", parent.start, parent.id))
            self.why[name] = why
        if new:
            self._extend(new, self._encode([task.text for task in new]))
        return new

    def problem(self, text: str | None, seeds: Sequence[Task], taken_texts: set[str], taken_parts: set) -> str:
        """Why a candidate is refused, in one word, or "" for a good one.  Structure is compared as well as text, so
        that a held-out task in another order of words is no new task."""
        if text is None:
            return "malformed"
        try:
            actions, parts = structure = self.grammar.task_parts(text, seeds[0].start)
        except ValueError as error:
            return str(error)
        of_seeds = [self.parts[self.row[seed.id]] for seed in seeds]
        if text in self.held_out_texts or structure in self.held_out_parts:
            return "held_out"
        if text in taken_texts or structure in taken_parts:
            return "copy"
        if actions != of_seeds[0][0]:
            return "actions"
        return "" if any(parts & own for _, own in of_seeds) else "unrelated"

    def rate(self, candidates: Sequence[Candidate], parent: Task) -> list[float]:
        """The paper's criteria as numbers in [0, 1], averaged: clear and realistic (the writer's own probability per
        token), challenging yet feasible (4 V, expected from similar tasks), a meaningful change (best where half of
        all parts are those of both: less is a near copy, more is no variation)."""
        V = self.predict(self._encode([c.text for c in candidates]))[:, 1].tolist()
        _, old = self.parts[self.row[parent.id]]
        scores = []
        for candidate, v in zip(candidates, V):
            _, new = self.grammar.task_parts(candidate.text, parent.start)
            changed = len(old ^ new) / len(old | new)
            scores.append((candidate.realism + 4 * v + 1 - abs(2 * changed - 1)) / 3)
        return scores

    # ---------------------------------------------------------------- seen by a person, saved and restored
    def metrics(self) -> dict[str, float]:
        """Of the last iteration: V (mean, histogram), share of groups with V = 0, share and success of synthetic
        tasks; since the start: candidates written, accepted and rejected by reason, size of the synthetic pool.

        Always the same keys: what the grammar refuses (``counts`` has its reasons) is ``rejected_infeasible``."""
        rejected = {reason: self.counts[f"rejected_{reason}"] for reason in REASONS}
        every = sum(n for name, n in self.counts.items() if name.startswith("rejected_"))
        rejected["infeasible"] = every - sum(rejected.values())
        return (self.latest | {"written": self.counts["written"], "accepted": self.counts["accepted"]}
                | {f"rejected_{reason}": n for reason, n in rejected.items()}
                | {"synthetic_tasks": len(self.tasks) - len(self.real)})

    def table(self) -> list[dict]:
        """All tasks, highest V first; V and success are estimates for the current policy."""
        rows = [{"id": task.id, "parent": task.parent, "visits": self.visits[task.id], "V": v, "success": p,
                 "why": self.why.get(task.id, ""), "text": task.text}
                for task, (p, v) in zip(self.tasks, self.predict(self.vectors).tolist())]
        return sorted(rows, key=lambda row: -row["V"])

    def state(self) -> dict:
        """Everything that changes, as JSON can hold it exactly; the training tasks are not part of it."""
        version, numbers, gauss = self.rng.getstate()
        return {"iteration": self.iteration, "rng": [version, list(numbers), gauss],
                "groups": [list(group) for group in self.groups],
                "synthetic": [[t.id, t.text, t.start, t.parent] for t in self.tasks[len(self.real):]],
                "visits": dict(self.visits), "why": dict(self.why), "counts": dict(self.counts),
                "latest": dict(self.latest)}

    def inherit(self, state: dict) -> None:
        """Start with what another stage learned about the training tasks.  Its synthetic tasks stay behind: the real
        environment has no goals for them."""
        self.iteration = state["iteration"]
        self.groups = [tuple(group) for group in state["groups"] if group[1] in self.row]

    def load_state(self, state: dict) -> None:
        """Inverse of ``state``, on a curriculum over the same training tasks; raises UserError on other ones."""
        synthetic = [Task(name, text, "train", start, parent) for name, text, start, parent in state["synthetic"]]
        real = self.vectors[:len(self.real)]
        self._clear()
        self._extend(self.real, real)
        if synthetic:
            self._extend(synthetic, self._encode([task.text for task in synthetic]))
        version, numbers, gauss = state["rng"]
        self.rng.setstate((version, tuple(numbers), gauss))
        self.iteration, self.groups = state["iteration"], [tuple(g) for g in state["groups"]]
        self.visits, self.counts = Counter(state["visits"]), Counter(state["counts"])
        if gone := sorted(set(self.visits) - set(self.row)):
            raise UserError(f"checkpoint: its curriculum holds task {gone[0]}, which is no training task any more: "
                            "start a new run or restore env.data")
        self.why, self.latest = dict(state["why"]), dict(state["latest"])
