"""The records of a router service, as objects and back."""

from __future__ import annotations

from typing import Any

import pytest

from operators.kv.load import PotentialLoad
from operators.kv.service import (
    BackpressureResponse,
    FreeMarked,
    LoadsRequest,
    LoadsResponse,
    MarkFree,
    MarkPrefill,
    NewRequest,
    NewResponse,
    PrefillMarked,
    QueueRejectedResponse,
    QueueRejection,
    RouterRequest,
    RouterResponse,
)
from pipeline import Annotated, InvalidArgument
from pipeline.protocols import BlockExtraInfo, MmObject, RoutingConstraints
from pipeline.wire import from_json, from_plain, to_json, to_plain


@pytest.mark.parametrize(
    ("record", "plain"),
    [
        (NewRequest(tokens=[1, 2, 3]), {"method": "new", "tokens": [1, 2, 3], "priority_jump": 0.0}),
        (
            NewRequest(
                tokens=[],
                block_mm_infos=[None, BlockExtraInfo([MmObject(7, [(0, 2)])])],
                routing_constraints=RoutingConstraints({"gpu"}, {"fast": 0.5}),
                priority_jump=1.5,
                strict_priority=2,
                lora_name="adapter",
                cache_namespace="tenant",
            ),
            {
                "method": "new",
                "tokens": [],
                "block_mm_infos": [None, {"mm_objects": [{"mm_hash": 7, "offsets": [[0, 2]]}]}],
                "routing_constraints": {"required_taints": ["gpu"], "preferred_taints": {"fast": 0.5}},
                "priority_jump": 1.5,
                "strict_priority": 2,
                "lora_name": "adapter",
                "cache_namespace": "tenant",
            },
        ),
        (LoadsRequest(tokens=[4]), {"method": "potential_loads", "tokens": [4]}),
        (
            LoadsRequest(tokens=[4], lora_name="a", cache_namespace="b"),
            {"method": "potential_loads", "tokens": [4], "lora_name": "a", "cache_namespace": "b"},
        ),
        (MarkPrefill(), {"method": "mark_prefill"}),
        (MarkPrefill(""), {"method": "mark_prefill", "request_id": ""}),
        (MarkFree(), {"method": "mark_free"}),
        (MarkFree("req-123"), {"method": "mark_free", "request_id": "req-123"}),
    ],
)
def test_a_request_is_an_object_with_its_method_and_what_is_set(record: RouterRequest, plain: dict[str, Any]) -> None:
    assert to_plain(record) == plain
    assert from_plain(plain, RouterRequest) == record
    assert from_json(to_json(record), RouterRequest) == record
    assert from_plain(plain, type(record)) == record


@pytest.mark.parametrize(
    ("record", "plain"),
    [
        (NewResponse(2**64 - 1, 3, 4), {"method": "new", "worker_id": 2**64 - 1, "dp_rank": 3, "overlap_blocks": 4}),
        (
            QueueRejectedResponse(QueueRejection("batch", "cached_tokens", 5, 4)),
            {
                "method": "queue_rejected",
                "rejection": {"policy_class": "batch", "limit_kind": "cached_tokens", "current": 5, "limit": 4},
            },
        ),
        (
            BackpressureResponse(512, 256),
            {
                "method": "backpressure",
                "reason": "max_queued_isl_tokens_exceeded",
                "queued_isl_tokens": 512,
                "max_queued_isl_tokens": 256,
            },
        ),
        (PrefillMarked(True), {"method": "prefill_marked", "success": True}),
        (FreeMarked(False), {"method": "free_marked", "success": False}),
        (
            LoadsResponse([PotentialLoad(7, 1, 100, 20, 3)], 2, 90),
            {
                "method": "potential_loads",
                "loads": [
                    {
                        "worker_id": 7,
                        "dp_rank": 1,
                        "potential_prefill_tokens": 100,
                        "potential_decode_blocks": 20,
                        "active_requests": 3,
                    }
                ],
                "pending_count": 2,
                "pending_isl_tokens": 90,
            },
        ),
    ],
)
def test_an_answer_crosses_as_the_item_of_a_stream(record: RouterResponse, plain: dict[str, Any]) -> None:
    assert to_plain(record) == plain
    assert from_json(to_json(Annotated(record)), Annotated[RouterResponse]).data == record


def test_answers_of_older_services_may_leave_fields_out() -> None:
    assert from_plain({"method": "new", "worker_id": 1, "overlap_blocks": 2}, RouterResponse) == NewResponse(1, 0, 2)
    assert from_plain({"method": "potential_loads", "loads": []}, RouterResponse) == LoadsResponse([])


def test_null_is_absent_and_unknown_keys_are_ignored() -> None:
    plain = {"method": "new", "tokens": [1], "lora_name": None, "block_mm_infos": None, "later": 1}
    assert from_plain(plain, RouterRequest) == NewRequest(tokens=[1])
    assert from_plain({"method": "mark_free", "request_id": None}, RouterRequest) == MarkFree()


@pytest.mark.parametrize(
    ("plain", "place"),
    [
        ([], ""),
        ({}, "method"),
        ({"method": "free_marked", "success": True}, "method"),
        ({"method": 5}, "method"),
        ({"method": "new"}, "tokens"),
        ({"method": "potential_loads"}, "tokens"),
        ({"method": "new", "tokens": None}, "tokens"),
        ({"method": "new", "tokens": [1, -1]}, "tokens[1]"),
        ({"method": "new", "tokens": [2**32]}, "tokens[0]"),
        ({"method": "new", "tokens": [1], "strict_priority": -1}, "strict_priority"),
        ({"method": "new", "tokens": [1], "priority_jump": "soon"}, "priority_jump"),
        ({"method": "new", "tokens": [1], "priority_jump": float("inf")}, "priority_jump"),
        ({"method": "new", "tokens": [1], "block_mm_infos": [{}]}, "block_mm_infos[0].mm_objects"),
        (
            {"method": "new", "tokens": [1], "routing_constraints": {"required_taints": 5}},
            "routing_constraints.required_taints",
        ),
        ({"method": "mark_free", "request_id": 5}, "request_id"),
    ],
)
def test_what_is_no_request_is_refused_with_the_place(plain: Any, place: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        from_plain(plain, RouterRequest)
    assert raised.value.field == place
    assert not str(raised.value).startswith(f"{place}: {place}:") or not place


def test_a_kind_reads_only_itself() -> None:
    with pytest.raises(InvalidArgument, match="mark_free"):
        from_plain({"method": "mark_prefill"}, MarkFree)
