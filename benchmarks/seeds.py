"""Several seeds of the main job as one table, or two sets of runs against each other.

    for s in 0 1 2; do python dreamgym.py --config configs/webshop.yaml --profile cpu --method both \
        --set run.seed=$s --set run.out=runs/both-s$s; done
    python benchmarks/seeds.py runs/both-s*

    for s in 0 1 2; do python dreamgym.py --config configs/webshop.yaml --profile cpu --set curriculum.enabled=false \
        --set run.seed=$s --set run.out=runs/plain-s$s; done
    python benchmarks/seeds.py runs/both-s* --against runs/plain-s*

Runs may be of any method; each line says how many hold what it is about.  The interval over seeds is Student's t on
the seeds' success rates: it holds the spread between runs and the finite panel of test tasks together.  With three
seeds it is wide, as it should be.  ``--against`` pairs the runs of equal seed: mean difference with the t-interval of
the differences, and which settings the two sets differ in.
"""
from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Sequence

from scipy.stats import t as student

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import config                                                                       # noqa: E402
import report                                                                       # noqa: E402
from config import Config, UserError                                                # noqa: E402

STAGES = {"cloned": (), "dream": ("dream",), "s2r": ("dream", "s2r"), "real": ("real",)}
COLUMNS = {"greedy": "greedy", "sampled": "T = {t:g}", "t1": "T = 1"}
FIDELITY = ("exact", "done", "false_success", "false_failure", "unseen_false_success", "unseen_false_failure")


@dataclass
class Found:
    """What a finished run left."""
    folder: Path
    cfg: Config
    results: dict
    fidelity: dict
    metrics: list[dict]
    start: dict

    @classmethod
    def read(cls, folder: Path) -> Found:
        """Raises UserError where the run is not finished."""
        if not (folder / "results.json").exists():
            raise UserError(f"{folder}: holds no results.json, so it is no finished run")
        data = report.read_run(folder)
        if not data.starts:
            raise UserError(f"{folder}: holds no run.json, so nobody knows how it was made; restore it")
        return cls(folder, data.cfg, data.results, data.fidelity.get("fidelity.json", {}),
                   [line for lines in data.metrics.values() for line in lines], data.starts[-1])

    def success(self, policy: str, column: str) -> float | None:
        """Real success on the test tasks, per cent."""
        found = self.results["policies"].get(policy, {}).get(column)
        return None if found is None else 100 * found["success"]

    def of(self, stage: str, key: str) -> list[float]:
        """One value an iteration."""
        return [line[key] for line in self.metrics if line["stage"] == stage and key in line]

    def turns(self, policy: str) -> dict[str, int]:
        """Transitions that RL played until this policy, by stage."""
        return {stage: sum(self.of(stage, "turns")) for stage in STAGES[policy]}

    def signal(self, stage: str) -> float | None:
        """Per cent of the groups whose rewards differ, mean over the iterations: the others teach nothing."""
        shares = [1 - share for share in self.of(stage, "constant_groups")]
        return 100 * sum(shares) / len(shares) if shares else None


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half width of the 95 % t-interval; None for a single value."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return mean, None
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, float(student.ppf(0.975, n - 1)) * deviation / math.sqrt(n)


def cell(values: Sequence[float], digits: int = 1) -> str:
    """``mean ± half width (each)``; a dash where there is nothing."""
    if not values:
        return "-"
    mean, half = interval(values)
    plus_minus = "" if half is None else f" ± {half:,.{digits}f}"
    return f"{mean:,.{digits}f}{plus_minus} ({', '.join(f'{v:,.{digits}f}' for v in values)})"


def head(title: str, columns: Sequence[str]) -> None:
    print(f"\n| {title} | {' | '.join(columns)} |\n{'|---' * (1 + len(columns))}|")


def describe(runs: Sequence[Found]) -> str:
    return (f"{len(runs)} runs (seeds {', '.join(str(r.cfg.run.seed) for r in runs)}), {runs[0].results['tasks']} held-out "
            f"test tasks; commit {', '.join(sorted({str(r.start['commit'])[:12] for r in runs}))}; "
            f"{runs[0].start['cpus']} CPUs")


def overview(runs: Sequence[Found]) -> None:
    """One table of real success, one of the experience models' fidelity."""
    print(describe(runs))
    head("real success, %", [*(name.format(t=runs[0].cfg.eval.temperature) for name in COLUMNS.values()),
                             "transitions in RL", "runs"])
    for policy, name in report.POLICIES.items():
        own = [r for r in runs if r.success(policy, "greedy") is not None]
        if not own:
            continue
        cells = [cell([r.success(policy, column) for r in own]) for column in COLUMNS]
        spent = " + ".join(f"{sum(r.turns(policy)[stage] for r in own) / len(own):,.0f} "
                           f"{'dreamed' if stage == 'dream' else 'real'}" for stage in STAGES[policy]) or "none"
        print(f"| {name} | {' | '.join(cells)} | {spent} | {len(own)} |")
    for rule, success in runs[0].results["rules"].items():
        print(f"| rule: {rule} | {100 * success:.1f} | | | | |")
    if any(r.fidelity for r in runs):
        head("experience model, %", ["mean ± interval (each)", "runs"])
        for key in FIDELITY:
            each = [100 * r.fidelity[key]["value"] for r in runs if r.fidelity.get(key, {}).get("value") is not None]
            if each:
                print(f"| {key.replace('_', ' ')} | {cell(each)} | {len(each)} |")


def against(first: Sequence[Found], second: Sequence[Found]) -> None:
    """A table of what two sets of runs reach, paired by seed.  Raises UserError where no seed is in both."""
    pairs = [(a, b) for a in first for b in second if a.cfg.run.seed == b.cfg.run.seed]
    if not pairs:
        raise UserError("no seed is in both sets of runs, so nothing can be paired")
    for name, runs in (("A", first), ("B", second)):
        print(f"{name}: {describe(runs)}")
    changes = sorted({line for a, b in pairs for line in config.describe_differences(a.cfg, b.cfg)})
    print(f"settings, A -> B: {'; '.join(changes) or 'all the same'}; {len(pairs)} pairs")
    rows: dict[str, tuple[int, Callable[[Found], float | None]]] = {}
    for policy in report.POLICIES:
        for column, label in COLUMNS.items():
            title = f"{report.POLICIES[policy]}, {label.format(t=pairs[0][0].cfg.eval.temperature)}: real success, %"
            rows[title] = 1, lambda r, policy=policy, column=column: r.success(policy, column)
    for stage in ("dream", "real"):
        rows[f"{report.POLICIES[stage]}: groups with a signal, %"] = 1, lambda r, stage=stage: r.signal(stage)
        rows[f"{report.POLICIES[stage]}: transitions"] = 0, lambda r, stage=stage: sum(r.of(stage, "turns")) or None
    head("mean (each seed)", ["A", "B", "A - B, paired"])
    for title, (digits, value) in rows.items():
        both = [(a, b) for a, b in ((value(a), value(b)) for a, b in pairs) if None not in (a, b)]
        if both:
            print(f"| {title} | {cell([a for a, _ in both], digits)} | {cell([b for _, b in both], digits)} | "
                  f"{cell([a - b for a, b in both], digits)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--against", nargs="+", type=Path, default=[], metavar="RUN", help="a second set of runs")
    args = parser.parse_args()
    runs, others = [Found.read(r) for r in args.runs], [Found.read(r) for r in args.against]
    if others:
        against(runs, others)
    else:
        overview(runs)
    return 0


if __name__ == "__main__":
    sys.exit(config.run_main(main))
