"""A server with OpenAI's chat interface (vLLM, llama.cpp, Ollama, hosted models) as a language model.

The key comes from the environment (``DREAMGYM_API_KEY``, else ``OPENAI_API_KEY``), goes into one request header and
nowhere else: not into the cache, not into messages, and not to another host (redirects are refused).
"""
from __future__ import annotations

import email.utils
import hashlib
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Sequence

from config import UserError
from runs import write_whole

KEY_VARIABLES = ("DREAMGYM_API_KEY", "OPENAI_API_KEY")
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}     # worth another attempt; anything else is the caller's mistake


class Unusable(ValueError):
    """The server answered, but with nothing that can be used, as often as it was asked."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


class Endpoint:
    """``chat`` asks once, ``chats`` many times side by side.

    base: address up to and with ``/v1``.  model: its name; None: the first that the server lists.  timeout: of one
    request as a whole [s].  attempts: requests per answer.  cache: folder in which every answer is kept, so that none
    is paid for twice, or None.  prices: per million prompt and completion tokens.  ``counts``: requests, retries,
    cached, prompt_tokens, completion_tokens.
    """

    def __init__(self, base: str, model: str | None = None, cache: str | Path | None = None, timeout: float = 120.0,
                 attempts: int = 6, backoff: float = 1.0, most_bytes: int = 4_000_000, workers: int = 8,
                 prices: tuple[float, float] = (0.0, 0.0)):
        self.base, self.timeout, self.attempts, self.backoff = base.rstrip("/"), timeout, attempts, backoff
        self.most_bytes, self.workers, self.prices = most_bytes, workers, prices
        self.cache = Path(cache) if cache else None
        self.counts = dict.fromkeys(("requests", "retries", "cached", "prompt_tokens", "completion_tokens"), 0)
        self.lock = threading.Lock()
        self.opener = urllib.request.build_opener(_NoRedirect)
        self.model = model or self._ask("/models", None, lambda answer: str(answer["data"][0]["id"]))

    @property
    def cost(self) -> float:
        """What the answers so far cost, in the currency of ``prices``."""
        return (self.counts["prompt_tokens"] * self.prices[0] + self.counts["completion_tokens"] * self.prices[1]) / 1e6

    def take_counts(self) -> dict[str, float]:
        """``counts`` and ``cost`` since this was asked last."""
        taken = {**self.counts, "cost": self.cost}
        self.counts = dict.fromkeys(self.counts, 0)
        return taken

    def chat(self, system: str, user: str, max_tokens: int, temperature: float = 0.0, salt: int | None = 0) -> str:
        """The answer's text.  ``salt`` tells wanted repetitions apart in the cache; None: ask in any case.

        Raises UserError where the server cannot be reached or refuses, Unusable where its answers make no sense.
        """
        body = {"model": self.model, "messages": [{"role": "system", "content": system},
                                                  {"role": "user", "content": user}],
                "max_tokens": max_tokens, "temperature": temperature}
        name = hashlib.sha256(json.dumps([self.base, body, salt]).encode()).hexdigest()
        path = self.cache / f"{name}.json" if self.cache and salt is not None else None
        if path and (text := _cached(path)) is not None:
            self._count(cached=1)
            return text
        text, usage = self._ask("/chat/completions", body, _content)
        self._count(**{name: _tokens(usage, name) for name in ("prompt_tokens", "completion_tokens")})
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({"request": body, "text": text, "usage": usage}, ensure_ascii=False))
        return text

    def chats(self, system: str, users: Sequence[str], max_tokens: int, temperature: float = 0.0,
              salt: int | None = 0) -> list[str | None]:
        """One answer per user message, in order; None where all answers were unusable.  Equal messages are asked once
        unless ``salt`` is None."""
        def one(user: str) -> str | None:
            try:
                return self.chat(system, user, max_tokens, temperature, salt)
            except Unusable:
                return None

        asked = list(users) if salt is None else list(dict.fromkeys(users))
        with ThreadPoolExecutor(self.workers) as pool:
            answers = list(pool.map(one, asked))
        return answers if salt is None else [dict(zip(asked, answers))[user] for user in users]

    def _ask(self, path: str, body: dict | None, read):
        """POST (or GET without ``body``) until ``read`` can make something of the answer."""
        headers = {"Content-Type": "application/json"}
        if key := next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None):
            headers["Authorization"] = f"Bearer {key}"
        data = json.dumps(body).encode() if body is not None else None
        problem, reached = "", False
        for attempt in range(self.attempts):
            if attempt:
                self._count(retries=1)
                time.sleep(wait)
            wait = self.backoff * 2 ** attempt
            try:
                self._count(requests=1)
                request = urllib.request.Request(self.base + path, data, headers)
                return read(json.loads(self._receive(request)))
            except urllib.error.HTTPError as error:
                problem, reached = f"HTTP {error.code} {error.reason}", False
                if error.code not in AGAIN:
                    raise UserError(f"endpoint {self.base}: {problem}: {_hide(error.read(300), key)}") from None
                wait = max(wait, min(_retry_after(error.headers.get("Retry-After")), 60.0 * self.backoff))
            except (OSError, http.client.HTTPException) as error:      # refused, reset, cut off, timed out
                problem, reached = str(getattr(error, "reason", error)) or type(error).__name__, False
            except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
                problem, reached = f"{type(error).__name__}: {error}", True
        if reached:
            raise Unusable(f"endpoint {self.base}: no usable answer in {self.attempts} attempts: {problem[:200]}")
        raise UserError(f"endpoint {self.base}: no answer in {self.attempts} attempts: {problem[:200]}")

    def _receive(self, request: urllib.request.Request) -> bytes:
        """The body, within the time and size limits as a whole (urllib's own timeout starts anew with every byte)."""
        end, parts, size = time.monotonic() + self.timeout, [], 0
        with self.opener.open(request, timeout=self.timeout) as response:
            while part := response.read1(65536):
                parts.append(part)
                size += len(part)
                if size > self.most_bytes:
                    raise ValueError(f"more than {self.most_bytes} bytes")
                if time.monotonic() > end:
                    raise TimeoutError(f"not finished after {self.timeout:g} s")
        return b"".join(parts)

    def _count(self, **more: int) -> None:
        with self.lock:
            for name, n in more.items():
                self.counts[name] += n


class EndpointLM:
    """A server as the experience model: what ``mexp.ExperienceModel`` needs of a language model."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint

    def answers(self, system: str, texts: Sequence[str], max_new_tokens: int, temperature: float) -> list[str]:
        """One completion per text; an unusable answer is an empty one.  Only greedy ones are remembered on disk."""
        found = self.endpoint.chats(system, texts, max_new_tokens, temperature, 0 if temperature == 0 else None)
        return [text.strip() if text else "" for text in found]


def _content(answer: dict) -> tuple[str, dict]:
    text = answer["choices"][0]["message"]["content"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError("empty message")
    return text, answer.get("usage") or {}


def _tokens(usage: dict, name: str) -> int:
    n = usage.get(name, 0)
    return n if isinstance(n, int) and n >= 0 else 0


def _cached(path: Path) -> str | None:
    try:
        text = json.loads(path.read_text(encoding="utf-8"))["text"]
    except (OSError, ValueError, KeyError, TypeError):         # absent or damaged: ask again
        return None
    return text if isinstance(text, str) else None


def _retry_after(header: str | None) -> float:
    """Seconds that the server asks to wait: a number or a date (RFC 9110); 0 for anything else."""
    try:
        return max(0.0, float(header))
    except (TypeError, ValueError):
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


def _hide(body: bytes, key: str | None) -> str:
    """The start of an error's body on one line; servers sometimes repeat the key in it."""
    text = " ".join(body.decode("utf-8", "replace").split())
    return text.replace(key, "***") if key else text
