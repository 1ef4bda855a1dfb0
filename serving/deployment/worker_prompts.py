"""Prompts of a model whose tokenizer is at the servers of its workers, over the request plane.

    front end ──► PromptText   ──► endpoint `tokenize` of a worker's component ──► its server
    front end ◄── PromptTokens ◄──             under the worker's id           ◄──

serving_prompts: the worker's side. prompt_workers: that of a front end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any

import anyio
from attrs import evolve, frozen

from pipeline import AsyncEngine, Context, Disconnected, function_engine
from pipeline.network import EndpointId, Runtime
from pipeline.protocols.field_rules import U32

from .admission import Admission
from .model_graph import FOUND_S
from .routing import workers_at
from .server_prompts import PromptServer

PROMPTS_ENDPOINT = "tokenize"
"""Name of the endpoint, in the workers' component."""


@frozen
class PromptText:
    """A prompt that is no tokens yet."""

    body: dict[str, Any]
    """See `PromptServer.prompt_tokens`."""


@frozen
class PromptTokens:
    """The tokens of a prompt."""

    token_ids: list[U32]


def prompts_endpoint(endpoint: EndpointId) -> EndpointId:
    """Return where the workers at an endpoint make tokens of prompts."""
    return evolve(endpoint, endpoint=PROMPTS_ENDPOINT)


@asynccontextmanager
async def serving_prompts(
    runtime: Runtime, endpoint: EndpointId, worker_id: int, server: PromptServer
) -> AsyncIterator[None]:
    """Have the server make tokens of prompts for front ends until the block ends. Raise as `Runtime.serve`.

    Entered before the worker with this id at the endpoint is visible, so that no request finds it without.
    """

    async def answer(request: PromptText) -> AsyncIterator[PromptTokens]:
        yield PromptTokens(await server.prompt_tokens(request.body))

    served = await runtime.serve(prompts_endpoint(endpoint), function_engine(answer), instance_id=worker_id)
    try:
        yield
    finally:
        await served.close(0)


@asynccontextmanager
async def prompt_workers(
    endpoint: EndpointId, runtime: Runtime, admission: Admission
) -> AsyncIterator[Callable[[], Sequence[PromptServer]]]:
    """Give what returns the admitted workers at an endpoint as servers of prompts, those that can be reached now.

    If none can be, it returns all. It is given once a first one is there, or after `FOUND_S`; the view of the workers
    ends with the block.
    """
    with closing(workers_at(prompts_endpoint(endpoint), runtime, PromptTokens, admission)) as workers:
        workers.keep_connected(lambda: None)
        with anyio.move_on_after(FOUND_S):
            await workers.wait_for_instances()

        def present() -> Sequence[PromptServer]:
            ids, unreachable = workers.instance_ids(), workers.reach().unreachable
            if not (reached := [one for one in ids if one not in unreachable]):
                workers.retry_unreachable()
            return [_PromptWorker(workers.engine(one)) for one in reached or ids]

        yield present


class _PromptWorker:
    """A worker as a server of prompts."""

    def __init__(self, engine: AsyncEngine[PromptText, PromptTokens]) -> None:
        self._engine = engine

    async def prompt_tokens(self, body: Mapping[str, Any]) -> list[int]:
        async with await self._engine.generate(Context(PromptText(dict(body)))) as stream:
            async for answer in stream:
                return answer.token_ids
        raise Disconnected("the worker gave no tokens of the prompt")
