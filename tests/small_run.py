"""A run folder as a finished run leaves it, made in seconds: no training, dreams that repeat real episodes."""
import json
import random
from dataclasses import replace
from pathlib import Path

import config
import dreamgym
import report
from buffer import make_encoder, write_transitions
from curriculum import Curriculum
from envs import open_world
from runs import Run

CONFIG = str(Path(__file__).parent.parent / "configs/webshop.yaml")
HOSTILE = "</script><script>document.title='broken'</script><b>bold</b> \u2028 &amp; \x1b[31mred"
SETTINGS = ["run.processes=1", "eval.tasks=3", "eval.validation_tasks=2", "collect.expert=4", "collect.mediocre=6",
            "collect.noisy=4", "collect.random=2", "policy_model.max_new_tokens=4", "mexp_model.max_new_tokens=8"]


def make(folder, seed=0, *settings):
    """Three iterations of two dreamed episodes; one dreamed success is a real failure, one text is hostile."""
    cfg, reason = config.load(CONFIG, "smoke",
                              [*SETTINGS, f"run.out={folder}", f"run.seed={seed}", *settings])
    with Run.open(cfg, reason, ["dreamgym.py"], dreamgym.STAGES) as run:
        run.resume("collect")
        dreamgym.collect(cfg, run)
        world = open_world(cfg.env)
        episodes = report.Episodes(run.folder, cfg).by_file["offline.jsonl"]
        short = [e for e in episodes.values() if e[-1].done and len(e) > 2]
        won, lost = [e for e in short if e[-1].success], [e for e in short if not e[-1].success]
        dreams = []
        for i in range(3):
            for n, (episode, flip) in enumerate(((won[i], False), (lost[i], i == 0))):
                turns = [replace(t, episode=f"dream-{i}-0/{n}", source="dream") for t in episode]
                if flip:
                    turns[-1] = replace(turns[-1], success=True, reward=1.0)
                if i == 2 and n == 0:
                    turns = [replace(t, task_id="syn-0", task=HOSTILE, reasoning=HOSTILE) for t in turns]
                dreams += turns
        write_transitions(run.path("dream.jsonl"), dreams)
        for i in range(1, 4):
            run.log("dream", i, success=0.5 + 0.1 * i + 0.01 * seed, v_mean=0.2, ref_k3=0.01 * i, entropy=0.3,
                    invalid=0.1, real_greedy=0.5 if i == 3 else None, real_sampled=0.5 if i == 3 else None)
            run.log("mexp", i, loss=3.0 / i)
        share = {"value": 0.02, "low": 0.0, "high": 0.1, "n": 50}
        run.path("fidelity.json").write_text(json.dumps(
            {"false_success": share, "false_failure": share, "fields": {HOSTILE: share}, "exact": share}))
        run.path("server.json").write_text(json.dumps({"requests": 3, "completion_tokens": 70, "cost": 0.25}, indent=1) + "\n")
        found = {"success": 0.5, "tasks": 3, "interval": [0.1, 0.9]}
        run.write_results({"policies": {"dream": dict.fromkeys(("greedy", "sampled", "t1"), found)}, "tasks": 3,
                           "rules": {"first hit": 0.3}})
        lm = dreamgym.new_lm(cfg, "policy", run.folder)
        grammar = dreamgym.training_grammar(world, [t for e in episodes.values() for t in e])
        pool = Curriculum(cfg, world.tasks["train"], [], grammar, make_encoder("hash"))
        pool.rng = random.Random(0)
        run.checkpoint("policy", 20, {"step": 10, "weights": lm.weights(), "curve": [], "optimizers": []})
        run.checkpoint("mexp", 20, {"step": 20, "weights": dreamgym.new_lm(cfg, "mexp", run.folder).weights(), "curve": []})
        run.checkpoint("dream", 3, {"weights": lm.weights(), "curriculum": pool.state()})
    return run.folder
