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
from typing import Callable, Sequence

import formats
from config import UserError
from runs import write_whole

KEY_VARIABLES = ("DREAMGYM_API_KEY", "OPENAI_API_KEY")
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}     # worth another attempt; anything else is the caller's mistake
USAGE = ("prompt_tokens", "completion_tokens")


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
    cached, prompt_tokens, completion_tokens.  Raises UserError where the server names no model, or cannot be asked.
    """

    def __init__(self, base: str, model: str | None = None, cache: str | Path | None = None, timeout: float = 120.0,
                 attempts: int = 6, backoff: float = 1.0, most_bytes: int = 4_000_000, workers: int = 8,
                 prices: tuple[float, float] = (0.0, 0.0)):
        self.base, self.timeout, self.attempts, self.backoff = base.rstrip("/"), timeout, attempts, backoff
        self.most_bytes, self.workers, self.prices = most_bytes, workers, prices
        self.cache = Path(cache) if cache else None
        self.counts = dict.fromkeys(("requests", "retries", "cached", *USAGE), 0)
        self.lock = threading.Lock()
        self.opener = urllib.request.build_opener(_NoRedirect)
        try:
            self.model = model or self._ask("/models", None, lambda answer: _text(answer["data"][0]["id"]))
        except Unusable as error:
            raise UserError(f"{error}; name the model in mexp.server_model") from None

    @property
    def cost(self) -> float:
        """What the answers so far cost, in the currency of ``prices``."""
        return (self.counts["prompt_tokens"] * self.prices[0] + self.counts["completion_tokens"] * self.prices[1]) / 1e6

    def take_counts(self) -> dict[str, float]:
        """``counts`` and ``cost`` since this was asked last."""
        taken = {**self.counts, "cost": self.cost}
        self.counts = dict.fromkeys(self.counts, 0)
        return taken

    def chat(self, system: str, user: str, max_tokens: int, temperature: float = 0.0, salt: int | None = 0,
             more: dict | None = None) -> str:
        """The answer's text.  ``salt`` tells wanted repetitions apart in the cache; None: ask in any case.  ``more``:
        further fields of the request.

        Raises UserError where the server cannot be reached or refuses, Unusable where its answers make no sense.
        """
        body = {"model": self.model, "messages": [{"role": "system", "content": system},
                                                  {"role": "user", "content": user}],
                "max_tokens": max_tokens, "temperature": temperature, **(more or {})}
        name = hashlib.sha256(json.dumps([self.base, body, salt]).encode()).hexdigest()
        path = self.cache / f"{name}.json" if self.cache and salt is not None else None
        if path and (text := _cached(path)) is not None:
            self._count(cached=1)
            return text
        text = self._ask("/chat/completions", body, lambda answer: _text(answer["choices"][0]["message"]["content"]))
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({"request": body, "text": text}))
        return text

    def chats(self, system: str, users: Sequence[str], max_tokens: int, temperature: float = 0.0,
              salt: int | None = 0, more: dict | None = None) -> list[str | None]:
        """One answer per user message, in order; None where all answers were unusable.  Equal messages are asked once
        unless ``salt`` is None.  Once one is refused, what still waits in the queue is not asked."""
        over = threading.Event()

        def one(user: str) -> str | None:
            if over.is_set():                                  # nobody gets this: an earlier message's error is raised
                return None
            try:
                return self.chat(system, user, max_tokens, temperature, salt, more)
            except Unusable:
                return None
            except Exception:                                  # whatever it is, it ends the whole call
                over.set()
                raise

        asked = list(users) if salt is None else list(dict.fromkeys(users))
        with ThreadPoolExecutor(self.workers) as pool:
            answers = list(pool.map(one, asked))
        return answers if salt is None else [dict(zip(asked, answers))[user] for user in users]

    def _ask(self, path: str, body: dict | None, read: Callable[[dict], str]) -> str:
        """POST (or GET without ``body``) until ``read`` can make something of the answer."""
        headers = {"Content-Type": "application/json"}
        if key := _key():
            headers["Authorization"] = f"Bearer {key}"
        data = json.dumps(body).encode() if body is not None else None
        problem, reached = "", False
        for attempt in range(self.attempts):
            if attempt:
                self._count(retries=1)
                time.sleep(wait)
            wait = self.backoff * 2 ** attempt
            end = time.monotonic() + self.timeout
            try:
                self._count(requests=1)
                request = urllib.request.Request(self.base + path, data, headers)
                with self.opener.open(request, timeout=self.timeout) as response:
                    answer = json.loads(self._receive(response, end))
                self._count(**_usage(answer))                  # paid for, whether it is of use or not
                return read(answer)
            except urllib.error.HTTPError as error:
                problem, reached = f"HTTP {error.code} {error.reason}", False
                if error.code not in AGAIN:
                    raise UserError(f"endpoint {self.base}: {problem}: {self._complaint(error, end, key)}") from None
                wait = max(wait, min(_retry_after(error.headers.get("Retry-After")), 60.0 * self.backoff))
            except (OSError, http.client.HTTPException) as error:      # refused, reset, cut off, timed out
                problem, reached = str(getattr(error, "reason", error)) or type(error).__name__, False
            except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
                problem, reached = f"{type(error).__name__}: {error}", True
        if reached:
            raise Unusable(f"endpoint {self.base}: no usable answer in {self.attempts} attempts: {problem[:200]}")
        raise UserError(f"endpoint {self.base}: no answer in {self.attempts} attempts: {problem[:200]}")

    def _receive(self, response: http.client.HTTPResponse | urllib.error.HTTPError, end: float) -> bytes:
        """The body, within the size limit and until ``end`` (urllib's own timeout starts anew with every byte)."""
        parts, size = [], 0
        while part := response.read1(65536):
            parts.append(part)
            size += len(part)
            if size > self.most_bytes:
                raise ValueError(f"more than {self.most_bytes} bytes")
            if time.monotonic() > end:
                raise TimeoutError(f"not finished after {self.timeout:g} s")
        return b"".join(parts)

    def _complaint(self, error: urllib.error.HTTPError, end: float, key: str | None) -> str:
        """The start of an error's body on one line; servers sometimes repeat the key in it."""
        try:
            text = " ".join(self._receive(error, end).decode("utf-8", "replace").split())
        except (OSError, http.client.HTTPException, ValueError):       # its status is known: the rest may fail
            return "(its explanation did not arrive)"
        return (text.replace(key, "***") if key else text)[:300]

    def _count(self, **more: int) -> None:
        with self.lock:
            for name, n in more.items():
                self.counts[name] += n


class EndpointLM:
    """A server as the experience model: what ``mexp.ExperienceModel`` needs of a language model.

    Its template writes the date of the training (``llm.LM.prompt``); teachers are not told one, since OpenAI's own
    server refuses fields that it does not know.
    """

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint

    def answers(self, system: str, texts: Sequence[str], max_new_tokens: int, temperature: float) -> list[str]:
        """One completion per text; an unusable answer is an empty one.  Only greedy ones are remembered on disk."""
        found = self.endpoint.chats(system, texts, max_new_tokens, temperature, 0 if temperature == 0 else None,
                                    {"chat_template_kwargs": {"date_string": formats.DATE}})
        return [text.strip() if text else "" for text in found]


def _key() -> str | None:
    """Raises UserError for one that fits into no header, whose own message would show it."""
    name = next((name for name in KEY_VARIABLES if os.environ.get(name)), None)
    key = os.environ[name].strip() if name else None
    if key and not (key.isascii() and key.isprintable()):
        raise UserError(f"{name}: a key has no line breaks, control characters or letters beyond ASCII; set it anew")
    return key


def _text(said) -> str:
    """A text that is there and can be written to a file.  Raises ValueError for anything else."""
    if not isinstance(said, str) or not said.strip():
        raise ValueError("empty message")
    said.encode()                                              # half a surrogate pair is valid JSON, but no UTF-8
    return said


def _usage(answer) -> dict[str, int]:
    """What the server says that it charged [tokens]; nothing where it says no number."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    said = {name: usage.get(name) for name in USAGE} if isinstance(usage, dict) else {}
    return {name: n for name, n in said.items() if type(n) is int and 0 <= n < 10**9}


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
