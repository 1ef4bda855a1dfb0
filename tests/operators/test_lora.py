"""LoraAdapter: which adapter a request goes to, and where that is."""

from __future__ import annotations

import pytest
from attrs import evolve

from operators import LoraAdapter
from pipeline import Annotated, Context, Unavailable
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, RoutingHints
from pipeline.testing import ScriptedEngine, check_operator

REQUEST = PreprocessedRequest([1], model="french")


async def test_it_holds_the_operator_contract() -> None:
    items = [Annotated(LLMEngineOutput([n])) for n in range(40)]
    await check_operator(lambda: LoraAdapter("french", lambda: {7}), request=REQUEST, items=items)


@pytest.mark.parametrize(
    ("own", "found"),
    [
        (None, RoutingHints(lora_name="french", allowed_worker_ids={7, 8})),
        (RoutingHints(priority=3), RoutingHints(lora_name="french", allowed_worker_ids={7, 8}, priority=3)),
        (RoutingHints(allowed_worker_ids={8, 9}), RoutingHints(lora_name="french", allowed_worker_ids={8})),
    ],
)
async def test_a_request_names_the_adapter_and_the_workers_that_have_it(
    own: RoutingHints | None, found: RoutingHints
) -> None:
    engine, sent = ScriptedEngine([]), evolve(REQUEST, routing=own)
    before = None if own is None else evolve(own)
    await (await (LoraAdapter("french", lambda: {7, 8}) >> engine).generate(Context(sent))).collect()
    assert engine.requests[0].payload.routing == found
    assert sent.routing == before


@pytest.mark.parametrize(("workers", "allowed"), [(set[int](), None), ({7}, {8})])
async def test_an_adapter_that_no_worker_has_is_unavailable(workers: set[int], allowed: set[int] | None) -> None:
    hints = None if allowed is None else RoutingHints(allowed_worker_ids=allowed)
    engine = ScriptedEngine([])
    with pytest.raises(Unavailable, match="no worker has the adapter 'french' now"):
        await (LoraAdapter("french", lambda: workers) >> engine).generate(Context(evolve(REQUEST, routing=hints)))
    assert engine.requests == []


async def test_the_workers_are_those_of_the_moment() -> None:
    workers, engine = {7}, ScriptedEngine([])
    graph = LoraAdapter("french", lambda: workers) >> engine
    for worker_id in (8, 9):
        workers.add(worker_id)
        await (await graph.generate(Context(REQUEST))).collect()
    assert [one.payload.routing.allowed_worker_ids for one in engine.requests] == [{7, 8}, {7, 8, 9}]
