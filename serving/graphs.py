"""The standard graphs, built from one config.

    Preprocess >> Detokenize >> PushRouter ──► engine instances at one endpoint of an embedded runtime

A graph is opened as a context and closes all that it opened.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Literal

from operators import Detokenize, Model, Preprocess, PushRouter
from pipeline import Annotated, Segment
from pipeline.network import Runtime, Workers
from pipeline.protocols import BackendOutput, LLMEngineOutput
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest

from .config import GraphConfig, RouterName

ENDPOINT = "penstock/engine/generate"
"""Where the engine instances are served."""

StandardGraph = Segment[ChatCompletionRequest | CompletionRequest, Annotated[BackendOutput]]
"""OpenAI requests in, detokenized items out."""

_MODES: Mapping[RouterName, Literal["round_robin", "random", "direct"]] = {
    "round-robin": "round_robin",
    "random": "random",
    "direct": "direct",
}


@asynccontextmanager
async def standard_graph(config: GraphConfig) -> AsyncIterator[StandardGraph]:
    """The graph of a config with all it needs running; leaving the block drains and closes it."""
    model = config.load_model()
    async with Runtime.in_process() as runtime:
        for _ in range(config.workers):
            await runtime.serve(ENDPOINT, config.make_engine())
        workers = runtime.workers(ENDPOINT, Annotated[LLMEngineOutput])
        await workers.wait_for_instances(config.workers)
        yield line(model, workers, config)


def line(model: Model, workers: Workers[Any, Any], config: GraphConfig) -> StandardGraph:
    """The stages in order, over any workers."""
    preprocess = Preprocess(model, ignore_unsupported=True) if config.ignore_unsupported else Preprocess(model)
    return preprocess >> Detokenize(model) >> _router(workers, config)


def _router(workers: Workers[Any, Any], config: GraphConfig) -> PushRouter[Any, Any]:
    mode = _MODES[config.router]
    return PushRouter(workers, mode) if config.seed is None else PushRouter(workers, mode, Random(config.seed))
