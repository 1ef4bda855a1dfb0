"""Exchange: what is left of a request that is cancelled, however early."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engines.upstream import Address, Client, Exchange
from pipeline import Cancelled, Control
from tests.engines.upstream.worlds import URL, fake_vllm


@pytest.mark.parametrize("turns", range(12))
async def test_a_request_cancelled_at_any_turn_leaves_no_connection_open(turns: int) -> None:
    async with fake_vllm(token_s=10.0) as server:
        client = Client(Address.parse(URL), 60.0, server.transport)

        async def send() -> None:
            body = b'{"token_ids": [5], "sampling_params": {"max_tokens": 3}, "stream": true}'
            async with Exchange(client, Control()) as exchange:
                await exchange.send("POST", "/inference/v1/generate", {}, body)
                await exchange.read()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            for _ in range(turns):
                await checkpoint()
            tasks.cancel_scope.cancel()
        await anyio.sleep(0.1)
        assert server.open == 0
        await client.aclose()


async def test_an_exchange_can_be_closed_while_no_read_waits() -> None:
    async with fake_vllm() as server:
        client, control = Client(Address.parse(URL), 60.0, server.transport), Control()
        async with Exchange(client, control) as exchange:
            body = b'{"token_ids": [5], "sampling_params": {"max_tokens": 900}, "stream": true}'
            assert await exchange.send("POST", "/inference/v1/generate", {}, body) == 200
            await exchange.read()
            await exchange.close()
            await anyio.sleep(0.1)
            assert server.open == 0
            assert server.running == {}
            with pytest.raises(Cancelled):
                await exchange.read()
        await client.aclose()
