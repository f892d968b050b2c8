"""Language models: the tiny backbone and its construction, exact sampling, log-probs and supervised training.

One interface, ``LM``, serves a one-million-parameter Llama trained inside the run and an 8B model in 4 bits:
the experience model, the policy and the task writer differ only in their weights and their text.

Shapes: B rows, T tokens (prompt + response, padded), A action tokens, V vocabulary.
"""
from __future__ import annotations

import copy
import importlib.util
import json
import math
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import formats
import training

PAD, EOS = "<|pad|>", "<|eos|>"
CACHE_BYTES = 4 * 2**30      # largest key/value cache of one batch of samples
LOGIT_COUNT = 2**25          # logits that exist at a time: 128 MB in fp32


# ------------------------------------------------------------------------------------------------ the LM object
@dataclass
class LM:
    """A causal language model with its tokenizer.

    ``spaced``: every word is encoded with the space before it, so that a word is the same token wherever it
    stands (the tiny backbone's tokenizer).  ``chat``: prompts are wrapped in the tokenizer's chat template.
    ``compute`` is the precision of matrix products, bf16 where the hardware is fast in it.
    """
    model: nn.Module
    tokenizer: object
    device: torch.device
    spaced: bool = False
    chat: bool = False
    name: str = "tiny"
    compute: torch.dtype | None = None
    origin: dict[str, str] = field(default_factory=dict)       # of the base weights: name, revision, sha256
    _low: tuple = field(default=(None, None), repr=False)      # cached low-precision copy for sampling
    _words: dict = field(default_factory=dict, repr=False)     # word -> ids (spaced tokenizers)

    def __post_init__(self) -> None:
        self.compute = self.compute or compute_dtype(self.device)

    @property
    def eos_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def stop_ids(self) -> set[int]:
        """What ends an answer: EOS, and the further stop tokens that some models name (Llama-3 has three)."""
        named = self.model.generation_config.eos_token_id
        return {self.eos_id, *(named if isinstance(named, (list, tuple)) else [] if named is None else [named])}

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id

    def encode(self, text: str) -> list[int]:
        """Text -> ids.  Special tokens in the text are never interpreted: they are encoded as plain characters."""
        if self.spaced:                                        # words are independent of each other: remember them
            return [i for word in text.split(" ") for i in self._word(word)]
        return self._plain(text)

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def _word(self, word: str) -> list[int]:
        ids = self._words.get(word)
        if ids is None:
            ids = self._words[word] = self._plain(" " + word)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Inverse of ``encode``; a closing stop token is dropped."""
        ids = list(ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text[1:] if self.spaced and text.startswith(" ") else text

    def prompt(self, system: str, text: str) -> list[int]:
        """Ids of a whole prompt: the chat template with a system message for instruct models, plain text else."""
        if not self.chat:                                      # base models of the Llama family begin with BOS
            return ([] if self.spaced else self.tokenizer("")["input_ids"]) + self.encode(text)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        marked = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                                    date_string=formats.DATE)
        return self.tokenizer(marked, add_special_tokens=False)["input_ids"]

    def weights(self) -> dict[str, Tensor]:
        """The trained weights by name: all, or those of the adapter (whose own name is left out)."""
        adapter = f".{self.model.active_adapter}." if hasattr(self.model, "peft_config") else None
        return {name.replace(adapter, ".") if adapter else name: p.detach()
                for name, p in self.model.named_parameters() if p.requires_grad}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Inverse of ``weights``; raises ValueError where names or shapes differ."""
        own = self.weights()
        if own.keys() != weights.keys() or any(own[n].shape != w.shape for n, w in weights.items()):
            raise ValueError("these weights belong to another model")
        with torch.no_grad():
            for name, w in weights.items():
                own[name].copy_(w)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.compute, enabled=self.compute != torch.float32)

    def causal_lm(self) -> nn.Module:
        """The transformers model, its layers with the adapters inside."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    def export(self, folder: str | Path) -> None:
        """Write what plain ``transformers`` (all weights) or ``peft`` (adapter) loads, and the base's origin."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if hasattr(self.model, "peft_config"):
            from safetensors.torch import save_file
            config = copy.copy(self.model.peft_config[self.model.active_adapter])
            config.base_model_name_or_path, config.inference_mode = self.name, True
            config.save_pretrained(folder)
            weights = {name: w.cpu().contiguous() for name, w in self.weights().items()}
            save_file(weights, folder / "adapter_model.safetensors")
        else:
            self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        (folder / "origin.json").write_text(json.dumps(self.origin, indent=1) + "\n")

    def sampler(self) -> nn.Module:
        """The model that reads prompts: the trained one itself, or for fp32 masters a low-precision copy, kept fresh.

        Parameters count their in-place changes (``_version``); the copy is renewed when that count has moved.
        """
        if hasattr(self.model, "peft_config") or next(self.model.parameters()).dtype == self.compute:
            return self.causal_lm()
        stamp = sum(p._version for p in self.model.parameters())
        if self._low[0] != stamp:
            low = copy.deepcopy(self.model).to(self.compute).eval().requires_grad_(False)
            low.set_attn_implementation("sdpa")
            self._low = (stamp, low)
        return self._low[1]

    def writer(self) -> nn.Module:
        """The model that writes token by token: on a CPU never the copy, a few rows are faster in fp32 there."""
        return self.causal_lm() if self.device.type == "cpu" else self.sampler()

    def cache_dtype(self) -> torch.dtype:
        """Of keys and values in a sampling cache: that of the writer's activations."""
        return self.compute if self.sampler() is self.writer() else next(self.writer().parameters()).dtype


def compute_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the hardware multiplies it natively, else fp32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` | ``float32`` | ``bfloat16`` -> the precision of matrix products."""
    return compute_dtype(device) if name == "auto" else getattr(torch, name)


def pick_attention(device: torch.device, compute: torch.dtype) -> str:
    """Flash attention where it is installed; on CPUs in bf16 plain matrix products, whose backward pass is faster."""
    from transformers.utils import is_flash_attn_2_available
    if device.type == "cpu" and compute == torch.bfloat16:
        return "eager"
    return "flash_attention_2" if compute == torch.bfloat16 and is_flash_attn_2_available() else "sdpa"


# ------------------------------------------------------------------------------------------------ tiny backbone
def train_tokenizer(texts: Iterable[str], vocab_size: int, pieces: Sequence[str] = ()):
    """Byte-level BPE over whole words, trained on ``texts``: lossless for any text, about one token a word.

    ``pieces`` (each of two characters, or of two parts of which each is a character or an earlier piece) are tokens
    whatever the texts are: a word that no text holds is spelled in them where it can be.  ``vocab_size`` counts them.
    Raises ValueError for a piece that has no such parts.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r" [^ ]*"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(pieces), special_tokens=[PAD, EOS], show_progress=False,
                                  initial_alphabet=alphabet, min_frequency=2)
    tok.train_from_iterator((" " + t for t in texts), trainer)
    learned = json.loads(tok.to_str())["model"]
    known, merges = set(alphabet), {}
    for piece in pieces:
        piece = piece.replace(" ", "\u0120")                   # how byte-level BPE writes a space
        merges[next(((piece[:n], piece[n:]) for n in range(len(piece) - 1, 0, -1)
                     if piece[:n] in known and piece[n:] in known), None)] = None
        known.add(piece)
    if None in merges:
        raise ValueError("a piece is not made of two characters or earlier pieces")
    merges |= {(a, b): None for a, b in learned["merges"] if not {a, b} <= known - set(alphabet)}    # pieces stay apart
    tokens = dict.fromkeys(sorted(learned["vocab"], key=learned["vocab"].get)) | dict.fromkeys(a + b for a, b in merges)
    tok.model = models.BPE({token: i for i, token in enumerate(tokens)}, list(merges), ignore_merges=True)  # words whole
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token=PAD, eos_token=EOS)


def load_tokenizer(folder):
    from transformers import PreTrainedTokenizerFast
    return PreTrainedTokenizerFast.from_pretrained(folder)


def tiny_lm(tokenizer, layers=4, width=128, heads=4, mlp=384, seed=0, constructed=True,
            device: torch.device | str = "cpu", dtype: str = "auto") -> LM:
    """A Llama of about one million parameters from a fixed seed; ``constructed`` gives it copying heads."""
    from transformers import LlamaConfig, LlamaForCausalLM
    device = torch.device(device)
    compute = choose_dtype(dtype, device)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=width, intermediate_size=mlp,
                         num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
                         max_position_embeddings=4096, rope_theta=5e5, tie_word_embeddings=True,
                         pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
                         bos_token_id=None, attn_implementation=pick_attention(device, compute))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        if constructed:
            construct_copy_heads(model)
    return LM(model.to(device), tokenizer, device, spaced=True, compute=compute)


@torch.no_grad()
def construct_copy_heads(model) -> None:
    """Previous-token heads (layer 0) and induction heads (layer 1) by construction (Olsson et al., 2209.11895).

    Finding a word and reading what follows it is what a pre-trained LLM brings along; the tiny one is given it.
    Embedding: the lower half C holds a random code of the token, the upper half S a constant that all tokens
    share.  Layer 0 copies the code of the previous token into S; layer 1 looks for positions whose previous
    token is the present one and adds the code found there to the residual stream, which the tied output layer
    reads as "what followed last time".  Nothing is frozen.
    """
    c = model.config
    W, H = c.hidden_size, c.num_attention_heads
    half, D = W // 2, W // H                                   # D: size of one head
    code = torch.arange(half)
    inv_freq = c.rope_parameters["rope_theta"] ** (-torch.arange(D // 2) * 2 / D)
    emb = model.model.embed_tokens.weight
    emb[:, :half].normal_(0, 0.1)
    emb[:, half:].normal_(0.1, 0.01)
    gain = 3.0                                                 # RMSNorm weight in front of both layers
    for layer, damp in ((0, 0.1), (1, 0.3)):
        block = model.model.layers[layer]
        block.input_layernorm.weight.fill_(gain)
        for proj in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj, block.self_attn.o_proj):
            proj.weight.mul_(damp)
    model.model.norm.weight.fill_(1.6)

    attn = model.model.layers[0].self_attn                     # heads 0 and 1 look one position back
    amplitude = (26 * torch.tensor([2.0, 1.5, 1.0, 0.5])).sqrt() / (half * gain)
    for h in (0, 1):
        q, k, v, o = (p.weight for p in (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj))
        for i, a in enumerate(amplitude):                      # the four highest RoPE frequencies, pair (i, i + D/2)
            k[h * D + i, half:] += a
            q[h * D + i, half:] += a * math.cos(inv_freq[i])   # the key turned back by one position
            q[h * D + D // 2 + i, half:] -= a * math.sin(inv_freq[i])
        dims = code[h * D:(h + 1) * D]
        v[h * D + torch.arange(len(dims)), dims] += 1 / gain
        o[half + dims, h * D + torch.arange(len(dims))] += 0.15

    attn = model.model.layers[1].self_attn                     # every head matches a quarter of the code
    quarter = half // H
    low = torch.cat([torch.arange(D // 4, D // 2), torch.arange(D // 4, D // 2) + D // 2])[:quarter]
    for h in range(H):
        q, k, v, o = (p.weight for p in (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj))
        own = code[h * quarter:(h + 1) * quarter]
        q[h * D + low, own] += 2.4 / gain
        k[h * D + low, half + own] += 2.4 / gain
        dims = code[(h % 2) * D:(h % 2 + 1) * D]
        v[h * D + torch.arange(len(dims)), dims] += 1 / gain
        o[dims, h * D + torch.arange(len(dims))] += 0.22


# ------------------------------------------------------------------------------------------------ sampling
@dataclass
class Sample:
    """One sampled continuation: ``ids`` end with a stop token unless ``cut`` (the length limit came first).
    ``logprobs``: what the sampler gave each of them, at its temperature; empty where it was greedy."""
    ids: list[int]
    cut: bool
    logprobs: list[float] = field(default_factory=list)


def head_size(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def cache_bytes(config, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_size(config) * dtype.itemsize


ROWS = 8                       # on a CPU prompts, and in bf16 rows that are written, come in multiples of this
PROMPT_ROWS = 16               # prompts of one pass


class RowCache:
    """Key/value cache of one batch: preallocated, written in place, rows dropped as their samples finish.

    Keys and values are (layer, B, heads, T, head size).  Implements what transformers asks of a cache.
    """
    is_compileable = False

    def __init__(self, config, rows: int, length: int, dtype: torch.dtype, device: torch.device):
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, length, head_size(config))
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.seen = 0                                          # tokens written, the same for all rows
        self.layers = range(config.num_hidden_layers)          # transformers counts these
        self.is_sliding = [False] * config.num_hidden_layers

    def update(self, key: Tensor, value: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        end = self.seen + key.shape[-2]
        self.keys[layer, :, :, self.seen:end] = key
        self.values[layer, :, :, self.seen:end] = value
        start = self.seen
        if layer == len(self.layers) - 1:
            self.seen = end
        return (self.keys[layer, :, :, :end], self.values[layer, :, :, :end]) if start else (key, value)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.seen + query_length, 0                     # key length, offset

    def part(self, rows: slice, start: int) -> RowCache:
        """A view of some rows from column ``start`` on: what is written there is written here.  Before it come zeros: they
        are masked, but 0 times whatever the memory held need not be 0."""
        self.keys[:, rows, :, :start] = self.values[:, rows, :, :start] = 0
        view = copy.copy(self)
        view.keys, view.values, view.seen = self.keys[:, rows, :, start:], self.values[:, rows, :, start:], 0
        return view

    def repeat(self, rows: Tensor) -> None:
        """Row i becomes a copy of row ``rows[i]``."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]

    def keep(self, rows: Sequence[int]) -> None:
        """Row i becomes row ``rows[i]``, which is i itself or one that leaves; what is to move moves in place."""
        for i, row in enumerate(rows):
            if i != row:
                for old in (self.keys, self.values):
                    old[:, i, :, :self.seen] = old[:, row, :, :self.seen]
        self.keys, self.values = self.keys[:, :len(rows)], self.values[:, :len(rows)]


@torch.inference_mode()                                        # less work around small operations than no_grad
def generate(lm: LM, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float,
             generator: torch.Generator | None = None, max_rows: int = 128) -> list[Sample]:
    """Sample one continuation per prompt up to and including a stop token; ``temperature`` 0 is greedy.

    Temperature is the only transformation of the logits: the distribution sampled from is the one that
    ``token_logprobs`` scores.  Identical prompts are computed once: their rows share one prompt pass and, if
    greedy, one continuation.  A batch has at most ``max_rows`` rows and a cache of at most ``CACHE_BYTES``.
    ``generator`` may live on the CPU whatever the model's device.  Raises ValueError for an empty prompt.
    """
    if not all(prompts):
        raise ValueError(f"prompt {next(i for i, p in enumerate(prompts) if not p)} of {len(prompts)} is empty")
    if generator is not None and generator.device.type != lm.device.type:      # torch samples on one device only
        seed = torch.randint(2**63 - 1, (), generator=generator, device=generator.device).item()
        generator = torch.Generator(lm.device).manual_seed(seed)
    unique: dict[tuple[int, ...], list[int]] = {}              # prompt -> rows that ask for it
    for i, p in enumerate(prompts):
        unique.setdefault(tuple(p), []).append(i)
    out: list[Sample | None] = [None] * len(prompts)
    own_weights = lm.sampler() is lm.causal_lm()               # then in the precision of the training passes
    with training.mode(lm.model, training=False), lm.autocast() if own_weights else nullcontext():
        for chunk in batches_of(lm, unique, max_new_tokens, temperature, max_rows):
            repeats = [1 if temperature == 0 else len(unique[p]) for p in chunk]
            samples = iter(_generate(lm, chunk, repeats, max_new_tokens, temperature, generator))
            for p, n in zip(chunk, repeats):
                own = [next(samples) for _ in range(n)]
                for k, i in enumerate(unique[p]):
                    out[i] = own[k % n]
    return out


def batches_of(lm: LM, unique: dict[tuple[int, ...], list[int]], max_new: int, temperature: float,
               max_rows: int) -> Iterable[list[tuple[int, ...]]]:
    """Distinct prompts in batches, similar lengths together: little padding.  All rows of a prompt stay together."""
    chunk: list[tuple[int, ...]] = []
    rows, column = 0, cache_bytes(lm.model.config, lm.cache_dtype())
    for p in sorted(unique, key=len):                          # shortest first, so ``p`` sets the cache's length
        more = 1 if temperature == 0 else len(unique[p])
        fit = min(max_rows, CACHE_BYTES // (column * (len(p) + max_new)))
        if chunk and rows + more > fit:
            yield chunk
            chunk, rows = [], 0
        chunk.append(p)
        rows += more
    if chunk:
        yield chunk


def _next_logits(model: nn.Module, ids: Tensor, mask: Tensor, position: Tensor, cache: RowCache) -> Tensor:
    """(B, V) after the last column of ids (B, T); ``position`` (B, T) counts from each row's own first token."""
    hidden = model.model(input_ids=ids, attention_mask=mask, position_ids=position, cache=cache, use_cache=True)
    return model.get_output_embeddings()(hidden.last_hidden_state[:, -1])


def _generate(lm: LM, prompts, repeats: list[int], max_new: int, temperature: float, generator) -> list[Sample]:
    """One batch: a prompt pass over distinct prompts, each row repeated for its samples, then token by token."""
    reader, writer, device, stop = lm.sampler(), lm.writer(), lm.device, lm.stop_ids
    multiple = ROWS if device.type == "cpu" else 1             # few shapes: spare rows
    filled = list(prompts) + [prompts[0]] * (round_up(len(prompts), multiple) - len(prompts))
    T = round_up(max(map(len, prompts)))
    mask = torch.zeros(len(filled), T, dtype=torch.long, device=device)
    cache = RowCache(lm.model.config, len(filled), T + max_new, lm.cache_dtype(), device)
    parts = []
    for start in range(0, len(filled), PROMPT_ROWS):           # rows of like length, so little is padding
        rows = slice(start, start + PROMPT_ROWS)
        ids, own = (x.flip(-1) for x in pad_rows([p[::-1] for p in filled[rows]], lm.pad_id, device))   # left padding
        mask[rows, T - ids.shape[1]:] = own                    # the last column is each row's newest
        position = (own.cumsum(-1) - 1).clamp(min=0)           # padding does not shift positions
        parts.append(_next_logits(reader, ids, own, position, cache.part(rows, T - ids.shape[1])))
    logits, position, cache.seen = torch.cat(parts), mask.sum(-1, keepdim=True) - 1, T

    source = [i for i, n in enumerate(repeats) for _ in range(n)]                             # sample -> prompt
    samples: list[list[int]] = [[] for _ in source]
    logprobs: list[list[float]] = [[] for _ in source]
    if cache.keys.dtype == torch.float32:                      # whose products take any number of rows equally well
        multiple = 1
    live: list[int | None] = list(range(len(source)))          # sample of each row; None for a spare row
    live += [None] * (round_up(len(live), multiple) - len(live))
    rows = torch.tensor(source + [0] * (len(live) - len(source)), device=device)
    if rows.tolist() != list(range(len(filled))):
        cache.repeat(rows)
    logits, mask, position = logits[rows], mask[rows], position[rows]
    full = torch.ones(len(rows), T + max_new, dtype=torch.long, device=device)
    full[:, :T] = mask
    for step in range(max_new):
        logits = logits.float()
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            probabilities = torch.softmax(logits / temperature, -1)
            token = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
            for sample, p in zip(live, probabilities.gather(-1, token[:, None])[:, 0].log().tolist()):
                if sample is not None:
                    logprobs[sample].append(p)
        for row, (sample, t) in enumerate(zip(live, token.tolist())):
            if sample is not None:
                samples[sample].append(t)
                if t in stop:
                    live[row] = None
        going = sum(sample is not None for sample in live)
        if not going or step == max_new - 1:
            break
        if round_up(going, multiple) < len(live):                  # finished rows leave, the last ones take their place
            stay = list(range(round_up(going, multiple)))
            last = [row for row in range(len(stay), len(live)) if live[row] is not None]
            for gap in [row for row in stay if live[row] is None][:len(last)]:
                stay[gap] = last.pop()
            cache.keep(stay)
            live = [live[row] for row in stay]
            token, full, position = token[stay], full[stay], position[stay]
        position = position + 1
        logits = _next_logits(writer, token[:, None], full[:, :T + step + 1], position, cache)
    return [Sample(s, s[-1] not in stop, p) for s, p in zip(samples, logprobs)]


# ------------------------------------------------------------------------------------------------ log-probs
def hidden_states(lm: LM, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Last hidden states (B, T, width) of right-padded rows.

    Padding comes after a row's tokens, where causal attention never looks, so the model gets no mask: the fast
    attention kernels take none.  Raises ValueError for left padding.
    """
    if not attention_mask[:, 0].all():
        raise ValueError("hidden_states needs rows that are padded on the right and not empty")
    with lm.autocast():
        return lm.causal_lm().model(input_ids=input_ids, use_cache=False).last_hidden_state


def token_logprobs(lm: LM, hidden: Tensor, targets: Tensor, temperature: float = 1.0, chunk: int | None = None,
                   with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
    """log pi(target | prefix) in fp32 for N positions, at the sampling temperature.

    hidden (N, width): states *before* the target token; targets (N,).  Logits exist for ``chunk`` positions at a
    time (default: LOGIT_COUNT / V), so that N x V is never held; chunks are recomputed in the backward pass.
    Returns (N,) log-probs and, if asked, the (N,) entropies over the full vocabulary.
    """
    head = lm.model.get_output_embeddings()
    chunk = chunk or max(1, LOGIT_COUNT // head.weight.shape[0])

    def piece(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with lm.autocast():
            logits = head(h).float()
        logp = F.log_softmax(logits if temperature == 1 else logits / temperature, -1)          # (n, V)
        ent = -(logp.exp() * logp).sum(-1) if with_entropy else logp.new_zeros(len(y))
        return logp.gather(-1, y[:, None])[:, 0], ent

    count = len(targets)
    if lm.device.type == "cpu":                                # few shapes, see ``round_up``
        extra = round_up(count, 64) - count
        hidden, targets = F.pad(hidden, (0, 0, 0, extra)), F.pad(targets, (0, extra))
    if len(targets) <= chunk:
        out = [piece(hidden, targets)]
    else:
        out = [torch.utils.checkpoint.checkpoint(piece, h, y, use_reentrant=False)
               for h, y in zip(hidden.split(chunk), targets.split(chunk))]
    logp, ent = (torch.cat(x)[:count] for x in zip(*out))
    return logp, ent if with_entropy else None


def round_up(length: int, multiple: int = 16) -> int:
    """Few distinct shapes: the CPU's matrix library compiles a kernel for each, which costs more than some padding."""
    return -(-length // multiple) * multiple


def pad_rows(rows: Sequence[Sequence[int]], pad: int, device, multiple: int = 16) -> tuple[Tensor, Tensor]:
    """Right-padded ids (B, T), T a multiple of ``multiple``, and their attention mask, made from lengths (pad may
    equal EOS)."""
    T = round_up(max(map(len, rows)), multiple)
    ids = torch.full((len(rows), T), pad)
    mask = torch.zeros(len(rows), T, dtype=torch.long)
    for i, r in enumerate(rows):
        ids[i, :len(r)] = torch.tensor(r)
        mask[i, :len(r)] = 1
    return ids.to(device), mask.to(device)


# ------------------------------------------------------------------------------------------------ supervised training
@dataclass
class Row:
    """One supervised row: loss weight 1 on the target, times ``emphasis`` on chosen tokens."""
    prompt: list[int]
    target: list[int]
    emphasis: list[float] | None = None


def optimizers(model: nn.Module, kind: str, lr: float, weight_decay: float = 0.0) -> list[torch.optim.Optimizer]:
    """``muon``: Muon on the matrices, AdamW with the same rate on embeddings and norms.  ``adamw``: AdamW alone,
    for adapters on a GPU with states of 8 bits where bitsandbytes is installed."""
    params = [p for p in model.parameters() if p.requires_grad]
    if kind == "adamw":
        cls = torch.optim.AdamW
        if hasattr(model, "peft_config") and params[0].is_cuda and importlib.util.find_spec("bitsandbytes"):
            from bitsandbytes.optim import AdamW8bit as cls
        return [cls(params, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay)]
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    matrices = [p for p in params if p.ndim == 2 and id(p) not in embeddings]
    rest = [p for p in params if p.ndim != 2 or id(p) in embeddings]
    return [Muon(matrices, lr), torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]


def orthogonalized(g: Tensor, steps: int = 5) -> Tensor:
    """Nearly the orthogonal factor U V^T of each matrix G = U S V^T, by Newton-Schulz iterations: g (N, A, B), A <= B."""
    a, b, c = 3.4445, -4.7750, 2.0315                          # of Jordan et al.: steepest at 0, ends at about 0.7 .. 1.2
    x = (g / g.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(compute_dtype(g.device))
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Momentum whose step is orthogonalised, for matrices (Jordan et al. 2024).

    PyTorch's own works on one matrix after the other and in bf16, which a CPU without bf16 arithmetic only emulates:
    five times slower training there.  This one takes all matrices of a shape at once, in the dtype that the hardware has.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            momentum, shapes = group["momentum"], {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - momentum)
                update = p.grad.lerp(average, momentum)                                    # Nesterov's look ahead
                tall = p.shape[0] > p.shape[1]
                shapes.setdefault((p.shape, tall), []).append((p, update.mT if tall else update))
            for (shape, tall), pairs in shapes.items():
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for (p, _), step in zip(pairs, orthogonalized(torch.stack([u for _, u in pairs]))):
                    p.add_(step.mT if tall else step, alpha=-scale)


class Together:
    """Several optimizers that step as one: what ``training.optimizer_step`` needs of an optimizer."""

    def __init__(self, parts: list[torch.optim.Optimizer]):
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


def token_weights(row: Row, prompt_weight: float, length_power: float) -> Tensor:
    """Loss weight of every token but the first, (n + m - 1,): target tokens weigh 1 (or their emphasis), prompt
    tokens ``prompt_weight``; a row is divided by its target length to the power ``length_power``."""
    weight = torch.full((len(row.prompt) + len(row.target),), prompt_weight)
    weight[len(row.prompt):] = torch.tensor(row.emphasis) if row.emphasis else 1.0
    return weight[1:] * len(row.target) ** -length_power


def sft_loss(lm: LM, rows: list[Row], weights: list[Tensor]) -> tuple[Tensor, float, int]:
    """Weighted next-token loss (Eq. 5: one sum over reasoning, next state and flags), summed over the rows.

    ``weights``: one tensor per row, see ``token_weights``.  Returns (loss, summed target log-loss, target tokens).
    """
    ids, mask = pad_rows([r.prompt + r.target for r in rows], lm.pad_id, lm.device)
    weight = torch.zeros(ids.shape[0], ids.shape[1] - 1)                                # (B, T - 1)
    is_target = torch.zeros(weight.shape, dtype=torch.bool)
    for i, (r, w) in enumerate(zip(rows, weights)):
        weight[i, :len(w)] = w
        is_target[i, len(r.prompt) - 1:len(w)] = True
    pick = weight > 0                                                                   # position t predicts t + 1
    w, on, pick = weight[pick].to(lm.device), is_target[pick].to(lm.device), pick.to(lm.device)
    logp, _ = token_logprobs(lm, hidden_states(lm, ids, mask)[:, :-1][pick], ids[:, 1:][pick])
    return -(w * logp).sum(), -logp.detach()[on].sum().item(), int(on.sum())


def schedule(step: int, steps: int, warmup: float) -> float:
    """Linear warm-up over a share ``warmup`` of the steps, then linear decay to a tenth."""
    rise = max(1, int(steps * warmup))
    return min((step + 1) / rise, 1.0) * (1 - 0.9 * max(0, step - rise) / max(1, steps - rise))


def sft(lm: LM, draw: Callable[[random.Random], Row], steps: int, batch_tokens: int, lr: float, optimizer: str,
        seed: int, warmup: float = 0.05, prompt_weight: float = 0.0, length_power: float = 0.4,
        max_grad_norm: float = 1.0, window: int = 16, state: dict | None = None,
        on_step: Callable[[int, dict], None] | None = None, micro_tokens: int = 8192, section: str = "policy") -> None:
    """Supervised training in place.

    ``draw(rng)`` makes one (augmented) row.  Rows are drawn ``window`` batches at a time, sorted by length and cut
    into batches of ``batch_tokens`` tokens, so little is padding; the draw depends on (seed, window number) alone,
    hence resuming needs only weights, optimizer state and the step.  A batch passes through the model in parts of
    ``micro_tokens`` tokens, which changes memory and nothing else.

    ``on_step(step, metrics)`` sees every step; a step whose gradient is not finite is skipped (its ``grad_norm`` is
    NaN).  Raises UserError after three such steps in a row and when memory runs out; it names the settings of
    ``section`` (``policy`` or ``mexp``) that help.
    """
    opts = optimizers(lm.model, optimizer, lr)
    first = 0
    if state:
        first = state["step"]
        for o, s in zip(opts, state["optimizers"]):
            o.load_state_dict(s)
    together = Together(opts)
    batches: list[list[Row]] = []
    number = -1
    helps = training.less_training_memory(f"{section}_model", min(batch_tokens, micro_tokens))
    with training.mode(lm.model, training=True), training.explain_out_of_memory(helps, together):
        for step in range(first, steps):
            if step // window != number:
                number = step // window
                batches = draw_batches(draw, random.Random(f"{seed}/{number}"), window, batch_tokens)
            weights = {id(r): token_weights(r, prompt_weight, length_power) for r in batches[step % window]}
            total = sum(w.sum().item() for w in weights.values())
            loss_sum, tokens = 0.0, 0
            for rows in micro_batches(batches[step % window], micro_tokens):
                loss, target_loss, n = sft_loss(lm, rows, [weights[id(r)] for r in rows])
                (loss / total).backward()
                loss_sum, tokens = loss_sum + target_loss, tokens + n
            norm = training.optimizer_step(together, lr * schedule(step, steps, warmup), 0, max_grad_norm,
                                           f"{section}.lr")
            if on_step:
                on_step(step, {"loss": loss_sum / tokens, "tokens": tokens, "optimizers": opts,
                               "grad_norm": math.nan if norm is None else norm})
    lm.model.eval()


def micro_batches(rows: list[Row], micro_tokens: int) -> list[list[Row]]:
    """Rows in parts of at most ``micro_tokens`` tokens with padding; a longer row is a part of its own."""
    parts: list[list[Row]] = []
    longest = 0
    for r in rows:
        longest = max(longest, round_up(len(r.prompt) + len(r.target)))
        if parts and (len(parts[-1]) + 1) * longest <= micro_tokens:
            parts[-1].append(r)
        else:
            parts.append([r])
            longest = round_up(len(r.prompt) + len(r.target))
    return parts


def draw_batches(draw, rng: random.Random, count: int, batch_tokens: int) -> list[list[Row]]:
    """``count`` batches of at most ``batch_tokens`` tokens with padding, in random order.

    Rows of similar length share a batch, and batches come in few shapes (see ``round_up``).
    """
    rows: list[Row] = []
    while True:
        rows += [draw(rng) for _ in range(count)]
        rows.sort(key=lambda r: -len(r.prompt) - len(r.target))
        batches, start = [], 0
        while start < len(rows):
            size = max(1, batch_tokens // round_up(len(rows[start].prompt) + len(rows[start].target)))
            batches.append(rows[start:start + size])
            start += size
        batches.pop()                                          # the last one is hardly ever full
        if len(batches) >= count:
            rng.shuffle(batches)
            return batches[:count]
