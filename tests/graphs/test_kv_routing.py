"""The standard graph with the KV router, over mock workers, in virtual time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from operators.kv import KvRouterConfig
from operators.kv.operator import ROUTER_DECISION
from pipeline import Context
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage, NvExt
from serving.deployment import GraphConfig, HostOptions, StandardGraph, hosted_graph
from serving.http import Telemetry

SYSTEM = "You answer in few words, and in none where none will do. " * 20


def config(**fields: Any) -> GraphConfig:
    return GraphConfig(engine="mocker", workers=4, router="kv", seed=3, **fields)


def conversation(*texts: str) -> list[ChatMessage]:
    """A system message, then these texts, by user and assistant in turn."""
    turns = [ChatMessage(role="assistant" if n % 2 else "user", content=text) for n, text in enumerate(texts)]
    return [ChatMessage(role="system", content=SYSTEM), *turns]


async def decided(
    graph: StandardGraph, messages: list[ChatMessage], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Send a chat and read its answer, which has text; return the router's decision."""
    nvext = NvExt(annotations=[ROUTER_DECISION])
    request = ChatCompletionRequest(model="echo", messages=messages, max_tokens=8, nvext=nvext)
    reasons, texts = [], []
    async with await graph.generate(Context(request, metadata=metadata or {})) as stream:
        async for item in stream:
            if (error := item.extract_error()) is not None:
                raise error
            if item.event == ROUTER_DECISION:
                reasons.append(json.loads((item.comment or [""])[0]))
            elif item.data is not None:
                texts.append(item.data.text or "")
    (decision,) = reasons
    assert "".join(texts)
    return dict(decision)


@pytest.mark.parametrize("use_kv_events", [True, False], ids=["by events", "approximate"])
async def test_the_turns_of_a_conversation_go_to_the_worker_that_cached_the_one_before(use_kv_events: bool) -> None:
    async with hosted_graph(config(kv_router=KvRouterConfig(use_kv_events=use_kv_events)), HostOptions()) as opened:
        first = await decided(opened.graph, conversation("hi"))
        others = [await decided(opened.graph, [ChatMessage(role="user", content=f"{n}" * 1000)]) for n in range(4)]
        second = await decided(opened.graph, conversation("hi", "hello", "and now?"))
        assert second["worker_id"] == first["worker_id"]
        assert (first["overlap_blocks"], second["overlap_blocks"] > len(SYSTEM) // 64 - 1) == (0, True)
        assert [other["overlap_blocks"] for other in others] == [0, 0, 0, 0]


async def test_without_events_a_sent_prompt_is_evicted_from_the_index_after_its_ttl() -> None:
    settings = KvRouterConfig(use_kv_events=False, router_ttl_secs=60.0)
    async with hosted_graph(config(kv_router=settings), HostOptions()) as opened:
        await decided(opened.graph, conversation("hi"))
        await anyio.sleep(50)
        assert (await decided(opened.graph, conversation("hi")))["overlap_blocks"] > 0
        await anyio.sleep(61)
        assert (await decided(opened.graph, conversation("hi")))["overlap_blocks"] == 0


async def test_a_session_stays_with_its_worker_whatever_its_prompts() -> None:
    environment = {"DYN_ROUTER_SESSION_AFFINITY_TTL_SECS": "600"}
    async with hosted_graph(config(), HostOptions(environment)) as opened:
        session = {"x-dynamo-session-id": "one"}
        bound = [
            await decided(opened.graph, [ChatMessage(role="user", content=f"{n}" * 999)], session) for n in range(6)
        ]
        assert len({one["worker_id"] for one in bound}) == 1
        free = [await decided(opened.graph, [ChatMessage(role="user", content=f"free {n} " * 150)]) for n in range(6)]
        assert len({one["worker_id"] for one in free}) > 1


async def test_the_metrics_show_what_is_routed_and_no_worker_that_is_gone() -> None:
    telemetry = Telemetry()
    async with hosted_graph(config(), HostOptions(metrics=telemetry.component_metrics)) as opened:
        gauge = 'worker_active_decode_blocks{{dp_rank="0",worker_id="{:x}"'
        workers = [gauge.format(worker.worker_id) for worker in opened.workers]
        before = telemetry.text().decode()
        assert all(worker in before for worker in workers)
        assert re.search(r"router_requests_total{[^}]*} 0\.0", before)
        await decided(opened.graph, conversation("hi"))
        assert opened.workers[0].served is not None
        await opened.workers[0].served.withdraw()
        text = telemetry.text().decode()
        assert re.search(r"router_requests_total{[^}]*} 1\.0", text)
        assert re.search(r'kv_cache_events_applied{[^}]*event_type="stored"[^}]*status="ok"[^}]*} [1-9]', text)
        assert [worker in text for worker in workers] == [False, True, True, True]


@pytest.mark.parametrize("enabled", [True, False])
async def test_a_prompt_cached_at_its_decode_worker_skips_the_prefill_workers_if_the_settings_allow_it(
    enabled: bool,
) -> None:
    settings = KvRouterConfig(conditional_disagg_enabled=enabled, use_kv_events=False)
    async with hosted_graph(config(prefill_workers=1, kv_router=settings), HostOptions()) as opened:
        skipped = []
        for _ in range(2):
            request = ChatCompletionRequest(model="echo", messages=conversation("hi"), max_tokens=4)
            async with await opened.graph.generate(Context(request)) as stream:
                items = [item async for item in stream]
            assert sum(len(item.data.token_ids) for item in items if item.data is not None) == 4
            skipped.append(items[0].event == "x-bypass-remote-prefill")
        assert skipped == [False, enabled]


async def test_a_worker_that_is_gone_is_not_chosen_for_what_it_had_cached() -> None:
    async with hosted_graph(config(), HostOptions()) as opened:
        first = await decided(opened.graph, conversation("hi"))
        (holder,) = [worker for worker in opened.workers if worker.worker_id == first["worker_id"]]
        assert holder.served is not None
        await holder.served.withdraw()
        second = await decided(opened.graph, conversation("hi"))
        assert second["worker_id"] != first["worker_id"]
        assert second["overlap_blocks"] == 0
