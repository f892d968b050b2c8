"""What a run did, to be read by people: one HTML file over several runs, and single episodes in the terminal.

    python dreamgym.py report runs/webshop-cpu-s0 runs/webshop-cpu-s1          writes report.html
    python dreamgym.py show runs/webshop-cpu-s0 --episode 3

The HTML file holds everything itself: inline SVG, a few lines of plain JavaScript, no library, no address of anything
else.  It opens from disk, and a policy in its head forbids it to load anything.  All text of a run is data to it:
escaped where it stands in the page, and set as text where the script shows it.

Runs that differ in nothing but their seed are one method: their curves are means over the seeds with a 95 %
t-interval.  Shares over independent tasks have at least the Wilson interval of these tasks, with one seed too.

An episode shows what the policy saw.  The files keep transitions only, so two things are made again from them: the
demonstrations, by filling the replay buffer as the run did (it is deterministic), and the real counterpart of a
dreamed episode, by playing its actions in the real environment.  Both need the environment's data.  Replayed
transitions are counted and named in the report; nothing learns from them.
"""
from __future__ import annotations

import difflib
import itertools
import json
import os
import shutil
import textwrap
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal, Sequence

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from scipy.special import stdtrit

import config
import fidelity
import rollouts
from buffer import Transition, read_transitions
from config import Config, UserError
from envs import Task, World, open_world
from runs import Ledger, Progress, write_whole

STAGES = ("dream", "s2r", "real")
POLICIES = {"cloned": "behaviour cloning", "dream": "RL in the dream", "s2r": "dream, then sim-to-real",
            "real": "RL in the real environment"}
FILES = ("dream.jsonl", "real.jsonl", "offline.jsonl")          # where a run keeps episodes: dreamed, evaluated, scripted
CURVES = (                                                      # (stage, metric, title, top of the axis)
    ("dream", "v_mean", "Reward entropy V (Eq. 7), mean over groups", 0.25),
    ("dream", "ref_k3", "KL to the cloned policy, k3, nats a token", None),
    ("dream", "entropy", "Token entropy of the policy, nats", None),
    ("dream", "invalid", "Invalid actions, share of the turns", None),
    ("policy", "loss", "Loss of behaviour cloning", None),
    ("mexp", "loss", "Loss of the experience model (Eq. 5)", None))
DREAMED, REAL = 48, 12                                          # episodes of the browser, over all runs


# ------------------------------------------------------------------------------------------------ reading a run
@dataclass
class RunData:
    """What a run folder holds; parts that are not there yet are empty.  ``missing`` says why there is no world."""
    folder: Path
    cfg: Config
    missing: str
    metrics: dict[str, list[dict]]
    results: dict
    fidelity: dict[str, dict]                                   # file name -> measures
    ledger: dict[str, dict[str, int]]
    starts: list[dict]

    @property
    def name(self) -> str:
        return self.folder.name


def run_config(folder: Path) -> tuple[Config, str]:
    """(configuration of a run folder, "" or why its environment cannot be opened here).

    Raises UserError where the folder is no run folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the folder of a run, for example runs/webshop-cpu-s0")
    if not (folder / "config.yaml").exists():
        raise UserError(f"{folder}: holds no config.yaml, so it is no run folder")
    try:
        return config.load_run(folder), ""
    except UserError as error:                                  # most likely a run from another machine
        try:
            return config.load_run(folder, ["env.data=null", "env.human_goals=false"]), str(error)
        except UserError:
            raise error from None


def whole_lines(path: Path) -> list[str]:
    """The finished lines of a file that a run may be writing to; none where there is no file."""
    if not path.exists():
        return []
    try:
        data = path.read_bytes()
        return data[:data.rfind(b"\n") + 1].decode("utf-8").split("\n")[:-1]          # not at U+2028 inside a text
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def read_lines(path: Path) -> list[Transition]:
    """The finished transitions of a file that a run may be writing to.  Raises UserError for a damaged line."""
    found = []
    for number, line in enumerate(whole_lines(path), 1):
        try:
            found.append(Transition.from_json(line))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} line {number}: {str(error).removeprefix(': ')}") from None
    return found


# What readers of a run's files rely on; a file of another shape is damaged.  More keys may be there.
class Shape(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Ledgers(Shape):
    transitions: dict[str, int]
    episodes: dict[str, int]


class Success(Shape):
    success: config.Share
    interval: tuple[float, float]


class Policy(Shape):
    greedy: Success
    sampled: Success
    t1: Success


class Results(Shape):
    policies: dict[Literal["cloned", "dream", "s2r", "real"], Policy]
    tasks: config.Count
    rules: dict[str, float]
    real: Ledgers


class Measure(Shape):
    value: float | None
    low: float | None
    high: float | None
    n: int


class Gate(Shape):
    false_success: Measure
    false_failure: Measure


Fidelity = create_model("Fidelity", __base__=Shape, **{
    name: (dict[str, Measure] if name in fidelity.NESTED else Measure, None) for name, *_ in fidelity.ROWS if name})


class Stage(Shape):
    ledger: Ledgers


class Stages(Shape):
    done: dict[str, Stage]


class Start(Shape):
    commit: str | None


class Account(Shape):
    __pydantic_extra__: dict[str, float]


class Line(Shape):
    __pydantic_extra__: dict[str, float | bool | None]
    stage: str
    step: int


def shaped(text: bytes | str, shape: Any) -> Any:
    """JSON of a run as plain values.  Raises ValueError where it is none, or not of type ``shape``."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    try:
        TypeAdapter(shape).validate_json(text)                  # JSON has no tuples, so its lists may stand for them
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))[:80]}: {first['msg']}") from None
    return value


def read_json(path: Path, shape: Any, default: Any = None) -> Any:
    """A JSON file of a run; ``default`` where it is not there, if one is given.  Raises UserError."""
    if default is not None and not path.exists():
        return default
    try:
        return shaped(path.read_bytes(), shape)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        raise UserError(f"{path}: damaged: {error}; restore the file") from None


def read_account(folder: Path) -> dict[str, float]:
    """What a run has asked of its server so far (``dreamgym.keep_account``).  Raises UserError for a damaged file."""
    return read_json(Path(folder) / "server.json", Account, {})


def read_run(folder: Path) -> RunData:
    """Raises UserError for a folder that is no run, and for damaged files."""
    folder = Path(folder)
    cfg, missing = run_config(folder)
    metrics: dict[str, list[dict]] = {}
    for number, text in enumerate(whole_lines(folder / "metrics.jsonl"), 1):
        try:
            line = shaped(text, Line)
        except ValueError as error:
            raise UserError(f"{folder / 'metrics.jsonl'} line {number}: damaged: {error}; restore the file") from None
        metrics.setdefault(line["stage"], []).append(line)
    done = read_json(folder / "stages.json", Stages, {"done": {}})["done"]
    results = read_json(folder / "results.json", Results, {})
    last = list(done.values())[-1]["ledger"] if done else Ledger().state()
    return RunData(folder, cfg, missing, metrics, results,
                   {path.name: read_json(path, Fidelity) for path in sorted(folder.glob("fidelity*.json"))},
                   results.get("real", last), read_json(folder / "run.json", list[Start], []))


def methods(runs: Sequence[RunData]) -> list[tuple[str, list[RunData]]]:
    """Runs that differ only in their seed, together; each group with a name that tells it from the others."""
    groups: list[list[RunData]] = []
    for run in runs:
        for group in groups:
            if not differences(group[0], run):
                group.append(run)
                break
        else:
            groups.append([run])
    return [(", ".join(run.name for run in group), group) for group in groups]


def differences(a: RunData, b: RunData) -> list[str]:
    return [d for d in config.describe_differences(a.cfg, b.cfg) if not d.startswith("run.seed:")]


# ------------------------------------------------------------------------------------------------ means and bands
def band(values: Sequence[float], tasks: int = 0) -> tuple[float, float | None, float | None]:
    """(mean, low, high) over seeds: 95 % t-interval; of one seed the Wilson interval over ``tasks``, or no band.

    Few seeds may agree by chance, so the band of a share is never narrower than the Wilson interval.
    """
    n = len(values)
    mean = sum(values) / n
    low, high = fidelity.wilson(mean * tasks, tasks) if tasks else (mean, mean)
    if n == 1:
        return (mean, low, high) if tasks else (mean, None, None)
    deviation = (sum((v - mean) ** 2 for v in values) / (n - 1)) ** 0.5
    half = float(stdtrit(n - 1, 0.975)) * deviation / n ** 0.5
    return mean, min(low, mean - half), max(high, mean + half)


@dataclass
class Series:
    """A curve: points (x, mean, low or None, high or None)."""
    label: str
    points: list[tuple[float, float, float | None, float | None]]


def curve(label: str, group: Sequence[RunData], stage: str, metric: str, tasks: int = 0) -> Series:
    """A metric over the steps that all runs of the group have reached, where it was measured."""
    found = [{line["step"]: line[metric] for line in run.metrics.get(stage, []) if line.get(metric) is not None}
             for run in group]
    steps = sorted(set.intersection(*map(set, found)))
    return Series(label, [(step, *band([one[step] for one in found], tasks)) for step in steps])


# ------------------------------------------------------------------------------------------------ SVG
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 220, 42, 18, 10, 30


def ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers from low to high."""
    step = 10.0 ** -9
    for factor in itertools.cycle((2, 2.5, 2)):
        if (high - low) / step <= 5:
            break
        step *= factor
    first = round(low / step)
    return [i * step for i in range(first, first + 7) if low - 1e-12 <= i * step <= high + step * 1e-6]


def chart(title: str, series: Sequence[Series], top: float | None = None, x_label: str = "iteration") -> str:
    """A figure with its legend; the y-axis begins at 0.  Bands are clipped to the axis."""
    series = [s for s in series if s.points]
    heading = f"<h3>{escape(title)}</h3>"
    if not series:
        return f"<figure>{heading}<p class=quiet>not measured yet</p></figure>"
    xs = [p[0] for s in series for p in s.points]
    high = top or max([p[1] for s in series for p in s.points] + [1e-6]) * 1.1
    first, last = min(xs), max(max(xs), min(xs) + 1)

    def x(value: float) -> float:
        return LEFT + (value - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - min(max(value, 0), high) / high * (HEIGHT - TOP - BOTTOM)

    parts = [f'<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={y(t):.1f} y2={y(t):.1f} />'
             f'<text x={LEFT - 5} y={y(t) + 4:.1f} text-anchor=end>{t:.4g}</text>' for t in ticks(0, high)]
    parts += [f'<text x={x(t):.1f} y={HEIGHT - BOTTOM + 14} text-anchor=middle>{t:g}</text>'
              for t in ticks(first, last) if t == int(t)]
    parts.append(f'<text x={(LEFT + WIDTH - RIGHT) / 2} y={HEIGHT - 3} text-anchor=middle>{escape(x_label)}</text>')
    for number, s in enumerate(series):
        colour = f"c{number % 6}"
        banded = [p for p in s.points if p[2] is not None]
        if banded:
            outline = [(x(p[0]), y(p[3])) for p in banded] + [(x(p[0]), y(p[2])) for p in reversed(banded)]
            if len(banded) == 1:                                # a single point: a bar
                (at, above), (_, below) = outline
                outline = [(at - 3, above), (at + 3, above), (at + 3, below), (at - 3, below)]
            corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in outline)
            parts.append(f'<polygon class="band {colour}" points="{corners}" />')
        line = " ".join(f"{x(p[0]):.1f},{y(p[1]):.1f}" for p in s.points)
        parts.append(f'<polyline class="line {colour}" points="{line}" />')
        radius = 3 if len(s.points) <= 15 else 1.5
        for at, mean, low, upper in s.points:
            interval = "" if low is None else f" [{low:.3g}, {upper:.3g}]"
            parts.append(f'<circle class="dot {colour}" cx={x(at):.1f} cy={y(mean):.1f} r={radius}>'
                         f"<title>{escape(s.label)}, {at:g}: {mean:.4g}{interval}</title></circle>")
    legend = "".join(f'<span><i class="key c{n % 6}"></i>{escape(s.label)}</span>' for n, s in enumerate(series))
    return (f'<figure>{heading}<div class=legend>{legend}</div><svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img '
            f'aria-label="{escape(title)}">{"".join(parts)}</svg></figure>')


def success_chart(name: str, group: Sequence[RunData], stage: str) -> str:
    tasks = min(run.cfg.eval.validation_tasks for run in group)
    played = "dreamed" if stage == "dream" else "real, in training"
    heading = {"dream": "Success in the dream and in reality", "s2r": "Success in sim-to-real training",
               "real": "Success in real training"}[stage]
    return chart(f"{heading}: {name}", [
        curve(f"{played}, training tasks", group, stage, "success"),
        curve("real, greedy, validation tasks", group, stage, "real_greedy", tasks),
        curve("real, T = 1, validation tasks", group, stage, "real_sampled", tasks)], 1.0)


# ------------------------------------------------------------------------------------------------ tables
def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are plain text; the first column is a heading, the others are numbers."""
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
    body = "".join(f"<tr><th>{escape(row[0])}</th>{cells('td', row[1:])}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{cells('th', head)}</tr>{body}</table></div>"


def interval(value: float | None, low: float | None, high: float | None, per_cent: bool = True) -> str:
    """Breaks only before the bracket."""
    if value is None:
        return "–"
    scale, digits = (100, 1) if per_cent else (1, 3)
    text = f"{scale * value:.{digits}f}" + ("\u00a0%" if per_cent else "")
    return text if low is None else f"{text} [{scale * low:.{digits}f},\u00a0{scale * high:.{digits}f}]"


def results_table(groups: Sequence[tuple[str, list[RunData]]]) -> str:
    """Final success of every policy on the test tasks, over the finished runs of each method."""
    rows = []
    for name, group in groups:
        finished = [run.results for run in group if run.results]
        for label in dict.fromkeys(label for results in finished for label in results["policies"]):
            cells = []
            for how in ("greedy", "sampled", "t1"):
                values = [r["policies"][label][how]["success"] for r in finished if label in r["policies"]]
                mean, low, high = band(values, finished[0]["tasks"])
                cells.append(interval(mean, max(0.0, low), min(1.0, high)))
            rows.append([POLICIES[label], *cells, str(len(values)), name])
        for rule, rate in (finished[0]["rules"] if finished else {}).items():
            rows.append([f"rule: {rule}", interval(rate, None, None), "–", "–", "", name])
    if not rows:
        return "<p class=quiet>No run has finished its evaluation yet.</p>"
    temperature = groups[0][1][0].cfg.eval.temperature
    return table(["policy", "greedy", f"T = {temperature:g}", "T = 1", "seeds", "runs"], rows) + (
        "<p class=quiet>In brackets 95 % intervals: over seeds (t), at least that over the tasks (Wilson).</p>")


def fidelity_table(runs: Sequence[RunData]) -> str:
    """The measures of every fidelity file, one column each, named as in ``fidelity.table``."""
    columns = [(f"{run.name} {file}" if len(run.fidelity) > 1 else run.name, found)
               for run in runs for file, found in run.fidelity.items()]
    if not columns:
        return "<p class=quiet>Not measured yet.</p>"
    first, rows, detailed = [], [], []                          # the judgement of outcomes is what RL lives on
    for name, label, per_cent in fidelity.ROWS:
        nested = name in fidelity.NESTED
        parts = dict.fromkeys(part for _, found in columns for part in found.get(name, {})) if nested else [None]
        for part in parts:
            ones = [(found.get(name, {}).get(part) if nested else found.get(name)) for _, found in columns]
            if any(ones):
                place = detailed if nested else first if name in ("false_success", "false_failure") else rows
                place.append([part or label, *(f"{interval(one['value'], one['low'], one['high'], per_cent)}, "
                                               f"n\u00a0=\u00a0{one['n']:,}" if one else "–" for one in ones)])
    head = ["", *(name for name, _ in columns)]
    return table(head, first + rows) + ("<details><summary>Next state exact, by move and by field</summary>"
                                        f"{table(head, detailed)}</details>" if detailed else "")


def ledger_table(runs: Sequence[RunData]) -> str:
    def cell(run: RunData, *purposes: str) -> str:
        transitions, episodes = (sum(run.ledger[what].get(p, 0) for p in purposes) for what in ("transitions", "episodes"))
        return f"{transitions:,} ({episodes:,})"

    rows = [[f"{purpose}{' (trains)' if purpose in Ledger.TRAINING else ''}", *(cell(run, purpose) for run in runs)]
            for purpose in Ledger.PURPOSES]
    rows.append(["training in all", *(cell(run, *Ledger.TRAINING) for run in runs)])
    return table(["real transitions (episodes)", *(run.name for run in runs)], rows)


# ------------------------------------------------------------------------------------------------ episodes
@dataclass
class Replayed:
    """The real counterpart of one dreamed turn."""
    next_state: str
    done: bool
    success: bool


class Episodes:
    """The episodes of a run folder, by id, in order of their first line; what is not in the files is made again.

    Raises UserError for damaged lines and, in ``demonstrations`` and ``replay``, where the world cannot be opened.
    """

    def __init__(self, folder: Path, cfg: Config, missing: str = ""):
        self.folder, self.cfg, self.missing = Path(folder), cfg, missing
        self.by_file: dict[str, dict[str, list[Transition]]] = {}
        for name in FILES:
            grouped, path = self.by_file.setdefault(name, {}), self.folder / name
            whole = name == "offline.jsonl" and path.exists()   # nothing is being written to it
            for t in read_transitions(path) if whole else read_lines(path):
                grouped.setdefault(t.episode, []).append(t)
        self.world: World | None = None
        self.replayed = 0                                       # real transitions that replays have cost

    def open_world(self) -> World:
        if self.missing:
            raise UserError(self.missing)
        if self.world is None:
            self.world = open_world(self.cfg.env)
            self.env, self.tasks = self.world.make(), {t.id: t for t in self.world.tasks["train"]}
        return self.world

    def find(self, wanted: str) -> list[Transition]:
        """An episode by its id, or by its number among the dreamed ones (or, without any, among the real ones):
        1 is the first, -1 the last.  Raises UserError where there is none."""
        for episodes in self.by_file.values():
            if wanted in episodes:
                return episodes[wanted]
        kept = next((episodes for episodes in self.by_file.values() if episodes), {})
        if not kept:
            raise UserError(f"{self.folder}: holds no episodes yet ({', '.join(FILES)})")
        try:
            number = int(wanted)
        except ValueError:
            near = difflib.get_close_matches(wanted, [i for e in self.by_file.values() for i in e], 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{self.folder}: no episode {wanted}{hint}") from None
        if not 1 <= abs(number) <= len(kept):
            raise UserError(f"{self.folder}: no episode {number}; it holds 1 to {len(kept):,}, -1 is the last")
        return list(kept.values())[number - 1 if number > 0 else number]

    def demonstrations(self, episodes: Sequence[list[Transition]]) -> dict[str, list[list[Transition]]]:
        """Dreamed episode -> for each turn what the experience model was shown: the replay buffer is filled with
        the offline data and, iteration by iteration, with the dreams before the episode's own."""
        import dreamgym                                         # here, because dreamgym imports this module
        wanted: dict[int, list[list[Transition]]] = {}
        for episode in episodes:
            wanted.setdefault(iteration(episode), []).append(episode)
        offline = read_transitions(self.folder / "offline.jsonl")
        world = self.open_world()
        grammar = dreamgym.training_grammar(world, offline)
        buffer = dreamgym.new_buffer(self.cfg, grammar, world, offline)
        shown: dict[str, list[list[Transition]]] = {}
        for at, group in itertools.groupby(read_lines(self.folder / "dream.jsonl"), key=lambda t: iteration([t])):
            for episode in wanted.get(at, []):
                shown[episode[0].episode] = buffer.query([t.state for t in episode], [t.action for t in episode],
                                                         self.cfg.retrieval.k, [t.task_id for t in episode],
                                                         [t.episode for t in episode])
            if at >= max(wanted, default=-1):
                break
            buffer.add(list(group))
        return shown

    def replay(self, episode: list[Transition]) -> list[Replayed] | None:
        """The same actions in the real environment, as far as its episode goes; None for a task without a real goal."""
        self.open_world()
        task: Task | None = self.tasks.get(episode[0].task_id)
        if task is None:
            return None
        self.env.reset(task)
        found: list[Replayed] = []
        for t in episode:
            state, _, done, over, info = self.env.step(t.action)
            found.append(Replayed(state, done, info["success"]))
            if done or over:
                break
        self.replayed += len(found)
        return found


def iteration(episode: list[Transition]) -> int:
    """Iteration of a dreamed episode, whose id is ``dream-<iteration>-<process>/<number>``; -1 for other ones."""
    kind, _, rest = episode[0].episode.partition("-")
    number = rest.partition("-")[0]
    return int(number) if kind == "dream" and number.isdecimal() and len(number) < 9 else -1


def outcome(success: bool, done: bool) -> str:
    return "success" if success else "failure" if done else "not finished"


def choose(episodes: Sequence[list[Transition]], limit: int) -> list[list[Transition]]:
    """At most ``limit`` episodes: spread over the iterations (of real ones: over the policies that played them),
    of different tasks, successes and others in turn."""
    queues: dict[tuple[int, str], dict[bool, list[list[Transition]]]] = {}
    for episode in episodes:
        origin = iteration(episode), "" if iteration(episode) >= 0 else episode[0].episode.split("-")[0]
        queues.setdefault(origin, {True: [], False: []})[episode[-1].success].append(episode)
    origins = sorted(queues)
    count = min(len(origins), max(1, limit // 2))               # two of each, where there are enough
    origins = [origins[i * (len(origins) - 1) // max(1, count - 1)] for i in range(count)]
    chosen, seen = [], set()
    for success in itertools.cycle((True, False)):
        left = [queues[origin][success] for origin in origins if queues[origin][success]]
        if len(chosen) >= limit or not any(queue for origin in origins for queue in queues[origin].values()):
            return sorted(chosen[:limit], key=iteration)
        for queue in left:
            number = next((i for i, e in enumerate(queue) if e[0].task_id not in seen), 0)
            seen.add(queue[number][0].task_id)
            chosen.append(queue.pop(number))


def marked(dreamed: str, real: str) -> tuple[list[list], list[list]]:
    """Both texts as [text, differs?] pieces, compared word by word."""
    a, b = dreamed.split(" "), real.split(" ")
    left, right = [], []
    for kind, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if a1 > a0:
            left.append([" ".join(a[a0:a1]), kind != "equal"])
        if b1 > b0:
            right.append([" ".join(b[b0:b1]), kind != "equal"])
    return left, right


def episode_data(episode: list[Transition], run: str, demos: list[list[Transition]] | None,
                 replayed: list[Replayed] | None) -> dict:
    """An episode as the page's script reads it."""
    first, last = episode[0], episode[-1]
    dreamed = first.source == "dream"
    said = outcome(last.success, last.done)
    label = f"{said}" + (f", real {outcome(replayed[-1].success, replayed[-1].done)}" if replayed else "")
    turns = []
    for i, t in enumerate(episode):
        real = replayed[i] if replayed and i < len(replayed) else None
        left, right = marked(t.next_state, real.next_state) if real else ([[t.next_state, False]], None)
        turns.append({"state": t.state, "action": t.action, "think": t.reasoning, "next": left,
                      "reward": t.reward, "end": outcome(t.success, True) if t.done else "", "real": right,
                      "realReward": float(real.success) if real else 0,
                      "realEnd": outcome(real.success, True) if real and real.done else "",
                      "demos": [{"from": d.episode, "state": d.state, "action": d.action, "next": d.next_state,
                                 "end": outcome(d.success, True) if d.done else ""}
                                for d in (demos[i] if demos else [])]})
    disagrees = bool(replayed) and (replayed[-1].success != last.success)
    return {"id": first.episode, "run": run, "dreamed": dreamed, "label": label, "task": first.task,
            "taskId": first.task_id, "kind": "real" if not dreamed else "disagrees" if disagrees else said, "turns": turns,
            "replayed": replayed is not None}


def browser_data(runs: Sequence[RunData]) -> tuple[list[dict], list[str], int]:
    """(episodes for the browser, what could not be made again and why, real transitions that the replays cost)."""
    found, notes, cost = [], [], 0
    for run in runs:
        episodes = Episodes(run.folder, run.cfg, run.missing)
        dreamed = choose(list(episodes.by_file["dream.jsonl"].values()), max(1, DREAMED // len(runs)))
        demos: dict[str, list[list[Transition]]] = {}
        replays: dict[str, list[Replayed] | None] = {}
        try:
            demos = episodes.demonstrations(dreamed) if dreamed else {}
            with Progress(f"report {run.name}", len(dreamed)) as progress:
                for e in dreamed:
                    replays[e[0].episode] = episodes.replay(e)
                    progress.update(1)
        except UserError as error:
            replays.clear()                                    # all or none
            notes.append(f"{run.name}: no demonstrations and no real counterparts: {error}")
        cost += episodes.replayed
        found += [episode_data(e, run.name, demos.get(e[0].episode), replays.get(e[0].episode)) for e in dreamed]
        for name in FILES[1:]:
            real = choose(list(episodes.by_file[name].values()), max(1, REAL // len(runs)))
            found += [episode_data(e, run.name, None, None) for e in real]
    return found, notes, cost


# ------------------------------------------------------------------------------------------------ the page
STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5d6776; --paper: #fff; --panel: #f4f6f8; --rule: #d9dee5;
  --mark: #ffd7a8; --good: #14714a; --bad: #b3261e; --c0: #1f6fc4; --c1: #c4550f; --c2: #2b8a5a; --c3: #8a4fb8;
  --c4: #a17a00; --c5: #b03a6e }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa5b4; --paper: #14181e; --panel: #1d232b;
  --rule: #36404c; --mark: #6b4413; --good: #5fcf9d; --bad: #ff8f86; --c0: #6fb1ff; --c1: #ff9d5c; --c2: #63cf99;
  --c3: #c79af0; --c4: #e0bd4a; --c5: #f08fb6 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1180px; padding: 16px; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper) }
h1 { font-size: 1.5rem; margin: .2em 0 } h2 { font-size: 1.2rem; margin: 2em 0 .5em } h3 { font-size: 1rem; margin: 0 }
p { max-width: 75ch } .quiet { color: var(--soft) } .wide { overflow-x: auto }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 16px }
figure { margin: 0; padding: 12px; background: var(--panel); border-radius: 8px; min-width: 0; display: flex;
  flex-direction: column }
svg { display: block; width: 100%; height: auto; margin-top: auto; font: 11px system-ui, sans-serif; fill: var(--soft) }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; font-size: .85rem; color: var(--soft) }
.key { display: inline-block; width: 14px; height: 3px; margin-right: 5px; vertical-align: middle;
  background: var(--c) }
.grid { stroke: var(--rule) } .line { fill: none; stroke: var(--c); stroke-width: 2 } .dot { fill: var(--c) }
.band { fill: var(--c); opacity: .16 }
.c0 { --c: var(--c0) } .c1 { --c: var(--c1) } .c2 { --c: var(--c2) } .c3 { --c: var(--c3) } .c4 { --c: var(--c4) }
.c5 { --c: var(--c5) }
table { border-collapse: collapse; font-size: .9rem } th, td { padding: 4px 12px 4px 0; text-align: right;
  border-bottom: 1px solid var(--rule); font-variant-numeric: tabular-nums; white-space: nowrap }
@media (max-width: 600px) { td { white-space: normal } }
th { font-weight: 600 } th:first-child { text-align: left; white-space: normal; min-width: 9rem }
pre { overflow-x: auto; background: var(--panel); padding: 12px; border-radius: 8px; font-size: .85rem }
summary { cursor: pointer; padding: 8px 0 }
.bar { display: flex; flex-wrap: wrap; gap: 8px; position: sticky; top: 0; padding: 8px 0; background: var(--paper) }
select, button { font: inherit; padding: 8px; min-height: 44px; max-width: 100%; color: inherit;
  background: var(--panel); border: 1px solid var(--rule); border-radius: 6px }
#episode { flex: 1 1 240px; min-width: 0 }
.turn { border-left: 3px solid var(--rule); padding: 2px 0 2px 12px; margin: 18px 0 }
.turn h3 { overflow-wrap: anywhere } .turn code { background: var(--panel); padding: 1px 5px; border-radius: 4px }
.name { display: block; font-size: .8rem; color: var(--soft); margin-top: 8px }
.text { font: .85rem/1.45 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); gap: 0 16px }
mark { background: var(--mark); color: inherit } .success { color: var(--good) } .failure { color: var(--bad) }
"""

SCRIPT = """
'use strict'
const all = JSON.parse(document.getElementById('data').textContent)
const byId = id => document.getElementById(id), picker = byId('episode'), filter = byId('filter'), view = byId('view')
const add = (parent, tag, name, text) => {
  const node = parent.appendChild(document.createElement(tag))
  node.className = name
  node.textContent = text
  return node
}
const block = (parent, name, pieces, end, reward) => {
  const box = add(parent, 'div', '', '')
  add(box, 'span', 'name', name)
  const text = add(box, 'div', 'text', '')
  pieces.forEach(([words, differs], i) => {
    if (i) text.append(' ')
    add(text, differs ? 'mark' : 'span', '', words)
  })
  if (reward !== undefined) add(box, 'div', end, 'reward ' + reward + (end ? ', the episode ends: ' + end : ''))
}
const show = () => {
  view.textContent = ''
  const e = all[picker.value]
  if (!e) return add(view, 'p', 'quiet', 'No such episode.')
  block(view, 'task ' + e.taskId, [[e.task, false]])
  if (e.dreamed && !e.replayed) add(view, 'p', 'quiet', 'Without a real counterpart: ' +
    (e.taskId.startsWith('syn-') ? 'the task is synthetic.' : 'it was not replayed.'))
  e.turns.forEach((t, i) => {
    const turn = add(view, 'section', 'turn', ''), head = add(turn, 'h3', '', 'Turn ' + (i + 1) + ' ')
    add(head, 'code', '', t.action)
    block(turn, e.dreamed ? 'state in the dream' : 'state', [[t.state, false]])
    if (t.demos.length) {
      const fold = add(turn, 'details', '', '')
      add(fold, 'summary', '', 'Retrieved demonstrations (' + t.demos.length + ')')
      t.demos.forEach(d => block(fold, 'from ' + d.from + ': ' + d.action + (d.end ? ', ' + d.end : ''),
        [[d.state, false], ['\\u2192', false], [d.next, false]]))
    }
    if (t.think) block(turn, e.dreamed ? 'reasoning of the experience model' : 'reasoning trace', [[t.think, false]])
    const pair = add(turn, 'div', 'pair', '')
    block(pair, e.dreamed ? 'next state, dreamed' : 'next state', t.next, t.end, t.reward)
    if (t.real) block(pair, 'next state, real', t.real, t.realEnd, t.realReward)
    else if (e.replayed) block(pair, 'next state, real', [['the real episode was over', false]])
  })
}
const list = () => {
  picker.textContent = ''
  all.forEach((e, i) => {
    if (filter.value && filter.value !== e.kind) return
    add(picker, 'option', '', e.run + ' ' + e.id + ': ' + e.label).value = i
  })
  show()
}
const move = by => {
  picker.selectedIndex = Math.min(Math.max(picker.selectedIndex + by, 0), picker.length - 1)
  show()
}
filter.onchange = list
picker.onchange = show
byId('back').onclick = () => move(-1)
byId('on').onclick = () => move(1)
list()
"""

BROWSER = """<div class=bar><select id=filter aria-label="which episodes"><option value="">all episodes
<option value=success>dreamed: success<option value=failure>dreamed: failure
<option value="not finished">dreamed: not finished<option value=disagrees>dream and reality disagree
<option value=real>real</select>
<select id=episode aria-label=episode></select><button id=back aria-label="previous episode">←</button>
<button id=on aria-label="next episode">→</button></div><div id=view></div>
<noscript>The browser of trajectories needs JavaScript.</noscript>"""


MARK = b"<title>DreamGym"                                      # of a report among other files


def page(runs: Sequence[RunData]) -> str:
    """The whole HTML file."""
    groups = methods(runs)
    success = [success_chart(name, group, stage) for stage in STAGES for name, group in groups
               if any(stage in run.metrics for run in group)]
    curves = [chart(title, [curve(name, group, stage, metric) for name, group in groups], top,
                    "iteration" if stage in STAGES else "optimizer step") for stage, metric, title, top in CURVES]
    episodes, notes, cost = browser_data(runs)
    data = json.dumps(episodes).replace("<", "\\u003c")         # so that no text can close the element
    told = "".join(f"<p class=quiet>{escape(note)}</p>" for note in notes)
    configs = "".join(f"<details><summary>{escape(run.name)}{escape(seen(groups, run))}</summary>"
                      f"<pre>{escape(chr(10).join(whole_lines(run.folder / 'config.yaml')))}</pre></details>"
                      for run in runs)
    return f"""<!doctype html>
<html lang=en><meta charset=utf-8>
<meta name=viewport content="width=device-width, initial-scale=1">
<meta http-equiv=Content-Security-Policy
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>DreamGym: {escape(", ".join(run.name for run in runs))}</title>
<style>{STYLE}</style>
<h1>DreamGym report</h1>
<p>{escape("; ".join(describe(run) for run in runs))}</p>
<h2>Real success on held-out test tasks</h2>{results_table(groups)}
<h2>Training</h2><p class=quiet>Bands are 95 % intervals: over seeds (t) where there are several; for shares of
validation tasks at least that over these tasks (Wilson). Curves end where the shortest run of a method ends.</p>
<div class=grid2>{"".join(success + curves)}</div>
<h2>Fidelity of the experience model</h2>{fidelity_table(runs)}
<p class=quiet>Measured on real transitions of held-out tasks, which no training has seen; n counts cases.</p>
<h2>Real interactions</h2>{ledger_table(runs)}
<h2>Trajectories</h2>
<p>What the policy saw turn by turn. Beside a dreamed step stands what the same actions do in the real environment;
words that differ are marked.</p>
<p class=quiet>For this report {cost:,} real transitions were replayed; nothing learns from them.</p>{told}
{BROWSER}
<h2>Configuration</h2>{configs}
<script type=application/json id=data>{data}</script>
<script>{SCRIPT}</script>
</html>
"""


def seen(groups: Sequence[tuple[str, list[RunData]]], run: RunData) -> str:
    """How a run's configuration differs from that of the first one."""
    found = differences(groups[0][1][0], run)
    return f": {'; '.join(found[:6])}{' ..' if len(found) > 6 else ''}" if found else ""


def describe(run: RunData) -> str:
    start = run.starts[-1] if run.starts else {}
    commit = f", commit {start['commit'][:10]}" if start.get("commit") else ""
    return f"{run.name}: {run.cfg.env.name}, method {run.cfg.run.method}, seed {run.cfg.run.seed}{commit}"


def refuse_no_file(path: Path) -> None:
    """Raises UserError for a folder or a device; there may be nothing yet."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is {'a folder' if path.is_dir() else 'no regular file'}; name a file")


def write(folders: Sequence[Path], out: Path) -> str:
    """Write the report; returns the line to print.  Raises UserError."""
    if not out.parent.is_dir():
        raise UserError(f"{out}: no such folder {out.parent}")
    refuse_no_file(out)                                        # replacing /dev/null would be no good idea either
    if out.exists() and out.stat().st_size and MARK not in out.read_bytes()[:400]:
        raise UserError(f"{out}: is no report, and would be lost; name another file")
    started = time.perf_counter()
    data = page([read_run(folder) for folder in folders]).encode("utf-8", "replace")
    write_whole(out, data)
    return f"{out}: {len(data) / 1e6:.1f} MB, {time.perf_counter() - started:.0f} s"


# ------------------------------------------------------------------------------------------------ terminal
def printable(text: str) -> str:
    """Text of a run for a terminal: no control characters, which could drive it."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def episode_text(folder: Path, wanted: str, width: int = 0) -> str:
    """An episode as text, turn by turn; ``width`` in columns, 0: the terminal's."""
    cfg, missing = run_config(folder)
    episodes = Episodes(folder, cfg, missing)
    episode = episodes.find(wanted)
    dreamed = episode[0].source == "dream"
    demos: list[list[Transition]] = [[] for _ in episode]
    replayed: list[Replayed] | None = None
    notes = []
    if dreamed:
        try:
            demos = episodes.demonstrations([episode]).get(episode[0].episode, demos)
            replayed = episodes.replay(episode)
        except UserError as error:
            notes.append(f"no demonstrations and no real counterpart: {error}")
    width = width or min(120, shutil.get_terminal_size().columns)

    def field(name: str, text: str) -> str:
        return textwrap.fill(printable(text), width, initial_indent=f"  {name:11} ", subsequent_indent=" " * 14,
                             break_on_hyphens=False)

    lines = [f"episode {printable(episode[0].episode)} ({episode[0].source}), task {printable(episode[0].task_id)}",
             field("task", episode[0].task), *notes]
    for i, t in enumerate(episode):
        lines += ["", f"turn {i + 1}: {printable(t.action)}", field("state", t.state)]
        for d in demos[i]:
            lines.append(field("demo", f"{d.state} -> {d.action} -> {d.next_state} ({d.episode})"))
        if t.reasoning:
            lines.append(field("reasoning", t.reasoning))
        lines.append(field("dreamed" if dreamed else "next", t.next_state))
        if replayed is not None:
            real = replayed[i] if i < len(replayed) else None
            same = real and real.next_state == t.next_state
            lines.append(field("real", "the same" if same else real.next_state if real else "the episode was over"))
        end = f", the episode ends: {outcome(t.success, True)}" if t.done else ""
        lines.append(field("reward", f"{t.reward:g}{end}"))
    end = f"{'dreamed ' if dreamed else ''}{outcome(episode[-1].success, episode[-1].done)}"
    if replayed:
        end += (f", real {outcome(replayed[-1].success, replayed[-1].done)} "
                f"({len(replayed)} real transitions replayed; nothing learns from them)")
    elif dreamed and not notes:
        end += ", synthetic task: nothing real to compare with"
    return "\n".join([*lines, "", end])


def default_out(folders: Sequence[Path]) -> Path:
    """In the run folder for one run, here for several."""
    return folders[0] / "report.html" if len(folders) == 1 else Path(os.curdir) / "report.html"


def transitions_of(episodes: Sequence[rollouts.Episode], prefix: str) -> list[Transition]:
    """Played episodes as transitions with the ids ``<prefix>/<number>``."""
    found = []
    for number, episode in enumerate(episodes):
        history: list[str] = []
        for i, turn in enumerate(episode.turns):
            end = episode.terminated and i == len(episode.turns) - 1
            found.append(Transition(turn.state, turn.action, turn.next_state, turn.reward, end, end and episode.success,
                                    episode.task.id, episode.task.text, f"{prefix}/{number}", i, episode.source,
                                    list(history)))
            history.append(turn.action)
    return found
