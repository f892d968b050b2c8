"""Language models: backbones, the tiny backbone's construction, exact sampling, log-probs and supervised training.

One interface, ``LM``, serves a one-million-parameter Llama trained inside the run and an 8B model in 4 bits:
the experience model, the policy and the task writer differ only in their weights and their text.

Shapes: B rows, T tokens (prompt + response, padded), A action tokens, V vocabulary.
"""
from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass, field
from typing import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

PAD, EOS = "<|pad|>", "<|eos|>"


# ------------------------------------------------------------------------------------------------ the LM object
@dataclass
class LM:
    """A causal language model with its tokenizer.

    ``spaced``: every word is encoded with the space before it, so that a word is the same token wherever it
    stands (the tiny backbone's tokenizer).  ``chat``: prompts are wrapped in the tokenizer's chat template.
    """
    model: nn.Module
    tokenizer: object
    device: torch.device
    spaced: bool = False
    chat: bool = False
    name: str = "tiny"
    _low: tuple = field(default=(None, None), repr=False)      # cached low-precision copy for sampling
    _words: dict = field(default_factory=dict, repr=False)     # word -> ids (spaced tokenizers)

    @property
    def eos_id(self) -> int:
        return self.tokenizer.eos_token_id

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
        """Inverse of ``encode``; a closing EOS is dropped."""
        ids = list(ids)
        if ids and ids[-1] == self.eos_id:
            ids.pop()
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text[1:] if self.spaced and text.startswith(" ") else text

    def prompt(self, system: str, text: str) -> list[int]:
        """Ids of a whole prompt: the chat template with a system message for instruct models, plain text else."""
        if not self.chat:
            return self.encode(text)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        marked = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(marked, add_special_tokens=False)["input_ids"]

    def weights(self) -> dict[str, Tensor]:
        """The trained weights by name: all, or those of the adapters."""
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Inverse of ``weights``; raises ValueError where names or shapes differ."""
        own = self.weights()
        if own.keys() != weights.keys() or any(own[n].shape != w.shape for n, w in weights.items()):
            raise ValueError("these weights belong to another model")
        with torch.no_grad():
            for name, w in weights.items():
                own[name].copy_(w)

    def sampler(self) -> nn.Module:
        """The weights used for sampling: the model itself, or for fp32 masters its low-precision copy, kept fresh.

        Parameters count their in-place changes (``_version``); the copy is renewed when that count has moved.
        """
        if next(self.model.parameters()).dtype != torch.float32 or compute_dtype(self.device) == torch.float32:
            return self.model
        stamp = sum(p._version for p in self.model.parameters())
        if self._low[0] != stamp:
            low = copy.deepcopy(self.model).to(compute_dtype(self.device)).eval().requires_grad_(False)
            low.set_attn_implementation("sdpa")
            self._low = (stamp, low)
        return self._low[1]


def compute_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the hardware multiplies it natively, else fp32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


# ------------------------------------------------------------------------------------------------ tiny backbone
def train_tokenizer(texts: Iterable[str], vocab_size: int):
    """Byte-level BPE over whole words, trained on ``texts``: lossless for any text, about one token a word."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r" [^ ]*"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[PAD, EOS], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=2)
    tok.train_from_iterator((" " + t for t in texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token=PAD, eos_token=EOS)


def load_tokenizer(folder):
    from transformers import PreTrainedTokenizerFast
    return PreTrainedTokenizerFast.from_pretrained(folder)


def tiny_lm(tokenizer, layers=4, width=128, heads=4, mlp=384, seed=0, constructed=True, device="cpu") -> LM:
    """A Llama of about one million parameters from a fixed seed; ``constructed`` gives it copying heads."""
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=width, intermediate_size=mlp,
                         num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
                         max_position_embeddings=4096, rope_theta=5e5, tie_word_embeddings=True,
                         pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
                         bos_token_id=None, attn_implementation="eager")   # SDPA's bf16 backward is slow on CPU
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        if constructed:
            construct_copy_heads(model)
    return LM(model.to(device), tokenizer, torch.device(device), spaced=True)


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
    """One sampled continuation: ``ids`` end with a stop token unless ``cut`` (the length limit came first)."""
    ids: list[int]
    cut: bool


class RowCache:
    """Key/value cache of one batch: preallocated, written in place, rows dropped as their samples finish.

    Keys and values are (layer, B, heads, T, head size).  Implements what transformers asks of a cache.
    """
    is_compileable = False

    def __init__(self, config, rows: int, length: int, dtype: torch.dtype, device: torch.device):
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, rows, heads, length, size)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.seen = 0                                          # tokens written, the same for all rows
        self.layers = range(config.num_hidden_layers)          # transformers counts these
        self.is_sliding = [False] * config.num_hidden_layers

    def update(self, key: Tensor, value: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        end = self.seen + key.shape[-2]
        self.keys[layer, :, :, self.seen:end] = key
        self.values[layer, :, :, self.seen:end] = value
        if layer == len(self.layers) - 1:
            self.seen = end
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.seen + query_length, 0                     # key length, offset

    def keep(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]


@torch.no_grad()
def generate(lm: LM, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float,
             generator: torch.Generator | None = None, max_rows: int = 128) -> list[Sample]:
    """Sample one continuation per prompt up to and including EOS; ``temperature`` 0 is greedy.

    Temperature is the only transformation of the logits: the distribution sampled from is the one that
    ``token_logprobs`` scores.  Identical prompts are computed once: their rows share one prompt pass and, if
    greedy, one continuation.
    """
    unique = {}                                                # prompt -> rows that ask for it
    for i, p in enumerate(prompts):
        unique.setdefault(tuple(p), []).append(i)
    out: list[Sample | None] = [None] * len(prompts)
    order = sorted(unique, key=len)                            # similar lengths together: little padding
    for start in range(0, len(order), max_rows):
        chunk = order[start:start + max_rows]
        rows = [[i] if temperature == 0 else unique[p] for p, i in ((p, unique[p][0]) for p in chunk)]
        samples = _generate(lm, chunk, [len(r) for r in rows], max_new_tokens, temperature, generator)
        flat = iter(samples)
        for p, r in zip(chunk, rows):
            for i in r:
                out[i] = next(flat)
            if temperature == 0:
                for i in unique[p]:
                    out[i] = out[r[0]]
    return out


def _generate(lm: LM, prompts, repeats: list[int], max_new: int, temperature: float, generator) -> list[Sample]:
    """One batch: a prompt pass over distinct prompts, each row repeated for its samples, then token by token."""
    model, device = lm.sampler(), lm.device
    was_training = model.training
    model.eval()
    T = max(map(len, prompts))
    ids = torch.full((len(prompts), T), lm.pad_id)
    mask = torch.zeros(len(prompts), T, dtype=torch.long)
    for i, p in enumerate(prompts):                            # left padding: the last column is each row's newest
        ids[i, T - len(p):] = torch.tensor(p)
        mask[i, T - len(p):] = 1
    ids, mask = ids.to(device), mask.to(device)
    dtype = next(p for p in model.parameters() if p.is_floating_point()).dtype
    cache = RowCache(model.config, len(prompts), T + max_new, dtype, device)
    position = (mask.cumsum(-1) - 1).clamp(min=0)              # (B, T): padding does not shift positions
    logits = model(input_ids=ids, attention_mask=mask, position_ids=position, cache=cache, use_cache=True,
                   logits_to_keep=1).logits[:, -1]
    rows = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(repeats)).to(device)
    if len(rows) != len(prompts):
        cache.keep(rows)
    logits, mask, position = logits[rows], mask[rows], position[rows, -1:]
    full = torch.ones(len(rows), T + max_new, dtype=torch.long, device=device)
    full[:, :T] = mask
    samples: list[list[int]] = [[] for _ in rows]
    live = list(range(len(rows)))                              # sample index of each row still growing
    for step in range(max_new):
        logits = logits.float()
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            token = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)[:, 0]
        chosen = token.tolist()
        for row, t in zip(live, chosen):
            samples[row].append(t)
        keep = [j for j, t in enumerate(chosen) if t != lm.eos_id]
        if not keep or step == max_new - 1:
            break
        if len(keep) < len(live):
            index = torch.tensor(keep, device=device)
            cache.keep(index)
            live, token, full, position = [live[j] for j in keep], token[index], full[index], position[index]
        position = position + 1
        logits = model(input_ids=token[:, None], attention_mask=full[:, :T + step + 1], position_ids=position,
                       cache=cache, use_cache=True).logits[:, -1]
    model.train(was_training)
    return [Sample(s, cut=s[-1] != lm.eos_id) for s in samples]


# ------------------------------------------------------------------------------------------------ log-probs
def hidden_states(lm: LM, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Last hidden states (B, T, width) of right-padded rows."""
    base = lm.model.get_base_model() if hasattr(lm.model, "get_base_model") else lm.model
    with torch.autocast(lm.device.type, compute_dtype(lm.device),
                        enabled=compute_dtype(lm.device) != torch.float32):
        return base.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state


def token_logprobs(lm: LM, hidden: Tensor, targets: Tensor, temperature: float = 1.0, chunk: int = 1024,
                   with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
    """log pi(target | prefix) in fp32 for N positions, at the sampling temperature.

    hidden (N, width): states *before* the target token; targets (N,).  Logits exist for ``chunk`` positions at a
    time, so that N x V is never held; chunks are recomputed in the backward pass.  Returns (N,) log-probs and,
    if asked, the (N,) entropies over the full vocabulary.
    """
    head = lm.model.get_output_embeddings()

    def piece(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(lm.device.type, compute_dtype(lm.device),
                            enabled=compute_dtype(lm.device) != torch.float32):
            logits = head(h)
        logp = F.log_softmax(logits.float() / temperature, -1)                          # (n, V)
        ent = -(logp.exp() * logp).sum(-1) if with_entropy else logp.new_zeros(len(y))
        return logp.gather(-1, y[:, None])[:, 0], ent

    if len(targets) <= chunk:
        out = [piece(hidden, targets)]
    else:
        out = [torch.utils.checkpoint.checkpoint(piece, h, y, use_reentrant=False)
               for h, y in zip(hidden.split(chunk), targets.split(chunk))]
    logp, ent = (torch.cat(x) for x in zip(*out))
    return logp, ent if with_entropy else None


def round_up(length: int, multiple: int = 16) -> int:
    """Few distinct shapes: the CPU's matrix library compiles a kernel for each, which costs more than some padding."""
    return -(-length // multiple) * multiple


def pad_rows(rows: Sequence[Sequence[int]], pad: int, device) -> tuple[Tensor, Tensor]:
    """Right-padded ids (B, T) and their attention mask, made from lengths (pad may equal EOS)."""
    T = round_up(max(map(len, rows)))
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
    """``muon``: Muon on the matrices, AdamW with the same rate on embeddings and norms.  ``adamw``: AdamW alone."""
    params = [p for p in model.parameters() if p.requires_grad]
    if kind == "adamw":
        return [torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay)]
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    matrices = [p for p in params if p.ndim == 2 and id(p) not in embeddings]
    rest = [p for p in params if p.ndim != 2 or id(p) in embeddings]
    return [torch.optim.Muon(matrices, lr=lr, momentum=0.95, weight_decay=0.0, adjust_lr_fn="original"),
            torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]


def sft_loss(lm: LM, rows: list[Row], prompt_weight: float, length_power: float) -> tuple[Tensor, float, int]:
    """Weighted next-token loss (Eq. 5: one sum over reasoning, next state and flags).

    Target tokens weigh 1 (or their emphasis), prompt tokens ``prompt_weight``; a row is divided by its target
    length to the power ``length_power``.  Returns (loss, mean target log-loss, target tokens).
    """
    ids, mask = pad_rows([r.prompt + r.target for r in rows], lm.pad_id, lm.device)
    weight = torch.zeros(ids.shape)                                                     # (B, T)
    is_target = torch.zeros(ids.shape, dtype=torch.bool)
    for i, r in enumerate(rows):
        n, m = len(r.prompt), len(r.target)
        scale = m ** -length_power
        weight[i, 1:n] = prompt_weight * scale
        weight[i, n:n + m] = scale * torch.tensor(r.emphasis if r.emphasis else 1.0)
        is_target[i, n:n + m] = True
    pick = weight[:, 1:] > 0                                                            # position t predicts t + 1
    hidden = hidden_states(lm, ids, mask)[:, :-1][pick.to(lm.device)]
    logp, _ = token_logprobs(lm, hidden, ids[:, 1:][pick.to(lm.device)], chunk=8192)
    w = weight[:, 1:][pick].to(lm.device)
    on = is_target[:, 1:][pick].to(lm.device)
    return -(w * logp).sum() / w.sum(), -logp[on].mean().item(), int(on.sum())


def schedule(step: int, steps: int, warmup: float) -> float:
    """Linear warm-up over a share ``warmup`` of the steps, then linear decay to a tenth."""
    rise = max(1, int(steps * warmup))
    return min((step + 1) / rise, 1.0) * (1 - 0.9 * max(0, step - rise) / max(1, steps - rise))


def sft(lm: LM, draw: Callable[[random.Random], Row], steps: int, batch_tokens: int, lr: float, optimizer: str,
        seed: int, warmup: float = 0.05, prompt_weight: float = 0.0, length_power: float = 0.4,
        max_grad_norm: float = 1.0, window: int = 16, state: dict | None = None,
        on_step: Callable[[int, dict], None] | None = None) -> None:
    """Supervised training in place.

    ``draw(rng)`` makes one (augmented) row.  Rows are drawn ``window`` batches at a time, sorted by length and cut
    into batches of ``batch_tokens`` tokens, so little is padding; the draw depends on (seed, window number) alone,
    hence resuming needs only weights, optimizer state and the step.  ``on_step(step, metrics)`` sees every step.
    """
    opts = optimizers(lm.model, optimizer, lr)
    first = 0
    if state:
        first = state["step"]
        for o, s in zip(opts, state["optimizers"]):
            o.load_state_dict(s)
    lm.model.train()
    batches: list[list[Row]] = []
    number = -1
    for step in range(first, steps):
        if step // window != number:
            number = step // window
            batches = draw_batches(draw, random.Random(f"{seed}/{number}"), window, batch_tokens)
        for o in opts:
            for g in o.param_groups:
                g["lr"] = lr * schedule(step, steps, warmup)
        loss, target_loss, tokens = sft_loss(lm, batches[step % window], prompt_weight, length_power)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(lm.model.parameters(), max_grad_norm)
        if torch.isfinite(norm):
            for o in opts:
                o.step()
        lm.model.zero_grad(set_to_none=True)
        if on_step:
            on_step(step, {"loss": target_loss, "tokens": tokens, "grad_norm": norm.item(), "optimizers": opts})
    lm.model.eval()


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
