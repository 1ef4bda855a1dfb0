"""Delivery: tokens that wait for their reader are one chunk, the same answer as tokens that come apart."""

from __future__ import annotations

import anyio
import pytest
from attrs import evolve

from engines.torch import Drawn, News
from engines.torch.delivery import Delivery
from pipeline import Control
from pipeline.errors import BackendUnknown
from pipeline.protocols import FinishReason, LLMEngineOutput
from tests.engines.answers import shown

from .worlds import order


def drawn(token_id: int) -> Drawn:
    return Drawn(token_id, -0.1 * token_id, 3, ((7, -0.05), (8, -0.06)))


async def read(delivery: Delivery, pause_s: float = 0.0) -> list[LLMEngineOutput]:
    found = []
    async for chunk in delivery.chunks():
        found.append(chunk)
        await anyio.sleep(pause_s)
    return found


async def answered(choices: int, reader_pause_s: float) -> list[LLMEngineOutput]:
    wanted = order([1, 2], n=choices)
    delivery = Delivery(evolve(wanted, sampling=evolve(wanted.sampling, logprobs=2)), Control())
    found: list[LLMEngineOutput] = []

    async def collect() -> None:
        found.extend(await read(delivery, reader_pause_s))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect)
        for token in range(20):
            await anyio.sleep(0.01)
            for choice in delivery.choices:
                is_last = token == 19
                news = News(choice, drawn(token + choice.index))
                choice.receive(evolve(news, finish=FinishReason.STOP, stop_id=token) if is_last else news)
    return found


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_late_reader_gets_the_same_answer_in_fewer_chunks(choices: int) -> None:
    apart, together = await answered(choices, 0.0), await answered(choices, 0.055)
    assert shown(apart) == shown(together)
    assert len(apart) == 20 * choices
    assert len(together) < 10 * choices
    for chunks in (apart, together):
        assert [chunk.completion_usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        usage = chunks[-1].completion_usage
        assert usage is not None
        assert usage.completion_tokens == 20 * choices


async def test_an_error_comes_behind_the_tokens_that_wait() -> None:
    delivery = Delivery(order([1, 2]), Control())
    (choice,) = delivery.choices
    choice.receive(News(choice, Drawn(5)))
    choice.receive(News(choice, Drawn(6)))
    choice.receive(News(choice, error=BackendUnknown("broke")))
    chunks = delivery.chunks()
    assert (await anext(chunks)).token_ids == [5, 6]
    with pytest.raises(BackendUnknown):
        await anext(chunks)


async def test_a_stop_counts_the_tokens_that_were_yielded_only() -> None:
    control = Control()
    delivery = Delivery(order([1, 2]), control)
    (choice,) = delivery.choices
    choice.receive(News(choice, Drawn(5)))
    chunks = delivery.chunks()
    first = await anext(chunks)
    choice.receive(News(choice, Drawn(6)))
    control.stop()
    last = await anext(chunks)
    assert first.token_ids == [5]
    assert (last.token_ids, last.finish_reason) == ([], FinishReason.CANCELLED)
    assert last.completion_usage is not None
    assert last.completion_usage.completion_tokens == 1
    await chunks.aclose()


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_offered_tokens_that_are_taken_are_counted_and_the_end_is_yielded(logprobs: int | None) -> None:
    offered: list[int] = []

    def offer(token_id: int) -> bool:
        offered.append(token_id)
        return token_id != 7

    wanted = order([1, 2])
    wanted = evolve(wanted, sampling=evolve(wanted.sampling, logprobs=logprobs))
    delivery = Delivery(wanted, Control(), offer_token=offer)
    (choice,) = delivery.choices
    found: list[LLMEngineOutput] = []

    async def collect() -> None:
        found.extend(await read(delivery))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect)
        for token_id in (5, 6, 7, 8):
            await anyio.sleep(0.01)
            choice.receive(News(choice, Drawn(token_id)))
        await anyio.sleep(0.01)
        choice.receive(News(choice, Drawn(9), finish=FinishReason.STOP))
    if logprobs is None:
        assert offered == [5, 6, 7, 8]
        assert [chunk.token_ids for chunk in found] == [[7], [9]]
    else:
        assert offered == []
        assert [chunk.token_ids for chunk in found] == [[5], [6], [7], [8], [9]]
    usage = found[-1].completion_usage
    assert usage is not None
    assert usage.completion_tokens == 5
