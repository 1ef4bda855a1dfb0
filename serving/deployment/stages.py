"""The stages of a standard graph in order, above the routing to one pool of workers.

Rejection >> Preprocess >> Migration >> Detokenize >> LoraAdapter >> PrefillRouter >> KvPushRouter >> PushRouter
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, time_ns
from typing import Any

from operators import Detokenize, LoraAdapter, Migration, Model, PrefillRouter, Preprocess
from operators.migration import MigrationMetrics
from pipeline import Annotated, AsyncEngine, Segment, Stage, link
from pipeline.protocols import BackendOutput, LLMEngineOutput, PreprocessedRequest
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest
from pipeline.telemetry import traced

from .config import METRICS_PREFIX, GraphConfig, HostOptions
from .routing import Routing
from .server_prompts import ServerPrompts

StandardGraph = Segment[ChatCompletionRequest | CompletionRequest, Annotated[BackendOutput]]
"""OpenAI requests in, detokenized items out."""
TokenGraph = AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]
"""Requests in tokens in, an engine's items out."""


def wall_ms() -> int:
    """Return the milliseconds since the epoch."""
    return time_ns() // 1_000_000


def line(
    model: Model,
    routing: Routing,
    config: GraphConfig,
    hosting: HostOptions,
    prefill: PrefillRouter | None = None,
    prompts: ServerPrompts | None = None,
    adapter: LoraAdapter | None = None,
) -> StandardGraph:
    """Return the stages in order; with a tracer each one that takes time has a span."""
    preprocess = Preprocess(
        model,
        ignore_unsupported=config.ignore_unsupported,
        limits=config.request_limits,
        work=config.prompt_work,
        wall_ms=wall_ms,
        perf_s=perf_counter,
    )
    text = [one for one in (prompts, preprocess) if one is not None]
    graph: StandardGraph = _linked(routing, config, hosting, prefill, adapter, text, Detokenize(model))
    return graph if hosting.tracer is None else traced(graph, tracer=hosting.tracer)


def token_line(
    routing: Routing,
    config: GraphConfig,
    hosting: HostOptions,
    prefill: PrefillRouter | None = None,
    adapter: LoraAdapter | None = None,
) -> TokenGraph:
    """Return the stages without those of text."""
    return _linked(routing, config, hosting, prefill, adapter)


def _linked(
    routing: Routing,
    config: GraphConfig,
    hosting: HostOptions,
    prefill: PrefillRouter | None,
    adapter: LoraAdapter | None,
    text: Sequence[Stage] = (),
    detokenize: Detokenize | None = None,
) -> Segment[Any, Any]:
    """Return the stages that there are; without those of text, the graph of requests in tokens."""
    migration = None
    if config.migration_limit:
        meter = None if hosting.metrics is None else hosting.metrics.meter
        migration = Migration(
            config.migration_limit,
            max_seq_len_tokens=config.migration_max_seq_len_tokens,
            metrics=None if meter is None else MigrationMetrics(meter, prefix=METRICS_PREFIX.of(hosting.environment)),
            tracer=hosting.tracer,
        )
    stages = (routing.rejection, *text, migration, detokenize, adapter, prefill, routing.router)
    return link(*(stage for stage in stages if stage is not None))
