"""BootstrapFields: where both legs of a request meet on SGLang's servers."""

from typing import Any

import pytest

from engines.upstream.connectors import FAKE_BOOTSTRAP_HOST, BootstrapFields
from pipeline import InvalidArgument
from pipeline.protocols import BootstrapInfo, PrefillResult, PreprocessedRequest, SamplingOptions

MEETING = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 42}


def request(**fields: Any) -> PreprocessedRequest:
    return PreprocessedRequest([1, 2, 3], **fields)


def test_both_legs_carry_the_meeting_point_of_the_request() -> None:
    info = BootstrapInfo("10.0.0.1", 8998, 42)
    assert BootstrapFields.of(request(bootstrap_info=info)).plain() == MEETING


def test_decode_finds_the_meeting_point_in_the_parameters_of_its_prefill() -> None:
    assert BootstrapFields.of(request(prefill_result=PrefillResult(MEETING))).plain() == MEETING


def test_a_probe_meets_no_other_server() -> None:
    assert BootstrapFields.of(request(is_probe=True)).bootstrap_host == FAKE_BOOTSTRAP_HOST


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prefill_result": PrefillResult(None)},
        {"prefill_result": PrefillResult({"bootstrap_host": "h"})},
        {"prefill_result": PrefillResult(MEETING | {"bootstrap_port": "8998"})},
        {"prefill_result": PrefillResult(MEETING | {"bootstrap_room": True})},
    ],
)
def test_a_request_without_a_meeting_point_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        BootstrapFields.of(request(**fields))
    assert refused.value.field == "bootstrap_info"


@pytest.mark.parametrize("room", [-1, 2**63])
def test_a_room_that_the_server_cannot_read_is_refused(room: int) -> None:
    with pytest.raises(InvalidArgument, match="from 0 to 9223372036854775807"):
        BootstrapFields.of(request(bootstrap_info=BootstrapInfo("h", 1, room)))


def test_a_prompt_that_another_server_computes_has_one_choice() -> None:
    info = BootstrapInfo("h", 1, 2)
    with pytest.raises(InvalidArgument) as refused:
        BootstrapFields.of(request(bootstrap_info=info, sampling_options=SamplingOptions(n=2)))
    assert refused.value.field == "n"
