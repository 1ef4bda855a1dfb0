"""What the routers reuse in front of two real vLLM servers: conversations, by vLLM's own counters.

    python -m benchmarks.vllm_conversations http://127.0.0.1:8001 http://127.0.0.1:8002 [--conversations 20]

Each conversation sends its whole history again with each turn: the prompt, the answers, and new tokens of the user.
What can be reused are the whole blocks of what its last turn had computed. The servers run already, with KV events;
every router has prompts of its own, so what the one before left in the caches is of no use to it.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random, randrange
from time import perf_counter, sleep

import anyio
import httpx2
from attrs import define, field

from pipeline.wire import plain_from_json

BLOCK_TOKENS = 32
PROMPT_TOKENS, ANSWER_TOKENS, NEW_TOKENS, TURNS = 300, 24, 40, 4
AT_A_TIME = 4
START_S = 60.0
ROUTERS: tuple[tuple[str, dict[str, str]], ...] = (
    ("kv", {"DYN_ROUTER_PLACEMENT": "cost"}),
    ("kv", {"DYN_ROUTER_PREFILL_LOAD_SCALE": "4"}),
    ("round-robin", {}),
)
"""Routers and their settings: the second one gives tokens of prompts that are to be computed four times the weight."""


@define
class Run:
    """What one router did."""

    router: str
    could_tokens: int = 0
    """Tokens of prompts that some server had computed, in whole blocks."""
    prompt_tokens: int = 0
    first_token_s: list[float] = field(factory=list)
    """Of later turns."""


def hits(servers: Sequence[str]) -> float:
    """Tokens of prompts that the servers have found in their caches."""
    texts = [httpx2.get(f"{server}/metrics", trust_env=False).text for server in servers]
    pattern = r"^vllm:prefix_cache_hits_total\{[^}]*\} (\S+)$"
    return sum(float(value) for text in texts for value in re.findall(pattern, text, re.MULTILINE))


@contextmanager
def front(servers: Sequence[str], router: str, variables: Mapping[str, str]) -> Iterator[str]:
    """`penstock serve` in front of all servers; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("penstock")), "serve", "--port", str(port), "--router", router]
    command += [word for server in servers for word in ("--upstream", server)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | dict(variables)) as process:
        try:
            _wait(f"http://127.0.0.1:{port}", len(servers))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait(url: str, workers: int) -> None:
    deadline = perf_counter() + START_S
    while perf_counter() < deadline:
        try:
            if len(httpx2.get(f"{url}/health", trust_env=False).json().get("instances", ())) == workers:
                return
        except httpx2.TransportError:
            pass
        sleep(0.2)
    raise TimeoutError(f"{url} has not found {workers} servers")


async def turn(client: httpx2.AsyncClient, model: str, prompt: Sequence[int]) -> tuple[list[int], float]:
    """One greedy answer: its tokens, and the seconds to the first."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "nvext": {"extra_fields": ["completion_token_ids"]}}
    begun_s, first_s, tokens = perf_counter(), 0.0, list[int]()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = plain_from_json(line.removeprefix("data: ").encode())
                tokens += (chunk.get("nvext") or {}).get("completion_token_ids") or ()
                first_s = first_s or (perf_counter() - begun_s if tokens else 0.0)
    return tokens, first_s


async def converse(run: Run, client: httpx2.AsyncClient, model: str, random: Random, room: anyio.Semaphore) -> None:
    """Hold one conversation."""
    history = [random.randrange(300, 8000) for _ in range(PROMPT_TOKENS)]
    computed = 0
    for number in range(TURNS):
        run.could_tokens += computed // BLOCK_TOKENS * BLOCK_TOKENS
        run.prompt_tokens += len(history)
        async with room:
            tokens, first_s = await turn(client, model, history)
        if number:
            run.first_token_s.append(first_s)
        computed = len(history) + len(tokens) - 1  # the last token was sampled and never computed
        history += tokens + [random.randrange(300, 8000) for _ in range(NEW_TOKENS)]


async def measure(
    servers: Sequence[str], router: str, variables: Mapping[str, str], conversations: int, seed: int
) -> tuple[Run, float]:
    run, before = Run(router), hits(servers)
    with front(servers, router, variables) as url:
        async with httpx2.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            room = anyio.Semaphore(AT_A_TIME)
            async with anyio.create_task_group() as tasks:
                for number in range(conversations):
                    tasks.start_soon(converse, run, client, model, Random(1000 * seed + number), room)
    return run, hits(servers) - before


async def main(servers: Sequence[str], conversations: int) -> None:
    print(f"{conversations} conversations of {TURNS} turns, {AT_A_TIME} at a time, {len(servers)} servers")
    for seed, (router, variables) in enumerate(ROUTERS, randrange(2**32)):
        run, reused = await measure(servers, router, variables, conversations, seed)
        settings = " ".join(f"{name}={value}" for name, value in variables.items())
        first_ms = statistics.median(run.first_token_s) * 1e3
        print(
            f"{router} {settings}: reused {reused:.0f} of {run.could_tokens} tokens ({reused / run.could_tokens:.1%}), "
            f"{reused / run.prompt_tokens:.1%} of all prompts; first token of later turns {first_ms:.0f} ms (median)"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_conversations")
    parser.add_argument("servers", nargs="+", metavar="URL")
    parser.add_argument("--conversations", type=int, default=20)
    options = parser.parse_args()
    anyio.run(main, options.servers, options.conversations)
