"""A due request as a graph takes it."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from engines.mocker import RecordedOutputs
from pipeline import Context
from pipeline.protocols import PreprocessedRequest
from serving.replay import Schedule, Trace
from serving.replay.driver import request_of

from .worlds import TraceOf


def first(trace: Trace) -> Context[PreprocessedRequest]:
    return request_of(Schedule.closed_loop(trace, 1).take_due(0)[0])


def row(**fields: Any) -> dict[str, Any]:
    return {"hash_ids": [4, 5], "output_length": 2, "input_length": 3, **fields}


def test_it_wants_exactly_the_tokens_of_the_trace_under_its_name(trace_of: TraceOf) -> None:
    context = first(trace_of(row(), trace_block_size=2))
    request = context.payload
    assert (context.id, context.metadata, request.model) == ("line:0", {}, "")
    assert request.token_ids == [4, 4, 5]
    assert (request.stop_conditions.max_tokens, request.stop_conditions.min_tokens) == (2, 2)
    assert request.stop_conditions.ignore_eos
    assert (request.routing, request.annotations) == (None, [])


@pytest.mark.parametrize("vocabulary", [None, range(100, 200)])
def test_its_prompt_may_be_an_array(vocabulary: range | None, trace_of: TraceOf) -> None:
    trace = trace_of(row(), trace_block_size=2)
    trace = trace if vocabulary is None else trace.with_vocabulary(vocabulary)
    due = Schedule.closed_loop(trace, 1).take_due(0)[0]
    packed = request_of(due, is_packed=True).payload.token_ids
    assert isinstance(packed, array)
    assert (packed.typecode, packed.tolist()) == ("I", request_of(due).payload.token_ids)


def test_it_carries_the_hints_of_the_trace(trace_of: TraceOf) -> None:
    context = first(trace_of(row(session_id="s", priority=-3, strict_priority=2, policy_class="batch")))
    assert context.metadata == {"X-Dynamo-Session-ID": "s", "policy-class": "batch"}
    routing = context.payload.routing
    assert routing is not None
    assert (routing.priority, routing.priority_jump, routing.strict_priority) == (-3, 0.0, 2)


def test_a_recorded_answer_is_found_for_it(trace_of: TraceOf) -> None:
    trace = trace_of(row(session_id="s", output_token_ids=[8, 9]))
    (turn,) = trace.sessions[0].turns
    assert turn.recorded is not None
    context = first(trace)
    assert RecordedOutputs({turn.name: turn.recorded}).find(context.payload, "another id") == turn.recorded
