"""Conditional disaggregation: a prompt that is prefilled where it decodes."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import anyio
import pytest

from operators import KvPushRouter, PushRouter
from operators.kv import (
    KvRouterConfig,
    WorkerRank,
    kv_router,
)
from operators.kv.load import SequenceLoad
from operators.prefill import (
    ConditionalDisaggregation,
)
from pipeline import (
    Annotated,
    InvalidArgument,
)
from pipeline.llm import track_request
from pipeline.network import static_workers
from pipeline.protocols import (
    LLMEngineOutput,
    RequestPhase,
    RoutingHints,
)
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.testing import ScriptedEngine, Wait

from .worlds import meeting_at, prefill_world, prefilled, present_workers, prompt

# -- conditional disaggregation


def decode_pool(**settings: Any) -> tuple[Any, ConditionalDisaggregation]:
    engine = ScriptedEngine([Annotated(LLMEngineOutput([1]))] * 2)
    workers = static_workers({5: engine})
    config = KvRouterConfig(use_kv_events=False, conditional_disagg_enabled=True, **settings)
    health = present_workers(5, configs={5: ModelRuntimeConfig(max_num_batched_tokens=16)})
    kv = kv_router(workers, config, block_size_tokens=4, rng=Random(1), worker_type="decode", health=health)
    rule = ConditionalDisaggregation(config, kv)
    return (engine, lambda _: KvPushRouter(kv) >> PushRouter(workers)), rule


async def test_a_cached_prompt_is_prefilled_where_it_decodes() -> None:
    (engine, below), rule = decode_pool()
    async with prefill_world(conditional=rule, below=below) as it:
        claim = prompt(annotations=["x-bypass-remote-prefill", "other"])
        assert [item.event for item in await it.collect(claim)] == [None, None]
        assert (len(it.prefills), engine.requests[0].payload.annotations) == (1, ["other"])
        event, *items = await it.collect(claim)
        assert (event.event, json.loads(event.comment[0]), len(items)) == ("x-bypass-remote-prefill", True, 2)
        forwarded = engine.requests[1].payload
        assert forwarded.annotations == ["other", "x-bypass-remote-prefill"]
        assert (forwarded.routing.decode_worker_id, forwarded.routing.dp_rank) == (5, 0)
        assert (forwarded.prefill_result, forwarded.bootstrap_info, forwarded.router_config_override) == (
            None,
            None,
            None,
        )
        assert forwarded.tracker.phase is RequestPhase.DECODE
        assert forwarded.stop_conditions.max_tokens == 5
        assert len(it.prefills) == 1
        it.assert_idle()


@pytest.mark.parametrize("present", [(), (1, 2, 3)])
async def test_only_the_router_may_bypass_prefill(present: Any) -> None:
    claim = prompt(annotations=["x-bypass-remote-prefill", "other"], tracker=track_request(lambda: 0))
    async with prefill_world(present=present) as it:
        await it.collect(claim)
        assert it.decodes[0].payload.annotations == ["other"]
        assert claim.annotations == ["x-bypass-remote-prefill", "other"]


async def test_a_named_prefill_worker_always_gets_the_request() -> None:
    (_, below), rule = decode_pool(conditional_disagg_eff_isl_ratio_threshold=1.0)
    async with prefill_world(conditional=rule, below=below) as it:
        await it.collect(prompt(routing=RoutingHints(prefill_worker_id=2)))
        assert len(it.engines[2].requests) == 1


async def test_a_decode_worker_that_is_busy_or_not_known_to_be_calm_gets_no_prompts() -> None:
    (_, below), rule = decode_pool(
        conditional_disagg_decode_busy_threshold=0.4, conditional_disagg_eff_isl_ratio_threshold=1.0
    )
    async with prefill_world(conditional=rule, below=below) as it:
        await it.collect()  # nothing is cached: the whole prompt would be net, and the ratio is strict
        assert len(it.prefills) == 1
        await it.collect()
        assert len(it.prefills) == 1
        other = rule._decode.loads.sequences.book("other", WorkerRank(5), SequenceLoad([], 7), anyio.current_time())
        await it.collect()
        assert len(it.prefills) == 2
        rule._decode.loads.sequences.release(other, anyio.current_time())
        health: Any = rule._decode.pool._health
        health.publish({5: ModelRuntimeConfig()})
        await it.collect()
        assert len(it.prefills) == 3


async def test_an_error_while_deciding_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    (_, below), rule = decode_pool()
    async with prefill_world(conditional=rule, below=below) as it:
        with pytest.raises(InvalidArgument):  # of the decode router, which gets the request after the prefill
            await it.collect(prompt(routing=RoutingHints(decode_worker_id=5, allowed_worker_ids={1, 2, 3})))
        assert "is prefilled remotely" in caplog.text
        assert len(it.prefills) == 1


async def test_a_busy_prefill_worker_is_spared() -> None:
    (_, below), rule = decode_pool(
        conditional_disagg_policy="prefill_load", conditional_disagg_prefill_busy_threshold=0.5
    )
    configs = {1: meeting_at(max_num_batched_tokens=10)}
    async with prefill_world(
        script=[Wait(5), prefilled()], configs=configs, workers=(1,), conditional=rule, below=below
    ) as it:
        await it.collect()
        assert it.router.prefills == 1
        event, *_ = await it.collect()
        assert (event.event, len(it.prefills)) == ("x-bypass-remote-prefill", 1)
        await anyio.sleep(6)
        await it.collect()
        assert len(it.prefills) == 2
        await anyio.sleep(6)
