"""Several seeds of the main job as one table: mean over seeds with a 95 % interval, and every seed.

    for s in 0 1 2; do python dreamgym.py --config configs/webshop.yaml --profile cpu --method both \
        --set run.seed=$s --set run.out=runs/both-s$s; done
    python benchmarks/seeds.py runs/both-s*

The interval over seeds is Student's t on the seeds' success rates: it holds the spread between runs and the finite
panel of test tasks together.  With three seeds it is wide, as it should be.
"""
from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from scipy.stats import t as student

NAMES = {"cloned": "behaviour cloning", "dream": "RL in the dream", "s2r": "dream, then sim-to-real",
         "real": "RL in the real environment"}
COLUMNS = {"greedy": "greedy", "sampled": "T = 0.4", "t1": "T = 1"}


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of the 95 % interval over seeds; 0 for a single seed."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return mean, 0.0
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, student.ppf(0.975, n - 1) * deviation / math.sqrt(n)


def turns(run: Path, stage: str) -> int:
    """Transitions that a stage of RL played."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return sum(line["turns"] for line in lines if line["stage"] == stage)


def main(runs: list[Path]) -> None:
    results = [json.loads((run / "results.json").read_text()) for run in runs]
    starts = [json.loads((run / "run.json").read_text())[-1] for run in runs]
    fidelity = [json.loads((run / "fidelity.json").read_text()) for run in runs]
    print(f"{len(runs)} seeds ({', '.join(str(s['seed']) for s in starts)}), {results[0]['tasks']} held-out test tasks; "
          f"commit {', '.join(sorted({str(s['commit'])[:12] for s in starts}))}; {starts[0]['cpus']} CPUs\n")
    print("| real success, % | " + " | ".join(COLUMNS.values()) + " | transitions in RL |\n|---|---|---|---|---|")
    for policy, name in NAMES.items():
        if not all(policy in r["policies"] for r in results):
            continue
        cells = []
        for column in COLUMNS:
            each = [100 * r["policies"][policy][column]["success"] for r in results]
            mean, half = interval(each)
            cells.append(f"{mean:.1f} ± {half:.1f} ({', '.join(f'{v:.1f}' for v in each)})")
        stages = {"cloned": [], "dream": ["dream"], "s2r": ["dream", "s2r"], "real": ["real"]}[policy]
        spent = " + ".join(f"{sum(turns(run, s) for run in runs) / len(runs):,.0f} "
                           f"{'dreamed' if s == 'dream' else 'real'}" for s in stages) or "none"
        print(f"| {name} | " + " | ".join(cells) + f" | {spent} |")
    for rule, success in results[0]["rules"].items():
        print(f"| rule: {rule} | {100 * success:.1f} | | | |")
    print("\n| experience model, % | mean | seeds |\n|---|---|---|")
    for key in ("exact", "done", "false_success", "false_failure"):
        each = [100 * f[key]["value"] for f in fidelity]
        print(f"| {key.replace('_', ' ')} | {sum(each) / len(each):.1f} | {', '.join(f'{v:.1f}' for v in each)} |")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
