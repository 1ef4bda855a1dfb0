"""Which worker prefills, where decode meets it, what errors become: the decisions of PrefillRouter, as tables."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators import AllBusy
from operators.kv import QueueRejected
from operators.prefill import PrefillError, PrefillNotActivated, PrefillSettings
from operators.prefill.errors import backpressure, reservation_error, routing_error
from operators.prefill.plan import (
    ROOM_MAX,
    bootstrap_endpoint,
    bootstrap_from_params,
    bootstrap_room,
    resolve,
)
from operators.prefill.pool import PrefillWorker, named_worker
from pipeline import CannotConnect, InvalidArgument, ResourceExhausted
from pipeline import Unavailable as NobodyThere
from pipeline.errors import may_migrate
from pipeline.protocols import (
    BootstrapInfo,
    PreprocessedRequest,
    RoutingHints,
)
from pipeline.protocols.card import DisaggregatedEndpoint, ModelRuntimeConfig

W = PrefillWorker(7, 1)


def meeting(host: str | None = "h", port: int | None = 9000, size: int = 4) -> ModelRuntimeConfig:
    return ModelRuntimeConfig(disaggregated_endpoint=DisaggregatedEndpoint(host, port), data_parallel_size=size)


# -- which worker prefills


@pytest.mark.parametrize(
    ("config", "where"),
    [
        (meeting(), ("h", 9000)),
        (None, None),
        (ModelRuntimeConfig(), None),
        (meeting(host=None), None),
        (meeting(host=""), None),
        (meeting(port=None), None),
    ],
)
def test_decode_meets_a_worker_whose_settings_name_the_whole_meeting_point(config: Any, where: Any) -> None:
    plan = resolve(PreprocessedRequest([1]), W, {} if config is None else {7: config}, Random(1))
    bootstrap = plan.bootstrap
    assert plan.worker == W
    assert (bootstrap and (bootstrap.bootstrap_host, bootstrap.bootstrap_port)) == where
    assert plan.request.bootstrap_info == bootstrap
    assert plan.request.routing == RoutingHints(prefill_worker_id=7, prefill_dp_rank=1, dp_rank=1)
    assert bootstrap is None or bootstrap.bootstrap_room % 4 == 1


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        (None, None),
        (RoutingHints(), None),
        (RoutingHints(backend_instance_id=3), None),
        (RoutingHints(prefill_worker_id=7), PrefillWorker(7)),
        (RoutingHints(prefill_worker_id=7, dp_rank=2), PrefillWorker(7, 2)),
        (RoutingHints(prefill_worker_id=7, dp_rank=2, prefill_dp_rank=0), PrefillWorker(7, 0)),
    ],
)
def test_a_named_worker_has_the_rank_named_for_prefill_else_for_all(hints: Any, expected: Any) -> None:
    assert named_worker(hints) == expected


# -- where they meet


@pytest.mark.parametrize(
    ("rank", "size", "draw", "expected"),
    [(None, None, 12345, 12345), (3, None, 12345, 12345), (None, 8, 12345, 12345), (0, 0, 12345, 12345)],
)
def test_without_rank_and_size_the_room_is_what_was_drawn(rank: Any, size: Any, draw: int, expected: int) -> None:
    assert bootstrap_room(rank, size, draw) == expected


@given(
    size=st.integers(1, 2**32 - 1),
    data=st.data(),
    draw=st.one_of(st.integers(0, ROOM_MAX), st.sampled_from([ROOM_MAX])),
)
def test_the_room_contains_the_rank_and_has_63_bits(size: int, data: Any, draw: int) -> None:
    rank = data.draw(st.integers(0, size - 1))
    room = bootstrap_room(rank, size, draw)
    assert 0 <= room <= 2**63 - 1
    assert room % size == rank
    assert room == bootstrap_room(rank, size, draw)


@pytest.mark.parametrize("rank", range(32, 48))
def test_the_largest_draw_stays_within_63_bits(rank: int) -> None:
    room = bootstrap_room(rank, 48, 2**63 - 1)
    assert room < 2**63
    assert room % 48 == rank


def test_a_worker_of_which_nothing_is_known_has_no_meeting_point() -> None:
    assert bootstrap_endpoint(None) is None


MEETING = {"bootstrap_host": "10.0.0.5", "bootstrap_port": 12345, "bootstrap_room": 987654321}


def test_a_prefill_worker_may_send_the_meeting_point_itself() -> None:
    assert bootstrap_from_params({**MEETING, "worker_id": {}}) == BootstrapInfo("10.0.0.5", 12345, 987654321)


@pytest.mark.parametrize(
    "params",
    [
        *({k: v for k, v in MEETING.items() if k != missing} for missing in MEETING),
        {**MEETING, "bootstrap_port": 70000},
        {**MEETING, "bootstrap_port": -1},
        {**MEETING, "bootstrap_port": True},
        {**MEETING, "bootstrap_port": "12345"},
        {**MEETING, "bootstrap_room": 2**64},
        {**MEETING, "bootstrap_host": 5},
        None,
        "text",
        [MEETING],
    ],
)
def test_an_incomplete_meeting_point_is_none(params: Any) -> None:
    assert bootstrap_from_params(params) is None


# -- errors


def test_backpressure_reports_the_figures_and_when_to_retry() -> None:
    error = backpressure(QueueRejected(limit_kind="raw_isl_tokens", current=900, limit=800))
    assert error.message == (
        "router backpressure during prefill resolve: raw_isl_tokens (queued_isl_tokens=900, max_queued_isl_tokens=800)"
    )
    crowded = backpressure(QueueRejected(policy_class="a", limit_kind="requests", current=5, limit=5))
    assert "requests at 5 of 5 (queued_isl_tokens=None, max_queued_isl_tokens=None)" in crowded.message
    busy = backpressure(AllBusy("all busy", retry_after_s=3, status=503))
    assert isinstance(busy, AllBusy)
    assert (busy.retry_after_s, busy.status) == (3, 503)
    assert busy.message.startswith("router backpressure during prefill resolve: all busy")


def test_a_prefill_error_is_what_its_cause_is() -> None:
    assert (error := routing_error(CannotConnect("gone"))).facts == CannotConnect().facts
    assert may_migrate(error)
    assert not may_migrate(routing_error(NobodyThere("nobody")))
    assert routing_error(InvalidArgument("no")).facts.status == 400
    assert PrefillError("alone").facts.status == 500
    for refusal in (QueueRejected(), AllBusy("all busy")):
        assert isinstance(routing_error(refusal), ResourceExhausted)
    assert isinstance(routing_error(ResourceExhausted("a worker's own")), PrefillError)
    assert isinstance(reservation_error(ResourceExhausted("all overloaded")), ResourceExhausted)
    assert isinstance(reservation_error(NobodyThere("nobody")), PrefillError)
    assert PrefillNotActivated().facts.status == 503
    assert str(PrefillNotActivated()) == "Prefill router not yet activated"


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefills_max": 0},
        *(
            {name: value}
            for name in ("prefill_timeout_s", "decode_patience_s", "drain_timeout_s")
            for value in (-1.0, math.inf)
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        PrefillSettings(**wrong)
    assert caught.value.field in wrong
