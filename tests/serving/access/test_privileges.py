"""Fields and headers of a request that need a privilege of its key, and the defaults that a key sets."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.protocols.openai import HEADERS_OF
from serving.access import ALL_PRIVILEGES, Privilege
from serving.http import HttpOptions
from tests.serving.access.worlds import KEY, bearer, guarded, hello, ring
from tests.serving.worlds import chat

FIELDS: list[tuple[Privilege, str, dict[str, Any]]] = [
    *(
        ("pin", f"nvext.{name}", {"nvext": {name: 1}})
        for name in ("backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank")
    ),
    ("pin", "nvext.routing_constraints", {"nvext": {"routing_constraints": {"required_taints": ["a"]}}}),
    ("pin", "nvext.annotations: query_instance_id", {"nvext": {"annotations": ["query_instance_id:"]}}),
    ("priority", "nvext.agent_hints.priority", {"nvext": {"agent_hints": {"priority": 1}}}),
    ("priority", "nvext.agent_hints.strict_priority", {"nvext": {"agent_hints": {"strict_priority": 1}}}),
    ("priority", "nvext.agent_hints.latency_sensitivity", {"nvext": {"agent_hints": {"latency_sensitivity": 1.0}}}),
    ("tenant", "nvext.cache_salt", {"nvext": {"cache_salt": "other"}}),
    ("tenant", "cache_salt", {"cache_salt": "other"}),
]
HEADERS: list[tuple[Privilege, str]] = [
    *(
        (privilege, header)
        for field, headers in HEADERS_OF.items()
        for header in headers
        for privilege in [
            {"cache_salt": "tenant", "priority": "priority", "strict_priority": "priority"}.get(field, "pin")
        ]
    ),  # type: ignore[list-item]
    ("priority", "x-dynamo-meta-policy-class"),
]


@pytest.mark.parametrize(("privilege", "field", "body"), FIELDS, ids=[field for _, field, _ in FIELDS])
async def test_a_field_for_the_privileged_is_refused_by_name_without_the_privilege(
    privilege: Privilege, field: str, body: dict[str, Any]
) -> None:
    engine = hello()
    others = [each for each in ALL_PRIVILEGES if each != privilege]
    refused = await chat(guarded(engine, ring(privileges=others)), headers=bearer(), **body).run()
    assert refused.status == 403
    assert refused.json["message"] == f"`{field}` needs a key with the privilege `{privilege}`"
    assert engine.started == 0
    assert (await chat(guarded(engine, ring(privileges=[privilege])), headers=bearer(), **body).run()).status == 200


@pytest.mark.parametrize(("privilege", "header"), sorted(set(HEADERS)), ids=lambda value: value)
async def test_a_header_for_the_privileged_is_refused_by_name_without_the_privilege(
    privilege: Privilege, header: str
) -> None:
    engine = hello()
    others = [each for each in ALL_PRIVILEGES if each != privilege]
    headers = bearer() | {header: "1"}
    refused = await chat(guarded(engine, ring(privileges=others)), headers=headers).run()
    assert refused.status == 403
    assert refused.json["message"] == f"`{header}` needs a key with the privilege `{privilege}`"
    assert (await chat(guarded(engine, ring(privileges=[privilege])), headers=headers).run()).status == 200


@pytest.mark.parametrize(
    ("wanted", "status", "got"), [(None, 200, 5), (5, 200, 5), (-3, 200, -3), (0, 200, 0), (6, 403, None)]
)
async def test_the_priority_of_a_key_is_set_and_is_the_highest(
    wanted: int | None, status: int, got: int | None
) -> None:
    engine = hello()
    body = {} if wanted is None else {"nvext": {"agent_hints": {"priority": wanted}}}
    answer = await chat(guarded(engine, ring(priority=5)), headers=bearer(), **body).run()
    assert answer.status == status
    assert [request.payload.nvext.agent_hints.priority for request in engine.requests] == [got] * (status == 200)


async def test_a_key_of_low_priority_cannot_raise_it() -> None:
    service = guarded(hello(), ring(priority=-5))
    assert (await chat(service, headers=bearer() | {"x-dynamo-request-priority": "0"}).run()).status == 403


async def test_the_tenant_of_a_key_separates_its_cache_unless_it_may_choose() -> None:
    engine = hello()
    for options in (HttpOptions(), HttpOptions(nvext=False)):
        service = guarded(engine, ring(tenant="mine", privileges=["tenant"]), options=options)
        await chat(service, headers=bearer(), cache_salt="chosen").run()
        await chat(service, headers=bearer(), nvext={"cache_salt": ""}).run()
        await chat(service, headers=bearer()).run()
    assert [request.payload.cache_salt for request in engine.requests] == ["chosen", "mine", "mine"] * 2


async def test_the_workers_that_answered_may_be_read_without_a_privilege() -> None:
    body = {"nvext": {"extra_fields": ["worker_id", "timing"]}}
    assert (await chat(guarded(hello(), ring()), headers=bearer(), **body).run()).status == 200


async def test_a_key_reaches_neither_metadata_nor_the_engine() -> None:
    engine = hello()
    headers = bearer() | {f"x-dynamo-meta-{name}": KEY for name in ("authorization", "x-api-key", "api-key", "cookie")}
    assert (await chat(guarded(engine, ring()), headers=headers).run()).status == 200
    assert KEY not in str((engine.requests[0].metadata, engine.requests[0].payload))
