"""Configuration: every wrong input gives one clear line that names file, line and key, and exit code 2.

    python -m pytest -q tests/test_config.py
"""
from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

import config
from config import Config, UserError, choose_profile, describe_differences, load, run_main

WEBSHOP = Path(__file__).parents[1] / "configs" / "webshop.yaml"
ALFWORLD = WEBSHOP.with_name("alfworld.yaml")
PROFILES = ("smoke", "cpu", "smollm2", "gpu24", "gpu2x24")
GOOD = "defaults:\n  rl:\n    lr: 0.001\n"

# (what the file holds, what the one line must say); file lines count from 1
WRONG_FILES = [
    # not YAML, not a mapping, not ours
    (b"", "empty"),
    (b"\n\n# only a comment\n", "empty"),
    (b"- 1\n- 2\n", "c.yaml:1: the file must be a mapping (key: value), not a list"),
    (b"hello\n", "c.yaml:1: the file must be a mapping (key: value), not the value 'hello'"),
    (b"{}\n", "`defaults:` is missing"),
    (b"defaults: 3\n", "c.yaml:1: defaults must be a mapping"),
    (b"defaults:\n  - rl\n", "defaults must be a mapping (key: value), not a list"),
    (b"defaults:\n  rl: 3\n", "c.yaml:2: rl must be a mapping"),
    (b"defaults:\n  rl:\n\tlr: 1\n", "c.yaml:3: not valid YAML: a tab where YAML wants spaces"),
    (b"defaults:\n  rl: {lr: 1\n", "not valid YAML"),
    (b"defaults:\n  rl:\n   lr: 1\n  eval:\n    tasks: 3\n   x: 1\n", "not valid YAML"),
    (b"defaults:\n  rl: \"open\n", "not valid YAML"),
    (b"defaults: {}\n---\ndefaults: {}\n", "one file holds one document"),
    (b"defaults:\n  run: {out: caf\xe9}\n", "c.yaml:2: not UTF-8 (byte 0xe9)"),
    ("defaults: {}\n".encode("utf-16"), "c.yaml:1: not UTF-8 (byte 0xff)"),
    (b"\x00\x01\x02", "c.yaml:1: forbidden control character 0x00"),
    (b"\x89PNG\r\n", "not UTF-8"),
    (b"[" * 3000 + b"]" * 3000, "nested too deeply"),
    (b"#" * 200_001, "larger than 200,000 bytes"),
    (b"defaults:\n  rl: &a {lr: 0.1}\n", "c.yaml:2: anchors and aliases"),
    (b"defaults:\n  env: {data: *.csv}\n", "not valid YAML"),
    (b"defaults:\n  <<: {rl: 1}\n", "c.yaml:2: <<: unknown key"),
    (b"defaults:\n  run: {out: !!python/object/apply:os.system [ls]}\n", "takes one value, not a list"),
    (b"defaults:\n  run: {out: !!python/name:os.system x}\n", "c.yaml:2: run.out: YAML tags are not supported"),
    (b"defaults:\n  rl: {lr: !!int abc}\n", "'abc' is no usable number"),
    (b"defaults:\n  ? [a, b]\n  : 1\n", "a key must be one word"),
    # unknown and repeated keys
    (b"rl: {lr: 0.1}\n", "rl: unknown; a file holds `defaults` and `profiles`; rl belongs under defaults"),
    (b"defaults: {}\nprofile: {}\n", "c.yaml:2: profile: unknown; a file holds"),
    (b"defaults:\n  rl:\n    lrr: 0.1\n", "c.yaml:3: rl.lrr: unknown key; did you mean rl.lr?"),
    (b"defaults:\n  rl:\n    learning_rate: 0.1\n", "c.yaml:3: rl.learning_rate: unknown key; did you mean"),
    (b"defaults:\n  rl:\n    gate_false_success: 0.1\n", "did you mean mexp.gate_false_success?"),
    (b"defaults:\n  r1: {lr: 0.1}\n", "c.yaml:2: r1: unknown key; did you mean rl?"),
    (b"defaults:\n  policy_model:\n    tiny: {layer: 2}\n", "did you mean policy_model.tiny.layers?"),
    (b"defaults:\n  1: 2\n", "1: unknown key"),
    (b"defaults:\n  true: 2\n", "true: unknown key"),
    (b"defaults:\n  \xd0\xb3l: {lr: 1}\n", "unknown key"),
    (b"defaults: {}\ndefaults: {}\n", "c.yaml:2: defaults: occurs twice, first in line 1"),
    (b"defaults:\n  rl: {lr: 0.1}\n  rl: {lr: 0.2}\n", "c.yaml:3: rl: occurs twice, first in line 2"),
    (b"defaults:\n  rl:\n    lr: 0.1\n    lr: 0.1\n", "c.yaml:4: lr: occurs twice, first in line 3"),
    (b"defaults: {}\nprofiles:\n  a: {}\n  a: {}\n", "c.yaml:4: a: occurs twice"),
    (b"defaults: {}\nprofiles: [a]\n", "profiles must be a mapping"),
    (b"defaults: {}\nprofiles:\n  a:\n    rl: {lrr: 1}\n", "c.yaml:4: rl.lrr: unknown key"),
    (b"defaults: {}\nprofiles:\n  a:\n    rl: {lr: 7}\n", "c.yaml:4: rl.lr: must be at most 1, not 7"),
    # wrong values
    (b"defaults:\n  rl: {lr: 'fast'}\n", "c.yaml:2: rl.lr: must be a number, not 'fast'"),
    (b"defaults:\n  rl: {lr: '1e-5'}\n", "must be a number, not '1e-5' (text; a number is written without quotes)"),
    (b"defaults:\n  rl: {lr: }\n", "rl.lr: must be a number, empty"),
    (b"defaults:\n  rl: {lr: [1]}\n", "rl.lr: takes one value, not a list"),
    (b"defaults:\n  rl: {lr: {a: 1}}\n", "rl.lr: takes one value, not a mapping"),
    (b"defaults:\n  rl: {lr: true}\n", "rl.lr: must be a number, not true"),
    (b"defaults:\n  rl: {lr: 0}\n", "rl.lr: must be greater than 0, not 0"),
    (b"defaults:\n  rl: {lr: -1e-5}\n", "rl.lr: must be greater than 0, not -1e-05"),
    (b"defaults:\n  rl: {lr: .nan}\n", "rl.lr: must be a finite number, not nan"),
    (b"defaults:\n  rl: {kl_coef: .inf}\n", "rl.kl_coef: must be a finite number, not inf"),
    (b"defaults:\n  rl: {kl_coef: -.Inf}\n", "rl.kl_coef: must be a finite number, not -inf"),
    (b"defaults:\n  rl: {kl_coef: 1e999}\n", "rl.kl_coef: must be a finite number, not inf"),
    (b"defaults:\n  rl: {kl_coef: nan}\n", "rl.kl_coef: must be a number, not 'nan'"),
    (b"defaults:\n  rl: {iterations: 2.5}\n", "rl.iterations: must be a whole number, not 2.5"),
    (b"defaults:\n  rl: {iterations: .inf}\n", "rl.iterations: must be a"),
    (b"defaults:\n  rl: {iterations: 010}\n", "rl.iterations: must be a whole number, not '010'"),
    (b"defaults:\n  rl: {iterations: 0x10}\n", "rl.iterations: must be a whole number, not '0x10'"),
    (b"defaults:\n  rl: {iterations: 1:30}\n", "rl.iterations: must be a whole number, not '1:30'"),
    (b"defaults:\n  rl: {iterations: 1,000}\n", "c.yaml:2: rl.000: unknown key"),
    (b"defaults:\n  rl: {iterations: 2026-01-01}\n", "must be a whole number, not '2026-01-01'"),
    (b"defaults:\n  rl: {iterations: " + b"9" * 5000 + b"}\n", "is no usable number"),
    (b"defaults:\n  rl: {iterations: 0}\n", "rl.iterations: must be at least 1, not 0"),
    (b"defaults:\n  rl: {norm_std: on}\n", "rl.norm_std: must be true or false, not 'on'"),
    (b"defaults:\n  rl: {norm_std: yes}\n", "rl.norm_std: must be true or false, not 'yes'"),
    (b"defaults:\n  rl: {norm_std: 1}\n", "rl.norm_std: must be true or false, not 1"),
    (b"defaults:\n  rl: {norm_std: null}\n", "rl.norm_std: must be true or false, empty"),
    (b"defaults:\n  rl: {algorithm: gpro}\n", "must be one of grpo, ppo, not 'gpro'; did you mean grpo?"),
    (b"defaults:\n  rl: {kl_in: off}\n", "rl.kl_in: must be one of loss, reward, none, not 'off'"),
    (b"defaults:\n  rl: {kl_in: null}\n", "rl.kl_in: must be one of loss, reward, none, empty"),
    (b"defaults:\n  run: {seed: -1}\n", "run.seed: must be at least 0, not -1"),
    (b"defaults:\n  run: {seed: 4294967296}\n", "run.seed: must be less than 4.29497e+09, not 4294967296"),
    (b"defaults:\n  run: {out: ''}\n", "run.out: '' is no usable text here"),
    (b"defaults:\n  run: {out: \"a\\nb\"}\n", "run.out: 'a\\nb' is no usable text here"),
    (b"defaults:\n  run: {out: 5}\n", "run.out: must be text, not 5"),
    (b"defaults:\n  policy_model: {device: gpu}\n", "policy_model.device: 'gpu' is no usable text here (pattern"),
    (b"defaults:\n  rl: {dual_clip: 1}\n", "rl.dual_clip: must be greater than 1, not 1"),
    (b"defaults:\n  rl: {lr: 5, clip_low: 9}\n", "(and 1 more)"),
]

# (what --set says, what the one line must say), on top of a good file
WRONG_OVERRIDES = [
    ("rl.lr", "--set rl.lr: write it as key=value, for example rl.lr=1e-5"),
    ("=3", "--set =3: write it as key=value"),
    ("", "write it as key=value"),
    ("rl.lr=", "--set rl.lr=: rl.lr: must be a number, empty"),
    ("rl.lr=fast", "rl.lr: must be a number, not 'fast'"),
    ("rl.lr=nan", "rl.lr: must be a number, not 'nan'"),
    ("rl.lr=1e-5 # slow", "rl.lr: must be a number"),
    ("rl.lr=[1]", "rl.lr: must be a number, not '[1]'"),
    ("rl.lr=1e-5\n", None),                                                          # blanks around are harmless
    ("rl.rate=1", "--set rl.rate=1: rl.rate: unknown key; did you mean"),
    ("lr=1", "lr: unknown key; did you mean policy.lr or mexp.lr or rl.lr?"),
    ("rl=1", "rl is a section; set one of its keys, for example rl.algorithm"),
    ("rl.lr.x=1", "rl.lr.x: unknown key"),
    ("RL.LR=1", "RL.LR: unknown key; did you mean"),
    ("profiles.cpu.rl.lr=1", "unknown key"),
    ("rl.norm_std=off", "rl.norm_std: must be true or false, not 'off'"),
    ("rl.iterations=1.5", "rl.iterations: must be a whole number, not 1.5"),
    ("rl.iterations=" + "9" * 5000, "is no usable number"),
    ("run.out=a\x00b", "is no usable text here"),
    ("run.threads=0", "run.threads: must be at least 1, not 0"),
]

# Values that are right one by one and contradict each other
CONTRADICTIONS = [
    (["rl.group_size=1"], "rl.group_size: grpo compares the episodes of a group: at least 2, not 1"),
    (["run.processes=1", "rl.group_size=3", "rl.minibatches=4", "rl.tasks_per_step=3"], "rl.tasks_per_step x rl.group_size = 3 x 3 = 9 "
                                                                     "episodes do not divide into"),
    (["run.processes=3"], "rl.tasks_per_step: 16 tasks cannot be shared equally by run.processes = 3"),
    (["s2r.tasks_per_step=2", "s2r.transitions=100"], "s2r.transitions: 100 may not pay for half an iteration: 2 tasks x"),
    (["s2r.transitions=300"], "s2r.transitions: 300 may not pay for half an iteration: 4 tasks x rl.group_size 8 x env.max"),
    (["run.processes=16", "rl.minibatches=16", "s2r.tasks_per_step=16"], "16 x 8 = 128 episodes do not divide into rl.minibatches x "
                                                "run.processes = 16 x 16 = 256 parts"),
    (["rl.kl_in=none"], "rl.kl_coef: 0.05 has no effect with rl.kl_in = none"),
    (["rl.kl_coef=0"], "rl.kl_in: loss has no effect with rl.kl_coef = 0"),
    (["rl.kl_estimator=k1"], "rl.kl_estimator: k1 in the loss"),
    (["rl.kl_in=reward"], "rl.kl_estimator: k2 in the reward"),
    (["eval.validation_tasks=0"], "eval.validation_tasks: 0 tasks to validate on every rl.eval_every = 5"),
    (["policy.batch_tokens=100"], "policy.batch_tokens: 100 cannot hold one row of policy_model.max_prompt_tokens + "
                                  "max_new_tokens = 512 + 40 = 552 tokens"),
    (["rl.micro_tokens=100"], "rl.micro_tokens: 100 cannot hold one row"),
    (["mexp_model.max_prompt_tokens=4096"], "mexp.batch_tokens: 1024 cannot hold one row"),
    (["policy_model.tiny.heads=3"], "policy_model.tiny.heads: width 128 over 3 heads gives no even head size (42"),
    (["policy_model.tiny.heads=64", "policy_model.tiny.width=64"], "no even head size (1)"),
    (["policy_model.quant=nf4"], "policy_model.quant: the tiny model is not quantised"),
    (["policy_model.lora_rank=8"], "policy_model.lora_rank: the tiny model is trained in full"),
    (["policy_model.name=smollm2", "policy_model.quant=nf4"], "policy_model.lora_rank: 4-bit weights"),
    (["mexp_model.name=smollm2"], "mexp.heads: only the tiny model has constructed heads, not smollm2"),
    (["mexp_model.tiny.layers=1"], "mexp_model.tiny.layers: constructed heads span two layers, not 1"),
    (["policy.heads=random", "policy_model.name=smollm2", "policy_model.lora_rank=8"], "policy.optimizer: muon is for full matrices"),
    (["env.human_goals=true"], "env.human_goals: only the official WebShop data hold human goals"),
    (["env.data=/does/not/exist"], "env.data: no such folder: /does/not/exist"),
    (["collect.expert=0", "collect.noisy=0"], "collect.noisy: 0, and collect.expert too"),
    (["mexp.teacher=tiny", "mexp.counterfactual=0"], "mexp.teacher: tiny is no teacher: rules, an address"),
    (["mexp.teacher=endpoint"], "mexp.counterfactual: changed purchases can be explained by"),
    (["mexp.teacher=http://x/v1"], "mexp.counterfactual: changed purchases can be explained by"),
    (["mexp.teacher=http://x/v1", "mexp.reasoning=false"], "has no effect with mexp.reasoning = false"),
    (["mexp.teacher=ftp://x/v1"], "mexp.teacher: must start with http:// or https://"),
    (["mexp.endpoint=localhost:8000"], "mexp.endpoint: must start with http:// or https://"),
    (["mexp.endpoint=http://[x/v1"], "mexp.endpoint: must start with http:// or https://"),
    (["mexp.endpoint=http://x:65536/v1"], "must start with http:// or https:// and name a host, with a port"),
    (["mexp.endpoint=http://me:secret@x/v1"], "keys come from the environment only"),
    (["mexp.endpoint=http://x/v1?key=secret"], "keys come from the environment only"),
    (["mexp.endpoint=http://x/v1"], "curriculum.enabled: tasks are written by the experience model"),
    (["mexp.endpoint=http://x/v1", "mexp.teacher=http://x/v1"], "mexp.teacher: has no effect with mexp.endpoint"),
    (["mexp.server_model=m"], "mexp.server_model: has no effect without a server"),
]


def refused(capsys, *arguments, **keywords) -> str:
    """The one line of a refusal."""
    assert run_main(lambda: load(*arguments, **keywords) and None) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and len(err) < 400, err
    return err


@pytest.fixture()
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(data: bytes | str) -> str:
        Path("c.yaml").write_bytes(data.encode() if isinstance(data, str) else data)
        return "c.yaml"
    return write


@pytest.mark.parametrize("data, message", WRONG_FILES)
def test_wrong_file(data, message, write, capsys):
    line = refused(capsys, write(data))
    assert message in line and "c.yaml" in line


@pytest.mark.parametrize("text, message", WRONG_OVERRIDES)
def test_wrong_override(text, message, write, capsys):
    path = write(GOOD)
    if message is None:
        assert load(path, overrides=[text])[0].rl.lr == 1e-5
    else:
        assert message in refused(capsys, path, overrides=[text])


@pytest.mark.parametrize("overrides, message", CONTRADICTIONS)
def test_contradiction(overrides, message, write, capsys):
    line = refused(capsys, write(GOOD), overrides=overrides)
    assert message in line


def test_contradiction_names_the_line_in_the_file(write, capsys):
    path = write("defaults:\n  rl:\n    kl_coef: 0.01\n    kl_in: none\n")
    assert "c.yaml:3: rl.kl_coef: 0.01 has no effect" in refused(capsys, path)


def test_wrong_paths(write, tmp_path, capsys):
    assert "missing.yaml: cannot be read: no such file or directory" in refused(capsys, "missing.yaml")
    assert "is a folder, a YAML file is needed" in refused(capsys, tmp_path)
    assert "cannot be read" in refused(capsys, "a\x00b")
    assert "cannot be read" in refused(capsys, "x" * 5000)
    assert "not a regular file" in refused(capsys, "/dev/null")
    os.mkfifo("pipe")
    assert "not a regular file" in refused(capsys, "pipe")                 # and does not wait for a writer
    if os.getuid():
        path = write(GOOD)
        os.chmod(path, 0)
        assert "permission denied" in refused(capsys, path)


def test_wrong_profile(write, capsys):
    assert "no profile 'smok'; did you mean smoke?" in refused(capsys, WEBSHOP, "smok")
    assert "no profile ''; the file has smoke, cpu" in refused(capsys, WEBSHOP, "")
    assert "no profile 'cpu'; the file has none" in refused(capsys, write(GOOD), "cpu")


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_loads_and_survives_a_round_trip(profile, tmp_path):
    cfg, reason = load(WEBSHOP, profile)
    assert reason == f"profile {profile}: asked for"
    assert cfg.run.out == f"runs/webshop-{profile}-s0"
    (tmp_path / "config.yaml").write_text(config.to_yaml(cfg))
    again, _ = load(tmp_path / "config.yaml")
    assert again == cfg


def test_a_run_folder_s_configuration_that_was_cut(tmp_path):
    """What lost a line, at the end or within, is valid YAML: it must not be read as a configuration with defaults."""
    whole = config.to_yaml(Config(rl=config.RLSection(lr=3e-5))).encode()
    ends = [n for n in range(len(whole)) if whole[:n].endswith(b"\n")]
    rng = random.Random(0)
    for n in [0, *rng.sample(ends, 12), ends[-1], len(whole) - 1, *rng.sample(range(len(whole)), 12)]:
        (tmp_path / "config.yaml").write_bytes(whole[:n])
        with pytest.raises(UserError, match="config.yaml") as caught:
            config.load_run(tmp_path)
        assert n not in ends or any(word in str(caught.value) for word in ("not whole", "mapping", "missing"))
    shorter = whole.replace(b"    dual_clip: 3.0\n", b"")
    (tmp_path / "config.yaml").write_bytes(shorter)
    with pytest.raises(UserError, match="not whole"):
        config.load_run(tmp_path)
    (tmp_path / "config.yaml").write_bytes(whole)
    assert config.load_run(tmp_path, ["run.out=x"]).rl.lr == 3e-5
    count = len(config.KEYS)
    older = shorter.replace(b"# %d values" % count, b"# %d values" % (count - 1))          # from before there was this key
    (tmp_path / "config.yaml").write_bytes(older)
    assert config.load_run(tmp_path).rl.dual_clip == 3.0


def test_yaml_documents_every_key_once_with_its_source():
    """The YAML names every key under defaults, comments meaning and source, and agrees with the schema's values."""
    text = WEBSHOP.read_text()
    defaults = text[text.index("defaults:"):text.index("profiles:")]
    sections: list[str] = []
    found = []
    for line in defaults.splitlines()[1:]:
        if not (match := re.match(r"( *)(\w+):(.*)", line)):
            continue
        depth = len(match[1]) // 2 - 1
        value, _, comment = match[3].partition(" #")
        sections[depth:] = [match[2]]
        if value.strip():
            found.append(".".join(sections))
            assert re.search(r"\((paper|verl-agent|ours)\)$", comment), f"no source: {line}"
            assert len(comment.split()) >= 3, f"no meaning: {line}"
    assert found == list(config.KEYS)
    cfg, _ = load(WEBSHOP, "cpu")
    assert describe_differences(Config(), cfg) == []


def test_other_files_name_only_what_differs():
    """configs/alfworld.yaml: every value of the defaults differs from the schema's and is commented with its source."""
    text = ALFWORLD.read_text()
    defaults = text[text.index("defaults:"):text.index("profiles:")]
    lines = [line for line in defaults.splitlines() if re.match(r"    +\w+: *[^ #]", line)]
    for line in lines:
        assert re.search(r" # .* .*\((paper|verl-agent|ours)\)$", line), line
    cfg, _ = load(ALFWORLD, "cpu")
    assert len(describe_differences(Config(), cfg)) == len(lines) and cfg.env.name == "alfworld"
    assert load(ALFWORLD, "smoke", ["env.data=official"])[0].env.data == "official"


def test_values_in_every_notation(write):
    path = write("defaults:\n  rl: {lr: 1e-5, kl_coef: .5, clip_low: 1.e-1, iterations: 1e3, micro_tokens: 10_000}\n"
                 "  mexp:\n  run: {out: \"läufe/eins zwei\"}\n")
    cfg, _ = load(path)
    assert (cfg.rl.lr, cfg.rl.kl_coef, cfg.rl.clip_low, cfg.rl.iterations, cfg.rl.micro_tokens) == (
        1e-5, 0.5, 0.1, 1000, 10_000)
    assert cfg.run.out == "läufe/eins zwei" and cfg.mexp == config.MexpSection()
    assert load(write(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode()))[0].rl.lr == 0.001     # BOM, CRLF


def test_layers_in_order(write):
    path = write("defaults:\n  rl: {lr: 0.1, clip_low: 0.3}\nprofiles:\n  a:\n    rl: {lr: 0.2}\n  b: {}\n")
    assert load(path, "a")[0].rl.lr == 0.2 and load(path, "b")[0].rl.lr == 0.1
    cfg, _ = load(path, "a", ["rl.lr=0.4", "rl.lr = 0.5", "run.out=2024", "run.seed=7", "rl.target_kl=0.1"])
    assert (cfg.rl.lr, cfg.rl.clip_low, cfg.run.out, cfg.rl.target_kl) == (0.5, 0.3, "2024", 0.1)
    assert load(path, "a", ["run.seed=7"])[0].run.out == "runs/webshop-a-s7"
    assert load(path, "a", ["env.data=null"])[0].env.data is None
    assert load(path, "a", ["run.out='null'"])[0].run.out == "null"


def test_profile_by_hardware(monkeypatch):
    gb = 1e9
    assert choose_profile([]) == ("cpu", "no CUDA device")
    assert choose_profile([8 * gb])[0] == "smollm2" and "8 GB" in choose_profile([8 * gb])[1]
    assert choose_profile([24 * gb])[0] == choose_profile([8 * gb, 24 * gb])[0] == "gpu24"
    assert choose_profile([24 * gb, 24 * gb])[0] == choose_profile([80 * gb] * 8)[0] == "gpu2x24"
    monkeypatch.setattr(config, "cuda_memory", lambda: [24 * gb])
    cfg, reason = load(WEBSHOP)
    assert reason == "profile gpu24: one GPU of 24 GB" and cfg.policy_model.quant == "nf4" and cfg.run.processes == 1


def test_file_without_the_chosen_profile(write, monkeypatch):
    monkeypatch.setattr(config, "cuda_memory", lambda: [])
    cfg, reason = load(write(GOOD + "profiles:\n  big: {}\n"))
    assert reason == "no profile: no CUDA device, but c.yaml has no profile cpu"
    assert cfg.run.out == "runs/webshop-defaults-s0"


def test_differences_leave_out_what_changes_no_number(write):
    path = write(GOOD)
    old, new = load(path)[0], load(path, overrides=["rl.lr=1e-5", "run.out=elsewhere", "run.keep_checkpoints=9"])[0]
    assert describe_differences(old, new) == ["rl.lr: 0.001 -> 1e-05"]
    assert describe_differences(old, old) == []


def test_configuration_cannot_be_changed():
    with pytest.raises(ValueError):
        Config().rl.lr = 1.0


def test_run_main(capsys):
    def fail(error):
        raise error
    assert run_main(lambda: None) == 0 and run_main(lambda: 3) == 3
    assert run_main(lambda: fail(UserError("two\nlines"))) == 2
    assert run_main(lambda: fail(OSError(28, "No space left on device", "x"))) == 2
    assert run_main(lambda: fail(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "error: two lines\nerror: x: no space left on device\ninterrupted\n"
    with pytest.raises(OSError):
        run_main(lambda: fail(OSError(2, "No such file", "x")))                # a bug of ours keeps its traceback
