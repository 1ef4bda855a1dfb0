"""What a prefill worker hands over is opaque to every stage: it crosses two request planes without a change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Annotated, Context, function_engine
from pipeline.errors import CodecError, InvalidArgument
from pipeline.protocols import LLMEngineOutput, PrefillResult, PreprocessedRequest
from pipeline.testing import run_in_virtual_time
from pipeline.wire import to_plain
from tests.pipeline.network.worlds import deployment

PREFILL, DECODE = "ns/prefill/generate", "ns/decode/generate"
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
PARAMS = st.recursive(
    LEAVES,
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text("ab_/\u00e9\0", max_size=4), parts),
    max_leaves=12,
)


async def _handed_over(every: list[Any]) -> list[Any]:
    """Return what decode receives of these parameters, by way of a front end; a process each."""
    received: list[Any] = []

    async def prefill(request: PreprocessedRequest) -> AsyncIterator[Annotated[LLMEngineOutput]]:
        yield Annotated(data=LLMEngineOutput([1], disaggregated_params=every[request.token_ids[0]]))

    async def decode(request: PreprocessedRequest) -> AsyncIterator[Annotated[LLMEngineOutput]]:
        assert request.prefill_result is not None
        received.append(request.prefill_result.disaggregated_params)
        yield Annotated(data=LLMEngineOutput.stop())

    async with deployment() as world, world.runtime() as first, world.runtime() as second, world.runtime() as front:
        await first.serve(PREFILL, function_engine(prefill), instance_id=1)
        await second.serve(DECODE, function_engine(decode), instance_id=2)
        pools = [front.workers(path, Annotated[LLMEngineOutput]) for path in (PREFILL, DECODE)]
        for pool in pools:
            await pool.wait_for_instances()
        for number in range(len(every)):
            stream = await pools[0].engine(1).generate(Context(PreprocessedRequest([number])))
            (item,) = await stream.collect()
            assert item.data is not None
            request = PreprocessedRequest([number], prefill_result=PrefillResult(item.data.disaggregated_params))
            await (await pools[1].engine(2).generate(Context(request))).collect()
    return received


def _same(one: Any, other: Any) -> bool:
    """Whether both are equal, their kinds included: 1, 1.0 and True differ."""
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


@given(st.lists(PARAMS, min_size=1, max_size=5))
def test_any_parameters_arrive_as_they_were(every: list[Any]) -> None:
    async def main() -> None:
        received = await _handed_over(every)
        assert len(received) == len(every)
        assert all(map(_same, every, received))

    run_in_virtual_time(main)


async def test_numbers_at_the_ends_of_their_ranges_arrive_as_they_were() -> None:
    every = [[2**64 - 1, -(2**63), 1e308, -0.0, inf, 5e-324], {"": {"": []}}, b"\xff" * 70_000, "\U0001f600\0"]
    assert all(map(_same, every, await _handed_over(every)))
    (number,) = await _handed_over([nan])
    assert number != number


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, object()])
async def test_what_has_no_form_on_the_wire_is_a_typed_error(value: Any) -> None:
    with pytest.raises((CodecError, InvalidArgument)):
        await _handed_over([{"params": value}])


def test_they_are_shared_with_the_record_not_copied() -> None:
    params = {"kv_transfer_params": {"remote_block_ids": [[1, 2], [3]]}}
    assert to_plain(PrefillResult(params))["disaggregated_params"] is params
