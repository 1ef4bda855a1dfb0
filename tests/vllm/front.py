"""`penstock serve` in front of real servers, as a process of its own, and an openai client of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx2
from attrs import define, field
from openai import AsyncOpenAI

from tests.vllm.servers import BLOCK_SIZE_TOKENS, MODEL, VllmServer, free_ports, until

START_S = 60
EXTRA_FIELDS = {"nvext": {"extra_fields": ["completion_token_ids", "worker_id"]}}


@define(eq=False)
class Front:
    """A running `penstock serve`."""

    url: str
    log: Path
    _http: httpx2.Client = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._http = httpx2.Client(base_url=self.url, timeout=60, trust_env=False)

    def close(self) -> None:
        self._http.close()

    @property
    def metrics(self) -> str:
        return self._http.get("/metrics").raise_for_status().text

    @property
    def workers(self) -> set[str]:
        """Ids of the workers that it has, in hex digits."""
        with suppress(httpx2.TransportError):
            return {one.rpartition("/")[2] for one in self._http.get("/health").json().get("instances", ())}
        return set()

    def wait_for(self, workers: int) -> set[str]:
        """Wait until it has exactly so many workers, and return their ids."""
        return until(lambda: self.workers, lambda ids: len(ids) == workers, within_s=START_S, pause_s=0.1)

    def wait_for_prefill(self) -> None:
        """Wait until a prompt is computed by a prefill worker."""
        until(self._prefilled, lambda elsewhere: elsewhere is True, within_s=START_S, pause_s=0.2)

    def wait_for_no_prefill(self) -> None:
        """Wait until a prompt is computed where it is decoded."""
        until(self._prefilled, lambda elsewhere: elsewhere is False, within_s=START_S, pause_s=0.2)

    def _prefilled(self) -> bool | None:
        """Send a short prompt; return whether a prefill worker has computed it, None if there was no answer."""
        body = {"model": MODEL, "prompt": list(range(300, 364)), "max_tokens": 1}
        answer = self._http.post("/v1/completions", json=body)
        return "x-penstock-prefill-worker" in answer.headers if answer.status_code == 200 else None

    def known_blocks(self) -> dict[str, float]:
        """Blocks that the router knows on each worker."""
        found: dict[str, float] = {}
        for line in self.metrics.splitlines():
            if line.startswith("dynamo_frontend_worker_known_cached_blocks{"):
                labels, _, value = line.rpartition(" ")
                worker = labels.partition('worker_id="')[2].partition('"')[0]
                found[worker] = found.get(worker, 0.0) + float(value)
        return found


@contextmanager
def served(log: Path, servers: Sequence[VllmServer], *options: str) -> Iterator[Front]:
    """`penstock serve` in front of the servers; all of its processes are ended with the block."""
    port = free_ports(1)[0]
    program = Path(sys.executable).with_name("penstock")
    command = [str(program), "serve", "--host", "127.0.0.1", "--port", str(port)]
    for server in servers:
        command += ["--upstream", server.url]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, *options], stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ), start_new_session=True
        )
    front = Front(f"http://127.0.0.1:{port}", log)
    try:
        yield front
    finally:
        front.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@asynccontextmanager
async def client_of(front: Front) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's own client of the front, which repeats nothing."""
    async with AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@define
class Streamed:
    """An answer so far."""

    token_ids: list[int] = field(factory=list)
    finish_reason: str | None = None
    headers: dict[str, str] = field(factory=dict)

    @property
    def overlap_blocks(self) -> int:
        """Blocks of the prompt that the router knew on the worker it chose."""
        fields = [field.strip() for field in self.headers["x-penstock-router"].split(";")]
        return next(int(field.partition("=")[2]) for field in fields if field.startswith("overlap_blocks="))

    @property
    def worker(self) -> str:
        """Id of the worker that answered, or the ids, with commas, if it continued elsewhere."""
        return self.headers["x-penstock-worker"]


async def stream(client: AsyncOpenAI, prompt: Sequence[int], max_tokens: int) -> AsyncGenerator[Streamed, None]:
    """Send a greedy completion of token ids; yield the same answer after each of its chunks."""
    own: dict[str, Any] = {"ignore_eos": True, **EXTRA_FIELDS}
    request = client.completions.with_streaming_response.create(
        model=MODEL, prompt=list(prompt), max_tokens=max_tokens, temperature=0, stream=True, extra_body=own
    )
    async with request as response:
        answer = Streamed(headers=dict(response.headers))
        async for chunk in await response.parse():
            nvext = (chunk.model_extra or {}).get("nvext") or {}
            answer.token_ids += nvext.get("completion_token_ids") or ()
            for choice in chunk.choices:
                answer.finish_reason = choice.finish_reason or answer.finish_reason
            yield answer


async def answered(client: AsyncOpenAI, prompt: Sequence[int], max_tokens: int) -> Streamed:
    """The whole answer to a greedy completion. Raises AssertionError unless it has all its tokens."""
    answer = Streamed()
    async for answer in stream(client, prompt, max_tokens):  # noqa: B007
        pass
    assert (len(answer.token_ids), answer.finish_reason) == (max_tokens, "length"), answer
    return answer


def prompts(number: int, tokens: int, *, seed: int) -> list[list[int]]:
    """Prompts that share no block."""
    random = Random(seed)
    return [[random.randrange(300, 8000) for _ in range(tokens)] for _ in range(number)]


def reusable(tokens: int) -> int:
    """Tokens of whole blocks among those that a server has computed."""
    return tokens // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS
