"""Swap operators in a test: break the stream, count what is open, let no time pass.

python examples/swap_in_test.py          or, with pytest, as any test
"""

from __future__ import annotations

import anyio
import pytest

from engines import EchoEngine, as_engine
from operators import Detokenize, Model, Preprocess, PushRouter
from pipeline import Context, Disconnected
from pipeline.network import static_workers
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from pipeline.testing import Ending, Faults, Probe, run_in_virtual_time

model = Model.byte_level("echo")
engine = as_engine(EchoEngine(delay_s=1.0))
production = Preprocess(model) >> Detokenize(model) >> PushRouter(static_workers({1: engine}))


async def test_text_before_a_broken_connection_is_delivered_and_nothing_stays_open() -> None:
    probe = Probe()
    graph = production.insert_before(PushRouter, Faults(disconnect_after=3)).insert_before("Faults", probe)
    texts: list[str] = []

    async def read() -> None:
        chat = ChatCompletionRequest(model="echo", messages=[ChatMessage(role="user", content="hello")])
        async with engine, await graph.generate(Context(chat)) as stream:
            async for item in stream:
                if item.data and item.data.text:
                    texts.append(item.data.text)

    with pytest.raises(Disconnected):
        await read()
    assert texts == ["h", "e", "l"]
    assert anyio.current_time() >= 3.0  # three tokens, a second each; none of them waited for
    assert probe.open == 0
    assert probe.endings == [Ending.FAILED]


if __name__ == "__main__":
    run_in_virtual_time(test_text_before_a_broken_connection_is_delivered_and_nothing_stays_open)
    print("passed")
