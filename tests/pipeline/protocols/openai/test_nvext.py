"""The extension object: fields of a request, headers that override them, what a response carries."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import fields

from pipeline.errors import InvalidArgument
from pipeline.protocols import RouterChoice
from pipeline.protocols.openai import AgentHints, NvExt, NvExtResponse, apply_headers, effective_cache_salt
from pipeline.protocols.output import PromptLogprobEntry
from pipeline.protocols.timing import RouterDecision, TimingInfo, WorkerIdInfo
from pipeline.wire import from_plain, to_plain


def test_primary_headers_win_over_their_aliases_and_the_body() -> None:
    headers = {
        "X-Dynamo-Worker-Instance-Id": "1",
        "x-worker-instance-id": "2",
        "x-dynamo-prefill-instance-id": "3",
        "x-prefill-instance-id": "4",
        "x-dynamo-dp-rank": "5",
        "x-dp-rank": "6",
        "x-data-parallel-rank": "7",
        "x-dynamo-prefill-dp-rank": "8",
        "x-prefill-dp-rank": "9",
    }
    body = NvExt(backend_instance_id=90, decode_worker_id=91, dp_rank=92, cache_salt="kept")
    assert apply_headers(body, headers) == NvExt(
        backend_instance_id=1, decode_worker_id=1, prefill_worker_id=3, dp_rank=5, prefill_dp_rank=8, cache_salt="kept"
    )
    assert body.backend_instance_id == 90


@pytest.mark.parametrize(
    ("header", "changed"),
    [
        ("x-worker-instance-id", {"backend_instance_id": 7, "decode_worker_id": 7}),
        ("x-prefill-instance-id", {"prefill_worker_id": 7}),
        ("x-dp-rank", {"dp_rank": 7}),
        ("x-data-parallel-rank", {"dp_rank": 7}),
        ("x-prefill-dp-rank", {"prefill_dp_rank": 7}),
    ],
)
def test_an_alias_alone_counts(header: str, changed: dict[str, int]) -> None:
    assert apply_headers(None, {header: " 7 "}) == from_plain(changed, NvExt)


def test_priority_headers_override_field_by_field() -> None:
    body = NvExt(agent_hints=AgentHints(priority=1, strict_priority=2, osl=9))
    merged = apply_headers(body, {"x-dynamo-request-priority": "-3"})
    assert merged == NvExt(agent_hints=AgentHints(priority=-3, strict_priority=2, osl=9))
    assert apply_headers(None, {"x-dynamo-request-strict-priority": "4"}) == NvExt(
        agent_hints=AgentHints(strict_priority=4)
    )


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-other": "1"},
        {"x-tenant-id": "  "},
        {"x-dynamo-prefill-dp-rank": "4294967295"},
        {"x-dynamo-worker-instance-id": "-1"},
        {"x-dynamo-worker-instance-id": "1_0"},
        {"x-dynamo-worker-instance-id": str(2**64)},
        {"x-dynamo-dp-rank": "4294967296"},
        {"x-dynamo-request-priority": "high"},
        {"x-dynamo-request-strict-priority": "-1"},
        {"x-dynamo-dp-rank": "\u0664"},
    ],
)
@pytest.mark.parametrize("body", [None, NvExt(dp_rank=3, prefill_dp_rank=4, cache_salt="s")])
def test_an_unreadable_header_changes_nothing(body: NvExt | None, headers: dict[str, str]) -> None:
    assert apply_headers(body, headers) is body


def test_the_tenant_is_the_cache_salt() -> None:
    assert apply_headers(NvExt(cache_salt="body"), {"x-tenant-id": "t"}) == NvExt(cache_salt="t")


@pytest.mark.parametrize(
    ("plain", "place"),
    [
        ({"unknown": 1}, "unknown"),
        ({"agent_context": {"session_id": "s"}}, "agent_context"),
        ({"session_control": {}}, "session_control"),
        ({"agent_hints": {"priorities": 1}}, "agent_hints.priorities"),
        ({"metadata_upload": {"url": "http://a", "method": "PUT"}}, "metadata_upload.method"),
        ({"metadata_upload": {"url": "  "}}, "metadata_upload.url"),
        ({"router": {"ttft_target": 1, "x": 1}}, "router.x"),
        ({"agent_hints": {"priority": 2**31}}, "agent_hints.priority"),
    ],
)
def test_an_unknown_key_is_refused(plain: Any, place: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_plain(plain, NvExt)
    assert refused.value.field == place


def test_nothing_set_is_nothing_written() -> None:
    assert to_plain(NvExt()) == {}
    assert to_plain(NvExtResponse()) == {}


def test_an_upload_url_is_trimmed() -> None:
    read = from_plain({"metadata_upload": {"url": " http://a \n"}}, NvExt)
    assert to_plain(read) == {"metadata_upload": {"url": "http://a"}}


@pytest.mark.parametrize(
    ("nvext", "top_level", "salt"),
    [
        (None, "top", "top"),
        (NvExt(cache_salt="ext"), "top", "ext"),
        (NvExt(cache_salt=""), "top", "top"),
        (NvExt(cache_salt=""), "", None),
        (NvExt(), None, None),
        (None, None, None),
    ],
)
def test_the_extensions_salt_wins_and_empty_is_none(
    nvext: NvExt | None, top_level: str | None, salt: str | None
) -> None:
    assert effective_cache_salt(nvext, top_level) == salt


@pytest.mark.parametrize(
    ("hints", "jump"),
    [
        (AgentHints(priority=5, latency_sensitivity=0.5), 5.0),
        (AgentHints(priority=-3), 0.0),
        (AgentHints(priority=0, latency_sensitivity=0.5), 0.0),
        (AgentHints(latency_sensitivity=0.5), 0.5),
        (AgentHints(), None),
    ],
)
def test_the_priority_jump_is_the_priority_else_the_sensitivity(hints: AgentHints, jump: float | None) -> None:
    assert hints.priority_jump() == jump


FULL = NvExtResponse(
    worker_id=WorkerIdInfo(1),
    timing=TimingInfo(1),
    token_ids=[1],
    routed_experts=[2],
    engine_data={"a": 1},
    stop_reason="s",
    completion_token_ids=[3],
    prompt_logprobs=[{1: PromptLogprobEntry(-0.5)}],
    router_decision=RouterDecision(RouterChoice("cost", 4, 1.0, 2.0, 3, 4.5), attempts=1),
)
ALL = frozenset(field.name for field in fields(NvExtResponse))


@pytest.mark.parametrize(
    ("finished", "choices", "held_back"),
    [
        (True, 1, set[str]()),
        (False, 1, {"timing", "prompt_logprobs"}),
        (True, 2, {"completion_token_ids"}),
        (False, 2, {"timing", "prompt_logprobs", "completion_token_ids"}),
    ],
)
def test_fields_are_sent_only_when_their_time_has_come(finished: bool, choices: int, held_back: set[str]) -> None:
    chosen = FULL.select(ALL, finished=finished, choices=choices)
    assert chosen is not None
    assert to_plain(chosen).keys() == ALL - held_back


@pytest.mark.parametrize(
    ("request_ext", "wanted"),
    [
        (NvExt(), set[str]()),
        (NvExt(annotations=["token_ids"]), set[str]()),
        (NvExt(extra_fields=["timing"]), {"timing"}),
        (NvExt(annotations=["query_instance_id:decode"]), {"worker_id", "token_ids"}),
    ],
)
def test_only_requested_fields_are_sent(request_ext: NvExt, wanted: set[str]) -> None:
    chosen = FULL.select(request_ext.wanted_response_fields(), finished=True)
    assert (set() if chosen is None else set(to_plain(chosen))) == wanted


def test_nothing_selected_is_no_extension_at_all() -> None:
    assert NvExtResponse().select(ALL, finished=True) is None
    assert FULL.select(frozenset({"timing"}), finished=False) is None


def test_merging_joins_completion_tokens_and_else_keeps_the_last() -> None:
    first = NvExtResponse(completion_token_ids=[1], stop_reason="a", engine_data={"x": 1})
    assert first.merge(NvExtResponse(completion_token_ids=[2, 3], stop_reason=4)) == NvExtResponse(
        completion_token_ids=[1, 2, 3], stop_reason=4, engine_data={"x": 1}
    )
    assert NvExtResponse().merge(first) == first == first.merge(NvExtResponse())
