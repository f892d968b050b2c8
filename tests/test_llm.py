"""The language-model layer: the tiny backbone, exact sampling, log-probs, supervised training, export."""
import math
import random
from dataclasses import replace

import pytest
import torch
from tokenizers import processors

import llm
import training
from config import UserError
from mexp import PIECES, invented_words
from rl_world import byte_tokenizer, word_tokenizer

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


def tiny(seed=0, compute=torch.float32, scale=1.0, **sizes):
    """Two layers of random weights; ``scale`` sharpens the distribution."""
    sizes = {"layers": 2, "width": 32, "heads": 2, "mlp": 48} | sizes
    lm = llm.tiny_lm(word_tokenizer(WORDS), **sizes, seed=seed, constructed=False)
    with torch.no_grad():
        lm.model.model.embed_tokens.weight.mul_(scale)
    lm.compute = compute
    return lm


def prompts(count, seed=0, longest=9):
    rng = random.Random(seed)
    return [[rng.randrange(2, 10) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def logprobs(lm, prompt, answer, temperature=1.0):
    ids, mask = llm.pad_rows([prompt + answer], lm.pad_id, lm.device)
    hidden = llm.hidden_states(lm, ids, mask)[0, len(prompt) - 1:len(prompt) + len(answer) - 1]
    return llm.token_logprobs(lm, hidden, torch.tensor(answer), temperature)[0]


def greedy_by_transformers(lm, prompt, length):
    model = lm.causal_lm()
    out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                         max_new_tokens=length, do_sample=False, eos_token_id=sorted(lm.stop_ids),
                         pad_token_id=lm.pad_id)
    return out[0, len(prompt):].tolist()


# ------------------------------------------------------------------------------------------------ text
def test_tokenizer_is_lossless_and_one_token_a_word():
    texts = ["click buy , color red", "search red shoes | $49.5"] * 3
    tokenizer = llm.train_tokenizer(texts, 400)
    lm = llm.tiny_lm(tokenizer, 1, 16, 2, 16, constructed=False)
    assert len(lm.encode(texts[0])) == 5
    for text in (*texts, "unseen wörds \u2603", "two  spaces", " edge ", "<|eos|> is plain text", ""):
        ids = lm.encode(text)
        assert lm.decode(ids) == text and lm.eos_id not in ids
    assert lm.decode(lm.encode("click buy") + [lm.eos_id]) == "click buy"


def test_tokenizer_spells_unseen_words_in_its_pieces():
    texts = ["click buy , red tomato tomato basket", "restore tomato , red buy basket click"] * 3
    lm = llm.tiny_lm(llm.train_tokenizer(texts, 1000, PIECES), 1, 16, 2, 16, constructed=False)
    assert all(len(lm.encode(text)) == len(text.split(" ")) for text in texts)
    pieces = {piece.strip() for piece in PIECES}
    for word in invented_words(2000, random.Random(0)) + invented_words(200, random.Random(0), measuring=True):
        spelled = [lm.tokenizer.decode([i]).strip() for i in lm.encode(word)]
        assert 2 <= len(spelled) <= 3 and pieces.issuperset(spelled) and "".join(spelled) == word
    for text in (*texts, "unseen wörds \u2603", "two  spaces", " edge ", "<|eos|> gadget stobar", ""):
        assert lm.decode(lm.encode(text)) == text
    with pytest.raises(ValueError, match="piece"):
        llm.train_tokenizer(texts, 400, ["abc"])


@pytest.mark.parametrize("chat", [True, False])
def test_a_prompt_has_one_bos(chat):
    """Although the tokenizer adds one to every text, and the chat template writes one itself."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    lm = replace(tiny(), tokenizer=tokenizer, spaced=False, chat=chat)
    assert tokenizer("a")["input_ids"] == [tokenizer.bos_token_id, *lm.encode("a")]
    assert lm.prompt("be", " a") == [tokenizer.bos_token_id, *lm.encode("be a" if chat else " a")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_precision_is_the_chosen_one(dtype):
    """Of the training pass and of the copy that samples, whatever the hardware prefers."""
    lm = llm.tiny_lm(word_tokenizer(WORDS), 1, 16, 2, 16, constructed=False, dtype=dtype)
    chosen = getattr(torch, dtype)
    with lm.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == chosen
    assert next(lm.sampler().parameters()).dtype == chosen
    assert next(lm.model.parameters()).dtype == torch.float32


def test_the_sampler_is_never_stale():
    """Every kind of optimizer step renews the low-precision copy that samples."""
    import training
    lm = llm.tiny_lm(word_tokenizer(WORDS), 1, 16, 2, 16, constructed=False, dtype="bfloat16")
    options = {"lr": 0.1, "weight_decay": 0.0}
    for optimizer in (torch.optim.AdamW(lm.model.parameters(), fused=True, **options),
                      torch.optim.AdamW(lm.model.parameters(), fused=False, **options)):
        for p in lm.model.parameters():
            p.grad = torch.ones_like(p)
        before = lm.sampler()
        assert lm.sampler() is before
        training.optimizer_step(optimizer, 0.1, 0, 1e9)
        now = lm.sampler()
        for own, copied in zip(lm.model.parameters(), now.parameters()):
            assert torch.equal(own.to(torch.bfloat16), copied)


def test_constructed_heads_copy_before_any_training():
    words = [f"w{i}" for i in range(300)]
    lm = llm.tiny_lm(llm.train_tokenizer([" ".join(words)] * 3, 700), seed=3)
    rng = random.Random(0)
    right = 0
    for _ in range(20):
        ids = lm.encode(" ".join(rng.sample(words, 24)))
        right += llm.generate(lm, [ids + ids[:8]], 1, 0.0)[0].ids == [ids[8]]
    assert right >= 16


# ------------------------------------------------------------------------------------------------ sampling
def test_greedy_equals_transformers_with_mixed_lengths_in_a_batch():
    lm = tiny(scale=8.0)
    lm.model.generation_config.eos_token_id = [lm.eos_id, 4, 7]
    batch = prompts(12)
    samples = llm.generate(lm, batch, 10, 0.0)
    for prompt, sample in zip(batch, samples):
        assert sample.ids == greedy_by_transformers(lm, prompt, 10)
        assert sample.cut == (sample.ids[-1] not in lm.stop_ids)
    assert len({len(s.ids) for s in samples}) > 1               # some end early, so rows leave the batch


@pytest.mark.parametrize("compute, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
def test_sampled_probabilities_are_those_of_the_training_forward(compute, tolerance, monkeypatch):
    """Stated tolerance of one log-prob: 2e-5 in fp32; 0.1 in bf16, where the sampler's weights are rounded, too."""
    lm = tiny(compute=compute, scale=3.0)
    monkeypatch.setattr(llm, "ROWS", 1)                        # no spare rows
    seen = []
    draw = torch.multinomial

    def watched(probs, *args, **kwargs):
        token = draw(probs, *args, **kwargs)
        seen.append((probs, token[:, 0]))
        return token

    monkeypatch.setattr(torch, "multinomial", watched)
    batch = prompts(8, seed=1)
    samples = llm.generate(lm, batch, 8, 0.7, torch.Generator().manual_seed(0))
    for step, (probs, token) in enumerate(seen):               # what is reported is what was drawn from
        drawn = probs.gather(-1, token[:, None])[:, 0].log().tolist()
        assert sorted(drawn) == sorted(s.logprobs[step] for s in samples if step < len(s.ids))
    for prompt, sample in zip(batch, samples):
        expected = logprobs(lm, prompt, sample.ids, 0.7)
        assert expected.dtype == torch.float32
        assert torch.tensor(sample.logprobs).sub(expected).abs().max() < tolerance
    assert len({len(s.ids) for s in samples}) > 1              # some end early, so rows move


def test_rows_that_leave_a_cache_make_room_in_place():
    cache = llm.RowCache(tiny().model.config, 5, 6, torch.float32, torch.device("cpu"))
    cache.keys[:], cache.values[:], cache.seen = torch.arange(5.0)[:, None, None, None], 0, 4
    memory = cache.keys.data_ptr()
    cache.keep([0, 4, 2])                                      # rows 1 and 3 ended
    assert cache.keys[-1, :, 0, :4, 0].tolist() == [[0.0] * 4, [4.0] * 4, [2.0] * 4]
    assert cache.keys.shape[1] == cache.values.shape[1] == 3 and cache.keys.data_ptr() == memory


def test_spare_rows_change_no_sample(monkeypatch):
    lm, found = tiny(scale=8.0), {}
    for rows in (1, 8):
        monkeypatch.setattr(llm, "ROWS", rows)
        found[rows] = llm.generate(lm, prompts(11), 10, 0.0)
    assert found[1] == found[8]


def test_temperature_is_the_only_change_of_the_distribution():
    """A generation config that asks for more is ignored, and frequencies follow softmax(logits / T)."""
    lm = tiny(scale=3.0)
    lm.model.generation_config.update(top_k=1, top_p=0.01, repetition_penalty=9.0, temperature=9.0)
    prompt = [2, 3, 4]
    n = 20_000
    samples = llm.generate(lm, [prompt] * n, 1, 1.5, torch.Generator().manual_seed(0))
    share = torch.bincount(torch.tensor([s.ids[0] for s in samples]), minlength=10) / n
    expected = torch.stack([logprobs(lm, prompt, [t], 1.5).exp() for t in range(10)])[:, 0]
    assert torch.allclose(share, expected, atol=4 * 0.5 / math.sqrt(n))


def test_identical_prompts_are_computed_once(monkeypatch):
    lm = tiny()
    monkeypatch.setattr(llm, "ROWS", 1)
    sizes = []
    forward = lm.model.model.forward
    monkeypatch.setattr(lm.model.model, "forward", lambda **kw: sizes.append(kw["input_ids"].shape) or forward(**kw))
    same = llm.generate(lm, [[2, 3, 4]] * 6 + [[5]], 3, 0.0)
    assert sizes[0] == (2, 16) and all(shape[0] <= 2 for shape in sizes)
    assert all(s.ids == same[0].ids for s in same[:6])
    sizes.clear()
    several = llm.generate(lm, [[2, 3, 4]] * 6, 3, 1.0, torch.Generator().manual_seed(0))
    assert sizes[0] == (1, 16) and sizes[1][0] > 1               # one prompt pass, six continuations
    assert len({tuple(s.ids) for s in several}) > 1


def test_prompts_of_like_length_share_a_pass_and_old_memory_is_never_read(monkeypatch):
    """A long prompt does not make the short ones long, and what lay in the cache's memory before changes nothing."""
    lm, sizes, empty, forward = tiny(scale=8.0), [], torch.empty, llm._next_logits
    monkeypatch.setattr(llm, "PROMPT_ROWS", 8)
    monkeypatch.setattr(llm, "_next_logits", lambda model, ids, *rest: sizes.append(ids.shape) or forward(model, ids, *rest))
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: empty(*a, **kw).fill_(math.nan) if "dtype" in kw else empty(*a, **kw))
    batch = [prompt * repeat for repeat in (1, 2, 40) for prompt in prompts(8, seed=repeat)]
    samples = llm.generate(lm, batch, 6, 0.0)
    assert [s.ids for s in samples] == [greedy_by_transformers(lm, prompt, 6) for prompt in batch]
    passes = [shape for shape in sizes if shape[1] > 1]
    assert len(passes) == 3 and passes[0][1] < passes[2][1] / 4


def test_on_a_cpu_the_copy_reads_and_the_master_writes():
    lm = tiny(compute=torch.bfloat16, scale=8.0)
    assert next(lm.sampler().parameters()).dtype == torch.bfloat16 and lm.writer() is lm.model
    assert lm.cache_dtype() == torch.float32 and tiny(compute=torch.float32).cache_dtype() == torch.float32
    exact = llm.generate(tiny(compute=torch.float32, scale=8.0), prompts(12), 6, 0.0)
    rounded = llm.generate(lm, prompts(12), 6, 0.0)
    assert sum(a.ids == b.ids for a, b in zip(exact, rounded)) >= 10           # only the prompts are rounded


def test_batches_respect_rows_and_cache_size(monkeypatch):
    lm = tiny()
    batch = prompts(20, seed=2)
    expected = llm.generate(lm, batch, 4, 0.0)
    assert llm.generate(lm, batch, 4, 0.0, max_rows=3) == expected
    monkeypatch.setattr(llm, "CACHE_BYTES", 30 * llm.cache_bytes(lm.model.config, lm.compute))
    unique = {tuple(p): [i] for i, p in enumerate(batch)}
    chunks = list(llm.batches_of(lm, unique, 4, 0.0, 128))
    assert max(len(c) * (len(c[-1]) + 4) for c in chunks) <= 30 and sum(map(len, chunks)) == len(unique)
    assert llm.generate(lm, batch, 4, 0.0) == expected


def test_sampling_is_repeatable_and_a_foreign_generator_is_made_to_fit():
    lm = tiny()
    runs = [llm.generate(lm, prompts(5), 6, 1.0, torch.Generator().manual_seed(7)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert llm.generate(lm, prompts(5), 6, 1.0, torch.Generator().manual_seed(8)) != runs[0]


def test_every_stop_token_ends_an_answer():
    lm = tiny(scale=8.0)
    free = llm.generate(lm, [[2, 3]], 8, 0.0)[0]
    stop = free.ids[2]
    lm.model.generation_config.eos_token_id = [lm.eos_id, stop]
    short = llm.generate(lm, [[2, 3]], 8, 0.0)[0]
    assert short == llm.Sample(free.ids[:free.ids.index(stop) + 1], cut=False)
    assert lm.decode(short.ids) == lm.decode(short.ids[:-1])


def test_empty_prompts_are_refused_and_no_prompts_are_fine():
    lm = tiny()
    with pytest.raises(ValueError, match="prompt 1 of 2 is empty"):
        llm.generate(lm, [[2], []], 4, 0.0)
    assert llm.generate(lm, [], 4, 0.0) == []


def test_mode_is_restored_even_after_an_error(monkeypatch):
    lm = tiny()
    for training_mode in (True, False):
        lm.model.train(training_mode)
        llm.generate(lm, [[2, 3]], 2, 0.0)
        assert lm.model.training is training_mode
    lm.model.train()
    monkeypatch.setattr(lm.model.model, "forward", lambda **kw: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate(lm, [[2, 3]], 2, 0.0)
    assert lm.model.training


def test_checkpointing_and_train_mode_do_not_change_what_is_sampled():
    lm = tiny()
    expected = llm.generate(lm, prompts(4), 6, 0.0)
    lm.model.activation_checkpointing_enable({"use_reentrant": False})
    lm.model.train()
    assert llm.generate(lm, prompts(4), 6, 0.0) == expected


def test_low_precision_copy_follows_the_weights():
    lm = tiny(compute=torch.bfloat16)
    first = lm.sampler()
    assert first is lm.sampler() and next(first.parameters()).dtype == torch.bfloat16
    with torch.no_grad():
        lm.model.lm_head.weight[2].add_(5.0)
    assert lm.sampler() is not first
    assert torch.equal(lm.sampler().lm_head.weight, lm.model.lm_head.weight.bfloat16())


# ------------------------------------------------------------------------------------------------ log-probs
def test_logprobs_do_not_depend_on_padding_or_neighbours():
    lm = tiny(scale=3.0)
    rows = prompts(6, seed=3)
    ids, mask = llm.pad_rows([*rows, [2] * 40], lm.pad_id, lm.device)
    together = llm.hidden_states(lm, ids, mask)
    for i, row in enumerate(rows):
        alone = llm.hidden_states(lm, torch.tensor([row]), torch.ones(1, len(row), dtype=torch.long))
        assert torch.allclose(together[i, :len(row)], alone[0], atol=1e-5)


def test_left_padding_and_empty_rows_are_refused():
    lm = tiny()
    with pytest.raises(ValueError, match="padded on the right"):
        llm.hidden_states(lm, torch.tensor([[0, 2, 3]]), torch.tensor([[0, 1, 1]]))


def test_logprobs_against_float64_chunks_and_entropy():
    lm = tiny(scale=3.0)
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.arange(50) % 10
    logits = hidden.double() @ lm.model.lm_head.weight.double().T / 0.7
    expected = logits.log_softmax(-1)
    logp, entropy = llm.token_logprobs(lm, hidden, targets, 0.7, with_entropy=True)
    assert torch.allclose(logp.double(), expected[torch.arange(50), targets], atol=1e-5)
    assert torch.allclose(entropy.double(), -(expected.exp() * expected).sum(-1), atol=1e-5)
    whole = torch.autograd.grad(logp.sum() + entropy.sum(), hidden)[0]
    logp, entropy = llm.token_logprobs(lm, hidden, targets, 0.7, chunk=7, with_entropy=True)
    pieces = torch.autograd.grad(logp.sum() + entropy.sum(), hidden)[0]
    assert torch.allclose(whole, pieces, atol=1e-5)
    lm.model.lm_head.weight.data.zero_()
    _, uniform = llm.token_logprobs(lm, hidden, targets, with_entropy=True)
    assert torch.allclose(uniform, torch.full((50,), math.log(10)), atol=1e-5)


def test_log_softmax_is_fp32_in_bf16_too():
    lm = tiny(compute=torch.bfloat16, scale=3.0)
    hidden = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(64) % 10
    with lm.autocast():
        logits = lm.model.lm_head(hidden)
    expected = (logits.double() / 0.7).log_softmax(-1)[torch.arange(64), targets]
    logp, _ = llm.token_logprobs(lm, hidden, targets, 0.7)
    assert logits.dtype == torch.bfloat16 and logp.dtype == torch.float32
    assert torch.allclose(logp.double(), expected, atol=1e-5)


# ------------------------------------------------------------------------------------------------ supervised training
def copy_row(rng):
    word = rng.randrange(2, 10)
    return llm.Row([word, 3], [word, 1])


def test_the_last_eos_is_learned_although_padding_equals_it():
    tokenizer = word_tokenizer(WORDS)
    tokenizer.pad_token = tokenizer.eos_token
    lm = replace(tiny(), tokenizer=tokenizer)
    assert lm.pad_id == lm.eos_id
    row = llm.Row([2, 3], [4, lm.eos_id])
    weights = llm.token_weights(row, 0.0, 0.0)
    assert weights.tolist() == [0, 1, 1]
    before = logprobs(lm, [2, 3, 4], [lm.eos_id]).item()
    llm.sft(lm, lambda rng: row, 10, 64, 1e-2, "adamw", seed=0)
    assert logprobs(lm, [2, 3, 4], [lm.eos_id]).item() > before + 1


def test_weights_of_tokens():
    row = llm.Row([5, 6, 7], [8, 9, 1, 1], [1.0, 2.5, 1.0, 1.0])
    assert torch.allclose(llm.token_weights(row, 0.2, 0.5), torch.tensor([0.2, 0.2, 1, 2.5, 1, 1]) / 2)


@pytest.mark.parametrize("optimizer, lr", [("muon", 1e-2), ("adamw", 1e-2)])
def test_sft_learns(optimizer, lr):
    lm = tiny()
    losses = []
    llm.sft(lm, copy_row, 60, 128, lr, optimizer, seed=0, on_step=lambda step, m: losses.append(m["loss"]))
    assert losses[0] > 1.0 and losses[-1] < 0.3 and not lm.model.training


def test_micro_batches_change_nothing_but_memory():
    rng = random.Random(0)
    rows = [llm.Row([rng.randrange(2, 10) for _ in range(rng.randrange(2, 40))], [3, 1]) for _ in range(12)]
    draw = [lambda r: r.choice(rows)]
    results = []
    for micro_tokens in (10_000, 64, 1):
        lm = tiny()
        llm.sft(lm, draw[0], 3, 256, 1e-2, "adamw", seed=0, prompt_weight=0.2, micro_tokens=micro_tokens)
        results.append(torch.cat([w.flatten() for w in lm.weights().values()]))
    assert torch.allclose(results[0], results[1], atol=1e-5) and torch.allclose(results[0], results[2], atol=1e-5)
    parts = llm.micro_batches(rows, 64)
    assert sum(parts, []) == rows and all(len(p) * 48 <= 64 or len(p) == 1 or
                                          len(p) * max(len(r.prompt) + 2 for r in p) <= 64 for p in parts)


def test_sft_resumes_to_the_same_weights():
    def run(lm, stop, state=None):
        saved = {}

        def on_step(step, metrics):
            if step + 1 == stop:
                saved.update(step=stop, weights={n: w.clone() for n, w in lm.weights().items()},
                             optimizers=[o.state_dict() for o in metrics["optimizers"]])
                raise InterruptedError

        with pytest.raises(InterruptedError):
            llm.sft(lm, copy_row, 40, 64, 1e-2, "muon", seed=0, window=4, state=state, on_step=on_step)
        return saved

    straight = run(tiny(), 14)["weights"]
    half = run(tiny(), 6)
    lm = tiny(seed=5)
    lm.load_weights(half["weights"])
    resumed = run(lm, 14, half)["weights"]
    assert all(torch.equal(straight[n], resumed[n]) for n in straight)


def test_steps_that_are_not_finite_are_skipped_and_three_in_a_row_stop():
    lm = tiny()
    before = {n: w.clone() for n, w in lm.weights().items()}
    norms, calls = [], []

    def poisoned(rng):
        calls.append(1)
        return llm.Row([2, 3], [4, 1], [math.inf, 1.0])

    with pytest.raises(UserError, match="3 steps in a row"):
        llm.sft(lm, poisoned, 10, 32, 1e-2, "muon", seed=0, on_step=lambda step, m: norms.append(m["grad_norm"]))
    assert len(norms) == training.MAX_BAD_STEPS - 1 and all(map(math.isnan, norms))
    assert all(torch.equal(before[n], w) for n, w in lm.weights().items())


def test_out_of_memory_is_one_clear_line(monkeypatch):
    def no_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    lm = tiny()
    monkeypatch.setattr(llm, "hidden_states", no_memory)
    with pytest.raises(UserError, match="out of memory: .*gradient_checkpointing"):
        llm.sft(lm, copy_row, 2, 32, 1e-2, "adamw", seed=0)


# ------------------------------------------------------------------------------------------------ export
def test_exported_model_is_loaded_by_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    lm = replace(tiny(), tokenizer=byte_tokenizer())
    lm.export(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for name, weight in lm.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)
    assert tokenizer("a b")["input_ids"] == lm.tokenizer("a b")["input_ids"]


def test_weights_of_another_model_are_refused():
    with pytest.raises(ValueError, match="another model"):
        tiny().load_weights(tiny(width=64).weights())


def test_muon_takes_pytorchs_steps():
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 8), (12, 6), (6, 12), (8, 8))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    pair = llm.Muon(ours, 0.1), torch.optim.Muon(theirs, lr=0.1, momentum=0.95, weight_decay=0.0)
    for _ in range(3):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, atol=0.02, rtol=0)            # PyTorch rounds to bf16 on the way
