"""Configuration: one commented YAML file, named profiles, typed and bounded values, overrides by dotted key.

    cfg, reason = load("configs/webshop.yaml")                                  # profile chosen by hardware
    cfg, reason = load("configs/webshop.yaml", "smoke", ["rl.lr=1e-5"])         # --profile smoke --set rl.lr=1e-5

A file holds ``defaults`` (section -> key -> value) and ``profiles`` (name -> what differs from the defaults).  The
classes below fix type and bounds of every key; what a key means, its unit and where its value comes from is said
once, in the comments of configs/webshop.yaml.  The values of every profile of the file are checked, not only of the
chosen one, and everything is refused before anything heavy is imported.
"""
from __future__ import annotations

import difflib
import errno
import os
import re
import stat
import sys
from pathlib import Path
from typing import Annotated, Any, Callable, Iterator, Literal, Sequence
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError


class UserError(Exception):
    """A mistake of the user's: one clear line that names the file, the key and the fix; exit code 2."""


# ------------------------------------------------------------------------------------------------ schema

def _whole(value: Any) -> Any:
    """1e5 is a float in YAML; where it is whole, an integer was meant."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]
Text = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f]*[^\x00-\x20][^\x00-\x1f]*$")]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1)]         # learning rates
Count = Annotated[Int, Field(ge=0, le=10**8)]
Positive = Annotated[Int, Field(ge=1, le=10**8)]


class Section(BaseModel):
    """Strict: no text for numbers, no unknown key, no NaN; frozen: nothing changes a value after loading."""
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RunSection(Section):
    seed: Int = Field(0, ge=0, lt=2**32)
    out: Text | None = None
    method: Literal["dream", "real", "both", "bc"] = "dream"
    threads: Int = Field(1, ge=1, le=256)
    processes: Int = Field(2, ge=1, le=64)
    tracker: Literal["none", "tensorboard", "wandb"] = "none"
    keep_checkpoints: Int = Field(2, ge=1, le=1000)


class EnvSection(Section):
    name: Literal["webshop", "alfworld"] = "webshop"
    data: Text | None = None
    human_goals: bool = False
    catalog_seed: Int = Field(0, ge=0, lt=2**32)
    max_steps: Int = Field(10, ge=1, le=1000)
    train_tasks: Positive | None = None


class CollectSection(Section):
    expert: Count = 0
    noisy: Count = 1050
    mediocre: Count = 250
    random: Count = 100
    curious: Count = 360


class TinySection(Section):
    layers: Int = Field(4, ge=1, le=64)
    width: Int = Field(128, ge=16, le=4096)
    heads: Int = Field(4, ge=1, le=64)
    mlp: Int = Field(384, ge=16, le=16384)
    vocab: Int = Field(1536, ge=800, le=65536)


class ModelSection(Section):
    name: Text = "tiny"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,2})?)$")] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quant: Literal["none", "nf4"] = "none"
    lora_rank: Int = Field(0, ge=0, le=1024)
    lora_alpha: float = Field(32.0, gt=0, le=4096)
    gradient_checkpointing: bool = False
    max_prompt_tokens: Int = Field(512, ge=16, le=131072)
    max_new_tokens: Int = Field(40, ge=1, le=8192)
    tiny: TinySection = TinySection()


class MexpModelSection(ModelSection):
    max_new_tokens: Int = Field(192, ge=1, le=8192)


class SftSection(Section):
    """Supervised training, shared by cloning the policy and by the experience model."""
    steps: Positive = 1000
    batch_tokens: Int = Field(1024, ge=16, le=10**7)
    lr: Rate = 4e-3
    optimizer: Literal["muon", "adamw"] = "muon"
    warmup: Share = 0.05
    prompt_weight: Share = 0.2
    rename: Share = 0.5
    history: Int = Field(4, ge=0, le=100)
    heads: Literal["constructed", "random"] = "random"


class PolicySection(SftSection):
    steps: Positive = 1500
    history: Int = Field(10, ge=0, le=100)
    heads: Literal["constructed", "random"] = "constructed"
    reasoning: bool = True
    demonstrations: Literal["success", "all"] = "all"


class MexpSection(SftSection):
    steps: Positive = 2000
    history: Int = Field(2, ge=0, le=100)
    heads: Literal["constructed", "random"] = "constructed"
    format: Literal["edits", "full"] = "edits"
    reasoning: bool = True
    temperature: float = Field(0.0, ge=0, le=5)
    retries: Int = Field(1, ge=0, le=10)
    judged: Share = 0.4
    counterfactual: Share = 0.7
    invent: Share = 0.5
    teacher: Text = "rules"
    endpoint: Text | None = None
    server_model: Text | None = None
    price_in: float = Field(0.0, ge=0, le=10**6)
    price_out: float = Field(0.0, ge=0, le=10**6)
    gate_false_success: Share = 0.05
    gate_false_failure: Share = 0.1


class RetrievalSection(Section):
    k: Int = Field(1, ge=0, le=100)
    encoder: Text = "hash"
    capacity: Positive = 50_000
    synthetic_share: Share = 0.5


class RLSection(Section):
    algorithm: Literal["grpo", "ppo"] = "grpo"
    iterations: Positive = 24
    tasks_per_step: Int = Field(16, ge=1, le=65536)
    group_size: Int = Field(8, ge=1, le=1024)
    max_turns: Positive | None = None
    temperature: float = Field(1.0, gt=0, le=5)
    lr: Rate = 3e-4
    lr_warmup: Count = 8
    adam_8bit: bool = False
    adam_eps: float = Field(3e-4, gt=0, le=0.1)
    weight_decay: Share = 0.01
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0, le=10)
    dual_clip: Annotated[float, Field(gt=1, le=1000)] | None = 3.0
    kl_coef: float = Field(0.05, ge=0, le=10)
    kl_in: Literal["loss", "reward", "none"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] = "k2"
    entropy_coef: float = Field(0.0, ge=0, le=1)
    norm_std: bool = True
    epochs: Int = Field(1, ge=1, le=100)
    minibatches: Int = Field(4, ge=1, le=1024)
    micro_tokens: Int = Field(4096, ge=32, le=10**7)
    max_grad_norm: float = Field(1.0, gt=0, le=1000)
    target_kl: Annotated[float, Field(gt=0, le=100)] | None = None
    invalid_penalty: Share = 0.2
    loss_denominator: Literal["tokens_of_step", "turns_of_step", "episodes_of_step"] = "tokens_of_step"
    mask_cut: bool = False
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    lam: Share = 1.0
    whiten: bool = True
    value_lr: Rate = 1e-3
    value_epochs: Int = Field(4, ge=1, le=100)
    value_warmup: Count = 2
    value_clip: Annotated[float, Field(gt=0, le=100)] | None = None
    rename: Share = 0.25
    reward_source: Literal["model", "rules"] = "model"
    eval_every: Count = 5
    save_every: Positive = 1


class CurriculumSection(Section):
    enabled: bool = True
    lambda_syn: Share = 0.25
    writer_share: Share = 0.05
    every: Positive = 1
    seeds: Int = Field(1, ge=1, le=64)
    candidates: Int = Field(4, ge=1, le=256)
    score: Literal["outcome", "graded"] = "outcome"
    half_life: float = Field(4.0, gt=0, le=10**6)
    floor: float = Field(0.05, ge=0, le=0.25)


class S2RSection(Section):
    transitions: Count = 1600
    tasks_per_step: Int = Field(8, ge=1, le=65536)
    lr: Rate = 1e-4


class EvalSection(Section):
    tasks: Positive = 200
    temperature: float = Field(0.4, ge=0, le=5)
    validation_tasks: Count = 100


class Config(Section):
    run: RunSection = RunSection()
    env: EnvSection = EnvSection()
    collect: CollectSection = CollectSection()
    policy_model: ModelSection = ModelSection()
    mexp_model: MexpModelSection = MexpModelSection()
    policy: PolicySection = PolicySection()
    mexp: MexpSection = MexpSection()
    retrieval: RetrievalSection = RetrievalSection()
    rl: RLSection = RLSection()
    curriculum: CurriculumSection = CurriculumSection()
    s2r: S2RSection = S2RSection()
    eval: EvalSection = EvalSection()

    @property
    def rl_turns(self) -> int:
        """Limit of an episode in RL, dreamed or real [actions]."""
        return self.rl.max_turns or self.env.max_steps

    @property
    def s2r_fewest_tasks(self) -> int:
        """Sim-to-real ends when its budget pays for fewer than these, half an iteration; every process plays as many."""
        return -(-max(1, self.s2r.tasks_per_step // 2) // self.run.processes) * self.run.processes


# Keys that may change between a run and its resumption: they alter no number of the run.
FREE_KEYS = {"run.out", "run.tracker", "run.keep_checkpoints"}


def contradictions(c: Config) -> Iterator[tuple[str, str]]:
    """Checks across keys: yields (dotted key, what is wrong, with the numbers and the fix)."""
    episodes = c.rl.tasks_per_step * c.rl.group_size
    parts = c.rl.minibatches * c.run.processes
    if c.rl.algorithm == "grpo" and c.rl.group_size < 2:
        yield "rl.group_size", "grpo compares the episodes of a group: at least 2, not 1 (or rl.algorithm: ppo)"
    if c.rl.tasks_per_step % c.run.processes:
        yield "rl.tasks_per_step", (f"{c.rl.tasks_per_step} tasks cannot be shared equally by run.processes = "
                                    f"{c.run.processes} (a group stays on one process)")
    if c.s2r.tasks_per_step % c.run.processes:
        yield "s2r.tasks_per_step", (f"{c.s2r.tasks_per_step} tasks cannot be shared equally by run.processes = "
                                     f"{c.run.processes} (a group stays on one process)")
    if 0 < c.s2r.transitions < c.s2r_fewest_tasks * c.rl.group_size * c.rl_turns:
        limit = "rl.max_turns" if c.rl.max_turns else "env.max_steps"
        yield "s2r.transitions", (f"{c.s2r.transitions} may not pay for half an iteration: {c.s2r_fewest_tasks} tasks x "
                                  f"rl.group_size {c.rl.group_size} x {limit} {c.rl_turns}; raise it, lower "
                                  "s2r.tasks_per_step, or set 0 for no sim-to-real")
    if episodes % parts:
        yield "rl.minibatches", (f"rl.tasks_per_step x rl.group_size = {c.rl.tasks_per_step} x {c.rl.group_size} = "
                                 f"{episodes} episodes do not divide into rl.minibatches x run.processes = "
                                 f"{c.rl.minibatches} x {c.run.processes} = {parts} parts")
    if c.rl.kl_in == "none" and c.rl.kl_coef > 0:
        yield "rl.kl_coef", f"{c.rl.kl_coef:g} has no effect with rl.kl_in = none: set it to 0, or kl_in to loss"
    if c.rl.kl_in != "none" and c.rl.kl_coef == 0:
        yield "rl.kl_in", f"{c.rl.kl_in} has no effect with rl.kl_coef = 0: set rl.kl_in to none"
    if c.rl.kl_in == "loss" and c.rl.kl_estimator == "k1":
        yield "rl.kl_estimator", "k1 in the loss has an expected gradient of zero: use k2 or k3, or rl.kl_in: reward"
    if c.rl.kl_in == "reward" and c.rl.kl_estimator != "k1":
        yield "rl.kl_estimator", f"{c.rl.kl_estimator} in the reward has a biased gradient: use k1, or rl.kl_in: loss"
    if c.rl.eval_every and not c.eval.validation_tasks:
        yield "eval.validation_tasks", f"0 tasks to validate on every rl.eval_every = {c.rl.eval_every} iterations"

    for key, value in (("rl.rename", c.rl.rename), ("mexp.invent", c.mexp.invent)):
        if c.env.name == "alfworld" and value:
            yield key, f"{value:g}: ALFWorld's states cannot be read with other words than their own: set it to 0"

    for name, sft in (("policy", c.policy), ("mexp", c.mexp)):
        model: ModelSection = getattr(c, f"{name}_model")
        section, tiny = f"{name}_model", model.tiny
        row = model.max_prompt_tokens + model.max_new_tokens
        sizes = f"{section}.max_prompt_tokens + max_new_tokens = {model.max_prompt_tokens} + {model.max_new_tokens}"
        if sft.batch_tokens < row:
            yield f"{name}.batch_tokens", f"{sft.batch_tokens} cannot hold one row of {sizes} = {row} tokens"
        if name == "policy" and c.rl.micro_tokens < row:
            yield "rl.micro_tokens", f"{c.rl.micro_tokens} cannot hold one row of {sizes} = {row} tokens"
        if tiny.width % (2 * tiny.heads):
            yield f"{section}.tiny.heads", (f"width {tiny.width} over {tiny.heads} heads gives no even head size "
                                            f"({tiny.width / tiny.heads:g}), which rotary positions need")
        if model.name == "tiny" and model.quant != "none":
            yield f"{section}.quant", "the tiny model is not quantised: set it to none"
        if model.name == "tiny" and model.lora_rank:
            yield f"{section}.lora_rank", "the tiny model is trained in full: set it to 0"
        if model.quant == "nf4" and not model.lora_rank:
            yield f"{section}.lora_rank", "4-bit weights cannot be trained themselves: 1 or more (for example 16)"
        if sft.heads == "constructed" and model.name != "tiny":
            yield f"{name}.heads", f"only the tiny model has constructed heads, not {model.name}: set it to random"
        if sft.heads == "constructed" and tiny.layers < 2:
            yield f"{section}.tiny.layers", f"constructed heads span two layers, not {tiny.layers}"
        if sft.optimizer == "muon" and model.lora_rank:
            yield f"{name}.optimizer", "muon is for full matrices, not for LoRA factors: use adamw"

    if c.env.human_goals and (c.env.name != "webshop" or c.env.data is None):
        yield "env.human_goals", "only the official WebShop data hold human goals: name their folder in env.data"
    for key, value in (("run.out", c.run.out), ("env.data", c.env.data)):
        try:
            Path(value or ".").expanduser()
        except RuntimeError:
            yield key, f"{_show(value)}: there is no such user's home"
            return
    if c.env.name == "webshop" and c.env.data is not None and not Path(c.env.data).expanduser().is_dir():
        yield "env.data", f"no such folder: {c.env.data}"         # the games of ALFWorld say themselves what is missing
    if c.collect.expert + c.collect.noisy == 0:
        yield "collect.noisy", "0, and collect.expert too: cloning needs successful episodes"
    yield from _servers(c)


BASE_VARIABLES = ("DREAMGYM_BASE_URL", "OPENAI_BASE_URL")


def is_address(name: str) -> bool:
    """``mexp.teacher`` names a server (and no folder, no model of the hub)."""
    return "://" in name or name == "endpoint"


def server_address(name: str) -> str:
    """The address that ``mexp.teacher`` or ``mexp.endpoint`` holds; ``endpoint``: the one in the environment.

    Raises UserError where that is not set or no address.  Asked only where the server is: a run's folder can be read
    without it.
    """
    if name != "endpoint":
        return name
    variable = next((v for v in BASE_VARIABLES if os.environ.get(v)), None)
    if not variable:
        raise UserError("the server called endpoint (mexp.teacher, mexp.endpoint) has no address: set "
                        f"{' or '.join(BASE_VARIABLES)} in the environment, or name the address itself")
    for problem in _address_problems(os.environ[variable]):
        raise UserError(f"{variable}: {problem}")
    return os.environ[variable]


def _address_problems(name: str) -> Iterator[str]:
    try:
        address = urlsplit(name)
        address.port                                                   # raises where it is no number up to 65535
    except ValueError:                                                 # also half an IPv6 address
        address = urlsplit("")
    if address.username or address.password or address.query:
        yield "must hold no user, password or query: keys come from the environment only"
    elif address.scheme not in ("http", "https") or not address.hostname:
        yield f"must start with http:// or https:// and name a host, with a port if any, not {_show(name)}"


def _servers(c: Config) -> Iterator[tuple[str, str]]:
    """Contradictions among the keys that name the teacher and the servers."""
    for key, name in (("mexp.endpoint", c.mexp.endpoint), ("mexp.teacher", c.mexp.teacher)):
        if name is not None and name != "endpoint" and (key == "mexp.endpoint" or is_address(name)):
            yield from ((key, problem) for problem in _address_problems(name))
    if c.mexp.endpoint is None and not is_address(c.mexp.teacher):
        for key in ("server_model", "price_in", "price_out"):
            if getattr(c.mexp, key):
                yield f"mexp.{key}", "has no effect without a server: name one in mexp.teacher or mexp.endpoint"
    if c.mexp.endpoint is not None:
        if c.mexp.teacher != "rules":
            yield "mexp.teacher", ("has no effect with mexp.endpoint, where no experience model is trained: set it to "
                                   "rules")
        if c.curriculum.enabled:
            yield "curriculum.enabled", ("tasks are written by the experience model and ranked by its log-probabilities, "
                                         "which the server of mexp.endpoint does not give: set it to false")
    if c.mexp.teacher != "rules":
        if c.mexp.teacher == "tiny":
            yield "mexp.teacher", "tiny is no teacher: rules, an address (http://..), endpoint, a hub id or a folder"
        if not c.mexp.reasoning:
            yield "mexp.teacher", f"{_show(c.mexp.teacher)} has no effect with mexp.reasoning = false: set it to rules"
        if c.mexp.counterfactual:
            yield "mexp.counterfactual", (f"changed purchases can be explained by mexp.teacher = rules alone, not by "
                                          f"{_show(c.mexp.teacher)}: set it to 0")


# -------------------------------------------------------------------------------------------- YAML reading

class _Loader(yaml.SafeLoader):
    """Plain values as in YAML 1.2: 1e-5 is a number; on, yes, 010 and 1:30 are text (and then refused)."""
    yaml_implicit_resolvers: dict = {}


_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_WHOLE = r"(?:0|[1-9][0-9]*(?:_[0-9]+)*)"
for _tag, _pattern, _first in (
        ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
        ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
        ("int", rf"^[-+]?{_WHOLE}$", list("-+0123456789")),
        ("float", rf"^(?:[-+]?(?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS}|{_WHOLE}(?=[eE]))(?:[eE][-+]?[0-9]+)?"
                  r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", list("-+0123456789."))):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)

_MAX_BYTES = 200_000


def _read_text(path: Path) -> str:
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            raise UserError(f"{path}: is a folder, a YAML file is needed (for example {path / 'webshop.yaml'})")
        if not stat.S_ISREG(kind):
            raise UserError(f"{path}: is not a regular file")
        if path.stat().st_size > _MAX_BYTES:
            raise UserError(f"{path}: larger than {_MAX_BYTES:,} bytes, this is no configuration")
        raw = path.read_bytes()
    except (OSError, ValueError) as error:                            # ValueError: a NUL byte in the name
        reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{_clean(str(path))}: cannot be read: {reason}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[:error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8 (byte 0x{raw[error.start]:02x}): save the file as UTF-8") from None


def _compose(text: str, path: Path) -> yaml.Node:
    depth = 0
    try:
        for event in yaml.parse(text, _Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > 10:
                raise UserError(f"{path}:{event.start_mark.line + 1}: nested too deeply, this is no configuration")
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise UserError(f"{path}:{event.start_mark.line + 1}: anchors and aliases (& and *) are not supported; "
                                f"put text that starts with them in quotes")
        node = yaml.compose(text, _Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{path}:{line}: forbidden control character 0x{error.character:02x}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "not valid YAML"
        if "'\\t'" in problem:
            problem = "a tab where YAML wants spaces"
        if "single document" in str(error):
            problem = "a second document begins (---): one file holds one document"
        raise UserError(f"{path}:{mark.line + 1 if mark else 1}: not valid YAML: {_clean(problem)}") from None
    if node is None:
        raise UserError(f"{path}: the file is empty; it needs `defaults:` (see configs/webshop.yaml)")
    return node


def _scalar(node: yaml.Node, place: str) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        kind = "list" if isinstance(node, yaml.SequenceNode) else "mapping"
        raise UserError(f"{place}: takes one value, not a {kind}")
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    try:
        if kind in ("int", "float"):
            if len(node.value) > 40:
                raise ValueError
            return int(node.value) if kind == "int" else float(re.sub(r"\.(?=[infaIFNA])", "", node.value))
        if kind in ("null", "bool", "str"):
            return {"null": None, "bool": node.value.lower() == "true", "str": node.value}[kind]
    except ValueError:
        raise UserError(f"{place}: {_show(node.value)} is no usable number") from None
    raise UserError(f"{place}: YAML tags are not supported ({_clean(node.tag)})")


def _pairs(node: yaml.Node, path: Path, what: str) -> Iterator[tuple[str, yaml.Node, str]]:
    """(key, value node, ``file:line``) of a mapping; refuses anything else, and a key that occurs twice."""
    here = f"{path}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null"):
        return                                                         # a section with everything commented out
    if not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else f"the value {_show(node.value)}"
        raise UserError(f"{here}: {what} must be a mapping (key: value), not {kind}")
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"{path}:{line}: a key must be one word")
        if key.value in seen:
            raise UserError(f"{path}:{line}: {_clean(key.value)}: occurs twice, first in line {seen[key.value]}")
        seen[key.value] = line
        yield key.value, value, f"{path}:{line}"


# --------------------------------------------------------------------------- layers: dotted key -> (value, place)

Layer = dict[str, tuple[Any, str]]


def _fields(section: type[Section] = Config, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> pydantic field of every value, in the order of the schema."""
    fields: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            fields |= _fields(field.annotation, f"{prefix}{name}.")
        else:
            fields[prefix + name] = field
    return fields


KEYS = _fields()
_SECTIONS = {key.rpartition(".")[0] for key in KEYS} | {key.split(".")[0] for key in KEYS}


def _unknown(key: str) -> str:
    """Message for an unknown key: the nearest valid one, siblings first, then the same name in another section."""
    section, _, name = key.rpartition(".")
    siblings = [k for k in [*KEYS, *_SECTIONS] if k.rpartition(".")[0] == section]
    near = difflib.get_close_matches(key, siblings, 1, 0.75)
    near = near or [k for k in KEYS if k.rpartition(".")[2] == name][:3]
    near = near or difflib.get_close_matches(key, [*KEYS, *_SECTIONS], 1, 0.4) or sorted(_SECTIONS)
    return f"{_clean(key)}: unknown key; did you mean {' or '.join(near)}?"


def _layer(node: yaml.Node, path: Path, what: str, prefix: str = "") -> Layer:
    layer: Layer = {}
    for name, value, place in _pairs(node, path, what):
        key = prefix + name
        if key in KEYS:
            layer[key] = _scalar(value, f"{place}: {key}"), place
        elif key in _SECTIONS:
            layer |= _layer(value, path, key, f"{key}.")
        else:
            raise UserError(f"{place}: {_unknown(key)}")
    return layer


def _override_layer(overrides: Sequence[str]) -> Layer:
    """``rl.lr=1e-5`` with the value read like a plain YAML value; the last of several wins."""
    layer: Layer = {}
    for text in overrides:
        key, equals, raw = (part.strip() for part in text.partition("="))
        place = f"--set {_clean(re.sub('//[^/@]*@', '//..@', text))}"                    # no password in a log
        if not equals or not key:
            raise UserError(f"{place}: write it as key=value, for example rl.lr=1e-5")
        if key in _SECTIONS:
            raise UserError(f"{place}: {key} is a section; set one of its keys, for example "
                            f"{next(k for k in KEYS if k.startswith(key + '.'))}")
        if key not in KEYS:
            raise UserError(f"{place}: {_unknown(key)}")
        if len(raw) > 1 and raw[0] == raw[-1] and raw[0] in "'\"":
            value: Any = raw[1:-1]
        else:
            tag = _Loader("").resolve(yaml.ScalarNode, raw, (True, False))
            value = _scalar(yaml.ScalarNode(tag, raw), f"{place}: {key}")
            if value is not None and _is_text(KEYS[key]):
                value = raw                                            # run.out=2024 is a folder's name, not a number
        layer[key] = value, place
    return layer


def _is_text(field: Any) -> bool:
    return "str" in str(field.annotation) and "Literal" not in str(field.annotation)


# ------------------------------------------------------------------------------------------------ validation

def _show(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _clean(text: str) -> str:
    """One printable line of at most 200 characters."""
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= 200 else text[:197] + "..."


_WANTED = {"int_type": "a whole number", "float_type": "a number", "bool_type": "true or false", "string_type": "text",
           "finite_number": "a finite number"}
_BOUND = {"greater_than_equal": ("at least", "ge"), "greater_than": ("greater than", "gt"),
          "less_than_equal": ("at most", "le"), "less_than": ("less than", "lt")}


def _explain(error: dict) -> str:
    """One plain sentence for one pydantic error."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    shown = "empty" if value is None else f"not {_show(value)}"
    if kind in _WANTED:
        hint = ""
        if isinstance(value, str) and kind in ("int_type", "float_type"):
            hint = " (text; a number is written without quotes)"
        return f"must be {_WANTED[kind]}, {shown}{hint}"
    if kind in _BOUND:
        words, name = _BOUND[kind]
        return f"must be {words} {context[name]:g}, {shown}"
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", context["expected"])
        near = difflib.get_close_matches(str(value), allowed, 1, 0.6)
        return f"must be one of {', '.join(allowed)}, {shown}" + (f"; did you mean {near[0]}?" if near else "")
    if kind in ("string_pattern_mismatch", "string_too_short", "string_too_long"):
        return f"{_show(value)} is no usable text here" + (f" (pattern {context['pattern']})" if "auto" in
                                                          context.get("pattern", "") else "")
    return _clean(error["msg"])


def _where(layer: Layer, key: str) -> str:
    return f"{layer[key][1]}: {key}" if key in layer else key


def _validate(layer: Layer) -> Config:
    """Types and bounds of every value of one layer; contradictions between keys are left to the caller."""
    tree: dict[str, Any] = {}
    for key, (value, _) in layer.items():
        *sections, name = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[name] = value

    try:
        return Config.model_validate(tree)
    except ValidationError as errors:
        first, *rest = errors.errors()
        more = f" (and {len(rest)} more)" if rest else ""
        raise UserError(f"{_where(layer, '.'.join(map(str, first['loc'])))}: {_explain(first)}{more}") from None


# --------------------------------------------------------------------------------------------- profiles, loading

_LARGE = 20e9          # bytes: what a 24 GB card has to offer at the least


def choose_profile(gpus: Sequence[float]) -> tuple[str, str]:
    """Profile for the memory (bytes) of each CUDA device, and the reason in words."""
    large = [memory for memory in gpus if memory >= _LARGE]
    if len(large) >= 2:
        return "gpu2x24", f"{len(large)} GPUs of {min(large) / 1e9:.0f} GB or more"
    if large:
        return "gpu24", f"one GPU of {large[0] / 1e9:.0f} GB"
    if gpus:
        return "smollm2", f"the largest GPU has {max(gpus) / 1e9:.0f} GB, less than {_LARGE / 1e9:.0f}"
    return "cpu", "no CUDA device"


def cuda_memory() -> list[float]:
    """Bytes of memory of every CUDA device that torch can use."""
    import torch                               # late: a wrong configuration is refused without waiting for it
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]


def _layers(path: Path) -> tuple[Layer, dict[str, Layer]]:
    """(defaults, profiles by name) of a file."""
    parts: dict[str, yaml.Node] = {}
    for name, node, place in _pairs(_compose(_read_text(path), path), path, "the file"):
        if name not in ("defaults", "profiles"):
            hint = f"; {name} belongs under defaults or a profile" if name in _SECTIONS else ""
            raise UserError(f"{place}: {_clean(name)}: unknown; a file holds `defaults` and `profiles`{hint}")
        parts[name] = node
    if "defaults" not in parts:
        raise UserError(f"{path}: `defaults:` is missing (see configs/webshop.yaml)")

    defaults = _layer(parts["defaults"], path, "defaults")
    profiles: dict[str, Layer] = {}
    if "profiles" in parts:
        for name, node, _ in _pairs(parts["profiles"], path, "profiles"):
            profiles[name] = _layer(node, path, f"profile {_clean(name)}")
    return defaults, profiles


def load(path: str | os.PathLike, profile: str | None = None, overrides: Sequence[str] = ()) -> tuple[Config, str]:
    """Reads, merges (defaults < profile < overrides) and checks a configuration.

    Returns (configuration, line that says which profile was taken and why).  ``run.out`` is always filled in.
    Raises UserError, one line with file, line and key.
    """
    defaults, profiles = _layers(Path(path))
    changes = _override_layer(overrides)
    if profile is not None and profile not in profiles:
        near = difflib.get_close_matches(profile, profiles, 1, 0.4)
        hint = f"did you mean {near[0]}?" if near else f"the file has {', '.join(profiles) or 'none'}"
        raise UserError(f"{path}: no profile {_show(profile)}; {hint}")
    for layer in [{}, *profiles.values()]:           # values of other profiles too: a typo there is found today
        _validate(defaults | layer)

    if profile is not None:
        reason = f"profile {profile}: asked for"
    elif not profiles:
        profile, reason = "defaults", "no profile: the file has none"
    else:
        profile, why = choose_profile(cuda_memory())
        reason = f"profile {profile}: {why}"
        if profile not in profiles:
            profile, reason = "defaults", f"no profile: {why}, but {path} has no profile {profile}"
    chosen = defaults | profiles.get(profile, {}) | changes
    config = _validate(chosen)
    for key, message in contradictions(config):
        raise UserError(f"{_where(chosen, key)}: {message}")
    if config.run.out is None:
        out = f"runs/{config.env.name}-{profile}-s{config.run.seed}"
        config = config.model_copy(update={"run": config.run.model_copy(update={"out": out})})
    return config, reason


# --------------------------------------------------------------------------------------------------- use

def flatten(config: Config) -> dict[str, Any]:
    """Dotted key -> value, in the order of the schema."""
    values: dict[str, Any] = {}
    for key in KEYS:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        values[key] = value
    return values


def to_yaml(config: Config) -> str:
    """A file that ``load`` reads back to the same configuration; its first line says how many values follow."""
    text = yaml.safe_dump({"defaults": config.model_dump()}, sort_keys=False, allow_unicode=True)
    return f"# {len(KEYS)} values\n{text}"


def load_run(folder: str | os.PathLike, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run folder, as ``to_yaml`` wrote it; ``overrides`` as for ``load``.

    Raises UserError, also where a part of the file is missing: what is left of it is valid YAML, and the values that
    are gone would silently be the defaults.
    """
    path = Path(folder) / "config.yaml"
    text, found = _read_text(path), len(_layers(path)[0])
    if not text.startswith(f"# {found} values\n") or not text.endswith("\n"):
        raise UserError(f"{path}: not whole, or of an older version: its first line should say {found} values and its last "
                        "one be complete; restore it")
    return load(path, None, overrides)[0]


def describe_differences(old: Config, new: Config) -> list[str]:
    """``rl.lr: 0.001 -> 0.0003`` for every value that differs and matters to the numbers of a run."""
    before, after = flatten(old), flatten(new)
    return [f"{key}: {_show(before[key])} -> {_show(after[key])}"
            for key in KEYS if key not in FREE_KEYS and before[key] != after[key]]


_NOT_OURS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}


def run_main(main: Callable[[], int | None]) -> int:
    """Exit code of ``main``: a UserError, a full disk, a missing permission or an endless name is one line on
    stderr and code 2."""
    try:
        return main() or 0
    except UserError as error:
        message = str(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
        message = f"{error.filename or 'output'}: {error.strerror.lower()}"
    message = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(message.split()))
    shown = message if len(message) <= 1000 else f"{message[:597]}...{message[-400:]}"       # the end says what is wrong
    print(f"error: {shown}", file=sys.stderr)
    return 2
