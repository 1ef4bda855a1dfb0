"""Leases of the KV blocks of prompts that one vLLM server has computed for another."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from engines.upstream import MooncakePush, kv_connector
from pipeline import WorkerOverloaded
from tests.engines.upstream.handover_worlds import (
    Blocks,
    FakeBootstrap,
    FakeHalf,
    answer_of,
    bodies,
    decode_of,
    halves,
    prefill_of,
    vllm_world,
)
from tests.engines.upstream.worlds import all_running, continued, prompt, tokens_of

PROMPT = [5, 6, 7]


async def right_answer(graph: Any) -> None:
    assert tokens_of(await answer_of(graph, prompt(5))) == continued(PROMPT, 5)


async def test_decode_that_queues_longer_than_the_lease_is_right_where_its_server_renews_it() -> None:
    async with vllm_world(lease_s=6.0, decode={"queue_s": 60.0}) as halved:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):  # each has a lease of its own
                tasks.start_soon(right_answer, halved.graph)
        assert len(bodies(halved.decode)) == 3
        await halved.idle()


async def test_a_decode_server_that_takes_no_request_before_the_lease_ends_is_overloaded() -> None:
    async with vllm_world(lease_s=6.0, decode={"accept_s": 60.0}) as halved:
        with anyio.fail_after(7.0), pytest.raises(WorkerOverloaded):
            await answer_of(halved.graph, prompt(5))
        await halved.idle()


async def test_a_lease_that_ends_before_the_first_token_is_an_error_and_no_wrong_answer() -> None:
    connector, slow = MooncakePush(6.0), {"queue_s": 60.0, "renews": False}
    async with vllm_world(connector, kind=FakeBootstrap, lease_s=6.0, decode=slow) as halved:
        with anyio.fail_after(7.0), pytest.raises(WorkerOverloaded):
            await answer_of(halved.graph, prompt(5))
        await halved.idle()
        assert len(connector.leases) == 0


async def test_a_request_whose_lease_has_ended_starts_again_with_its_prefill_and_another_decode() -> None:
    blocks, connector = Blocks(6.0), kv_connector("nixl", 6.0)
    prefill, slow, fast = (FakeHalf(blocks=blocks, accept_s=accept_s) for accept_s in (0.0, 60.0, 0.0))
    async with all_running(prefill, slow, fast):
        then = [decode_of(one, number, connector) for number, one in enumerate((slow, fast), 2)]
        async with halves([prefill_of(prefill, 1, connector)], [*then], migrations=3) as graph:
            for _ in range(2):
                assert tokens_of(await answer_of(graph.graph, prompt(5))) == continued(PROMPT, 5)
        await anyio.sleep(1.5)
        assert len(bodies(prefill)) == 3
        assert blocks.count == 0


async def test_an_offer_is_forgotten_by_the_end_of_its_answer() -> None:
    connector = MooncakePush()  # that of NIXL is forgotten when it is renewed
    async with vllm_world(connector, kind=FakeBootstrap) as halved:
        await answer_of(halved.graph, prompt(5))
        assert len(connector.leases) == 0
