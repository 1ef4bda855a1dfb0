"""Load: clients that send prompts to front ends over HTTP and hold each answer against the one that is right."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Literal
from uuid import uuid4

import anyio
import httpx2
from attrs import define, field, frozen

from engines.mocker.tokens import Output
from tests.processes.worlds import MODEL, Program

_LETTERS = range(ord("a"), ord("z") + 1)
"""The tokens that the mock engine makes up where tokens are bytes."""

Outcome = Literal["exact", "refused", "failed", "cut", "wrong"]
"""exact: all its tokens. refused: an error in the place of an answer. failed: an error at the end of a broken one.
cut: the connection broke. wrong: an answer that ended as if it were whole, and is not."""


@frozen
class Result:
    """How one request ended."""

    outcome: Outcome
    detail: str
    """Type and message of the error; else what was wrong."""
    front_end: Program
    life: int
    """Of the front end, when the request was sent."""
    ended_s: float
    longest_gap_s: float
    """The longest time between two tokens."""
    request_id: str
    """As in the logs."""


def right_answer(prompt: str, tokens: int) -> str:
    """Return the answer of the mock engine, wherever it is computed."""
    ids = prompt.encode()
    made_up = Output(token_ids=_LETTERS).output_source(prompt_tokens=len(ids), first=ids[0], last=ids[-1])
    return bytes(itertools.islice(made_up, tokens)).decode()


@define(eq=False)
class Load:
    """A number of clients, each with one request after the other, until `is_over`."""

    choose: Callable[[], Program | None]
    """Return the front end for the next request, None if there is none now."""
    rng: Random
    clients: int = 12
    tokens: tuple[int, int] = (60, 240)
    """Least and most tokens of an answer."""
    is_over: bool = False
    results: list[Result] = field(factory=list)
    running: int = 0
    """Requests that have not ended."""
    received: int = 0
    """Tokens of all answers so far."""

    async def run(self) -> None:
        """Send requests until `is_over`, and return when the last one has ended."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        unbounded = httpx2.AsyncClient(timeout=120, limits=limits, trust_env=False)
        async with unbounded as client, anyio.create_task_group() as tasks:
            for _ in range(self.clients):
                tasks.start_soon(self._client, client)

    async def _client(self, client: httpx2.AsyncClient) -> None:
        while not self.is_over:
            if (front_end := self.choose()) is None:
                await anyio.sleep(0.1)
                continue
            prompt = "".join(self.rng.choices("abcdefghijklmnopqrstuvwxyz ", k=self.rng.randint(1, 300)))
            tokens = self.rng.randint(*self.tokens)
            life = front_end.lives
            self.running += 1
            request = _Request(client, front_end.health_url.removesuffix("/health"), prompt, tokens)
            outcome, detail = await request.run()
            self.running -= 1
            self.received += request.received
            ended_s = anyio.current_time()
            self.results.append(Result(outcome, detail, front_end, life, ended_s, request.longest_gap_s, request.id))
            if outcome != "exact":
                await anyio.sleep(0.05)

    def counts(self) -> Counter[str]:
        return Counter(result.outcome for result in self.results)

    def not_exact(self) -> list[Result]:
        return [result for result in self.results if result.outcome != "exact"]


@define(eq=False)
class _Request:
    client: httpx2.AsyncClient
    url: str
    prompt: str
    tokens: int
    received: int = 0
    longest_gap_s: float = 0.0
    id: str = field(factory=lambda: str(uuid4()))

    async def run(self) -> tuple[Outcome, str]:
        body = {"model": MODEL, "prompt": self.prompt, "max_tokens": self.tokens, "stream": True}
        try:
            url, headers = f"{self.url}/v1/completions", {"x-request-id": self.id}
            async with self.client.stream("POST", url, json=body, headers=headers) as response:
                if response.status_code != 200:
                    await response.aread()
                    return "refused", f"{response.status_code} {_message(response.text)}"
                return await self._read(response)
        except (httpx2.TransportError, httpx2.StreamError) as error:
            return "cut", f"{type(error).__name__}: {error}"

    async def _read(self, response: httpx2.Response) -> tuple[Outcome, str]:
        text, finish, error, is_done, last_s = "", None, "", False, anyio.current_time()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                is_done = True
                continue
            event = json.loads(data)
            if "error" in event:
                error = _message(data)
                continue
            for choice in event["choices"]:
                now_s = anyio.current_time()
                self.longest_gap_s, last_s = max(self.longest_gap_s, now_s - last_s), now_s
                self.received += len(choice["text"])
                text += choice["text"]
                finish = choice["finish_reason"] or finish
        wanted = right_answer(self.prompt, self.tokens)
        if error:
            return ("failed", error) if wanted.startswith(text) else ("wrong", f"{text!r} before {error}")
        if text == wanted and finish == "length" and is_done:
            return "exact", ""
        return "wrong", f"{finish=} {is_done=} {len(text)} of {len(wanted)} tokens: {text!r} in the place of {wanted!r}"


def _message(body: str) -> str:
    """Return type and message of an error; raise AssertionError for one that has none."""
    loaded = json.loads(body)
    error = loaded.get("error", loaded)
    found = f"{error.get('type')}: {error.get('message')}"
    assert error.get("type"), body
    assert error.get("message"), body
    return found
