"""Roles: their names, what they publish and need, and their demands on a request."""

from __future__ import annotations

from typing import Any

import pytest

from engines import DisaggregationMode
from engines.roles import (
    encoder_terminal_chunk,
    enforce_prefill_max_tokens,
    require_encoder_result,
    require_prefill,
    require_prefill_result,
)
from pipeline import InvalidArgument
from pipeline.protocols import (
    BootstrapInfo,
    CompletionUsage,
    FinishReason,
    PrefillResult,
    PreprocessedRequest,
    StopConditions,
)
from pipeline.protocols.card import ModelType, WorkerType
from pipeline.wire import from_plain

AGGREGATED, PREFILL, DECODE, ENCODE = DisaggregationMode
CHAT = ModelType.Chat | ModelType.Completions


@pytest.mark.parametrize(
    ("text", "mode"),
    [("agg", AGGREGATED), ("aggregated", AGGREGATED), ("PREFILL", PREFILL), (" decode ", DECODE), ("Encode", ENCODE)],
)
def test_a_mode_is_read_whatever_its_case_and_blanks(text: str, mode: DisaggregationMode) -> None:
    assert DisaggregationMode.parse(text) is mode


@pytest.mark.parametrize("text", ["", "aggr", "prefill,decode"])
def test_any_other_text_names_no_mode(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        DisaggregationMode.parse(text)
    assert caught.value.field == "disaggregation_mode"


def test_modes_are_shown_short_and_written_in_full() -> None:
    assert [mode.display for mode in DisaggregationMode] == ["agg", "prefill", "decode", "encode"]
    assert [str(mode) for mode in DisaggregationMode] == ["aggregated", "prefill", "decode", "encode"]
    assert all(DisaggregationMode.parse(mode.display) is mode for mode in DisaggregationMode)


def test_only_prefill_workers_are_found_under_their_own_component() -> None:
    assert [mode.component for mode in DisaggregationMode] == ["backend", "prefill", "backend", "backend"]


def test_each_mode_publishes_its_surface_and_role() -> None:
    assert [mode.model_type(CHAT) for mode in DisaggregationMode] == [CHAT, ModelType.Prefill, CHAT, ModelType(0)]
    assert [mode.worker_type for mode in DisaggregationMode] == [WorkerType(mode.value) for mode in DisaggregationMode]


def test_decode_and_encode_workers_have_no_index() -> None:
    assert [mode.may_index for mode in DisaggregationMode] == [True, True, False, False]


@pytest.mark.parametrize(
    ("mode", "needs", "with_encoder"),
    [
        (AGGREGATED, [], [["encode"]]),
        (PREFILL, [["decode"]], [["decode", "encode"]]),
        (DECODE, [["prefill"]], None),
        (ENCODE, [["prefill", "decode"], ["aggregated"]], None),
    ],
)
def test_each_mode_needs_the_other_halves(mode: DisaggregationMode, needs: Any, with_encoder: Any) -> None:
    assert mode.needs() == needs
    if with_encoder is not None:
        assert mode.needs(route_to_encoder=True) == with_encoder
        return
    with pytest.raises(InvalidArgument) as caught:
        mode.needs(route_to_encoder=True)
    assert caught.value.field == "route_to_encoder"


@pytest.mark.parametrize("stop", [{"max_tokens": 100, "min_tokens": 5, "stop": ["x"]}, {}])
def test_prefill_makes_one_token_whatever_the_request_allows(stop: dict[str, Any]) -> None:
    request = PreprocessedRequest([1], stop_conditions=StopConditions(**stop))
    before = StopConditions(**stop)
    limited = enforce_prefill_max_tokens(request)
    assert limited.stop_conditions == StopConditions(max_tokens=1, stop=stop.get("stop"))
    assert request.stop_conditions == before, "the decode worker is given the same record"


def test_prefill_also_limits_a_request_without_a_stop_section() -> None:
    request = from_plain({"token_ids": [1]}, PreprocessedRequest)
    assert enforce_prefill_max_tokens(request).stop_conditions.max_tokens == 1


@pytest.mark.parametrize(
    ("fields", "is_served"),
    [
        ({}, False),
        ({"prefill_result": PrefillResult({})}, True),
        ({"bootstrap_info": BootstrapInfo("host", 1, 2)}, True),
        ({"is_probe": True}, True),
    ],
)
def test_decode_wants_to_know_of_the_prefill_unless_it_is_probed(fields: dict[str, Any], is_served: bool) -> None:
    request = PreprocessedRequest([1], **fields)
    if is_served:
        require_prefill(request)
        return
    with pytest.raises(InvalidArgument) as caught:
        require_prefill(request)
    assert caught.value.field == "prefill_result"


def test_a_missing_prefill_result_is_reported_with_the_mode() -> None:
    result = PrefillResult({"handle": 1})
    assert require_prefill_result(PreprocessedRequest([1], prefill_result=result), DECODE) is result
    with pytest.raises(InvalidArgument, match="decode"):
        require_prefill_result(PreprocessedRequest([1]), DECODE)


@pytest.mark.parametrize("result", [None, [], "text"])
def test_an_encoder_result_is_an_object(result: Any) -> None:
    assert require_encoder_result(PreprocessedRequest([1], encoder_result={})) == {}
    with pytest.raises(InvalidArgument):
        require_encoder_result(PreprocessedRequest([1], encoder_result=result))
    with pytest.raises(InvalidArgument):
        encoder_terminal_chunk(result)


def test_an_encoders_chunk_has_its_result_and_no_tokens() -> None:
    chunk = encoder_terminal_chunk({})
    assert (chunk.token_ids, chunk.index, chunk.finish_reason, chunk.encoder_result) == ([], 0, FinishReason.STOP, {})
    assert chunk.completion_usage is None
    usage = CompletionUsage.of(3, 0)
    assert encoder_terminal_chunk({"a": 1}, usage).completion_usage == usage
