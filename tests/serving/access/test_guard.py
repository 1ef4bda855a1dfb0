"""An app that wants keys: who gets in, how fast, to which models, with which privileges."""

from __future__ import annotations

import json
from collections.abc import Callable, MutableMapping
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from pipeline.protocols.openai import HEADERS_OF
from pipeline.testing import ScriptedEngine, Wait
from serving.access import ALL_PRIVILEGES, ApiKey, KeyRing, Privilege, TrustedProxies, hash_of
from serving.http import Access, Availability, HttpOptions, app
from serving.http.caller import caller_of
from serving.http.guard import sent_key
from tests.serving.worlds import chat, last, request_to, token

pytestmark = pytest.mark.anyio

KEY = "penstock-0123456789abcdefghijklmnopqrstuv"
OTHER = KEY[::-1]
Make = Callable[..., Any]


def bearer(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ring(**known: Any) -> KeyRing:
    """One valid key, `KEY` of the name `a`."""
    return KeyRing([ApiKey(name="a", hash=hash_of(KEY), **known)])


def guarded(engine: Any, keys: KeyRing, **options: Any) -> Any:
    return app({"m": engine, "n": engine}, access=Access(keys), **options)


def watched(service: Any, seen: list[Any]) -> Any:
    """The app, which puts the caller of each request that reaches its routes into `seen`."""
    router = service.router

    async def spy(scope: Any, receive: Any, send: Any) -> None:
        seen.append(caller_of(scope))
        await router(scope, receive, send)

    service.router = spy
    return service


@pytest.fixture
def hello() -> ScriptedEngine:
    return ScriptedEngine([token("Hel"), token("lo"), last()])


@pytest.fixture
def page() -> Make:
    """GET of a path with these headers, answered."""

    async def get(service: Any, path: str, headers: Any = None, method: str = "GET") -> Any:
        return await request_to(service, path, method=method, headers=headers or {}).run()

    return get


async def answered(service: Any, headers: list[tuple[bytes, bytes]], path: str = "/v1/models") -> tuple[Any, ...]:
    """Status, headers and body of the answer to a GET with exactly these headers, given before a body is read."""
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("the body was read")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path.partition("?")[0],
        "query_string": path.partition("?")[2].encode(),
        "root_path": "",
        "headers": headers,
        "client": ("192.0.2.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await service(scope, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(message["body"] for message in sent[1:])


# -- who gets in


@pytest.mark.parametrize("headers", [bearer(), {"authorization": f"bearer  {KEY} "}, {"x-api-key": KEY}])
async def test_a_valid_key_gets_in(hello: ScriptedEngine, page: Make, headers: dict[str, str]) -> None:
    service = guarded(hello, ring())
    assert (await chat(service, headers=headers).run()).status == 200
    assert (await page(service, "/v1/models", headers)).status == 200


HOSTILE: dict[str, list[tuple[bytes, bytes]]] = {
    "none": [],
    "empty": [(b"authorization", b"")],
    "only the scheme": [(b"authorization", b"Bearer")],
    "wrong": [(b"authorization", f"Bearer {OTHER}".encode())],
    "one letter off": [(b"authorization", f"Bearer {KEY[:-1]}".encode())],
    "another scheme": [(b"authorization", f"Basic {KEY}".encode())],
    "no scheme": [(b"authorization", KEY.encode())],
    "other case": [(b"authorization", f"Bearer {KEY.upper()}".encode())],
    "not ASCII": [(b"authorization", b"Bearer \xff\xfe\x00\xc3")],
    "huge": [(b"authorization", b"Bearer " + KEY.encode() + b"a" * 1_000_000)],
    "two that differ": [(b"authorization", f"Bearer {KEY}".encode()), (b"authorization", b"Bearer x")],
    "two kinds that differ": [(b"authorization", f"Bearer {KEY}".encode()), (b"x-api-key", b"x")],
    "the hash": [(b"x-api-key", hash_of(KEY).encode())],
    "a cookie": [(b"cookie", f"api_key={KEY}".encode())],
}


@pytest.mark.parametrize(
    "path", ["/v1/models", f"/v1/models?api_key={KEY}&key={KEY}", "/metrics", "/nowhere", "/live/"]
)
async def test_no_key_and_every_wrong_one_get_the_same_answer(hello: ScriptedEngine, path: str) -> None:
    service = guarded(hello, ring())
    same_id = (b"x-request-id", b"6b1f2f5e-6f0a-4d3c-9d58-0f5d8a3f7c11")
    answers = [await answered(service, [same_id, *headers], path) for headers in HOSTILE.values()]
    status, headers, body = answers[0]
    assert all(answer == answers[0] for answer in answers)
    assert (status, headers[b"www-authenticate"], headers[b"content-type"]) == (401, b"Bearer", b"application/json")
    assert json.loads(body)["type"] == "Unauthorized"
    assert KEY.encode() not in body


@pytest.mark.parametrize("others", [[b"x"], [b"y", b"z"], [KEY[:-1].encode()]])
async def test_keys_that_differ_are_none(others: list[bytes]) -> None:
    for keys in ([KEY.encode(), *others], [*others, KEY.encode()]):
        assert sent_key([(b"x-api-key", key) for key in keys]) == b""
        assert sent_key([(b"authorization", b"Bearer " + key) for key in keys]) == b""


async def test_the_same_key_twice_is_one_key() -> None:
    twice = [(b"authorization", f"Bearer {KEY}".encode()), (b"x-api-key", KEY.encode())]
    assert sent_key(twice) == KEY.encode()


async def test_a_refusal_repeats_the_clients_request_id(hello: ScriptedEngine, page: Make) -> None:
    answer = await page(guarded(hello, ring()), "/v1/models", {"x-request-id": "mine"})
    assert (answer.status, answer.response_headers["x-request-id"]) == (401, "mine")


async def test_probes_need_no_key_and_see_no_workers(hello: ScriptedEngine, page: Make) -> None:
    availability = Availability()
    service = guarded(hello, ring(), availability=availability)
    for headers in ({}, bearer(OTHER), bearer()):
        assert (await page(service, "/health", headers)).json == {"status": "healthy"}
        assert (await page(service, "/live", headers)).json == {"status": "live"}
    availability.stop()
    assert (await page(service, "/health")).status == 503


async def test_only_a_probe_is_open(hello: ScriptedEngine, page: Make) -> None:
    """Neither another method nor a path that only begins like one."""
    service = guarded(hello, ring())
    assert (await page(service, "/live", method="POST")).status == 401
    assert (await page(service, "/health/../v1/models")).status == 401


async def test_probes_of_a_mounted_app_are_open(hello: ScriptedEngine, page: Make) -> None:
    service = Starlette(routes=[Mount("/inner", guarded(hello, ring()))])
    paths = ("/inner/live", "/inner/v1/models", "/inner/inner/live")
    assert [(await page(service, path)).status for path in paths] == [200, 401, 401]


async def test_other_paths_of_probes_are_open(hello: ScriptedEngine, page: Make) -> None:
    service = guarded(hello, ring(), options=HttpOptions(live_path="/fit"))
    assert [(await page(service, path)).status for path in ("/fit", "/live")] == [200, 401]


async def test_metrics_and_workers_are_for_keys_that_may_see_them(hello: ScriptedEngine, page: Make) -> None:
    service = guarded(hello, ring(privileges=["admin"]))
    assert (await page(service, "/metrics", bearer())).status == 200
    assert (await page(service, "/health", bearer())).json.keys() == {"status", "endpoints", "instances"}
    refused = await page(guarded(hello, ring()), "/metrics", bearer())
    assert refused.status == 403
    assert "`admin`" in refused.json["message"]


async def test_internals_that_are_not_shown_here_are_not_there(hello: ScriptedEngine, page: Make) -> None:
    service = app({"m": hello}, options=HttpOptions(shows_internals=False))
    assert (await page(service, "/metrics")).status == 404
    assert (await page(service, "/health")).json == {"status": "healthy"}


async def test_without_keys_all_is_open_as_ever(hello: ScriptedEngine, page: Make) -> None:
    service = app({"m": hello}, access=Access())
    body: dict[str, Any] = {
        "nvext": {"backend_instance_id": 7, "agent_hints": {"strict_priority": 3}},
        "cache_salt": "t",
    }
    assert (await chat(service, **body).run()).status == 200
    assert (await page(service, "/metrics")).status == 200
    assert "instances" in (await page(service, "/health")).json


async def test_the_caller_is_the_name_of_the_key(hello: ScriptedEngine) -> None:
    seen: list[Any] = []

    service = watched(guarded(hello, ring()), seen)
    await answered(service, [(b"x-api-key", KEY.encode())])
    await answered(service, [], "/live")
    assert [caller.identity for caller in seen] == ["a", "192.0.2.1"]
    assert seen[1].privileges == frozenset()


async def test_a_key_that_is_taken_away_ends_no_stream_and_gets_no_other() -> None:
    keys = ring()
    service = guarded(ScriptedEngine([token("a"), Wait(5), token("b"), last()]), keys)
    running = chat(service, headers=bearer(), stream=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await running.until(lambda answer: answer.text == "a")
        keys.replace([ApiKey(name="b", hash=hash_of(OTHER))])
        assert (await chat(service, headers=bearer()).run()).status == 401
    assert running.text == "ab"


# -- models


async def test_a_model_that_a_key_may_not_use_is_not_there_for_it(hello: ScriptedEngine, page: Make) -> None:
    service = guarded(hello, ring(models=["m"]))
    listed = await page(service, "/v1/models", bearer())
    assert [model["id"] for model in listed.json["data"]] == ["m"]
    for name in ("n", "unknown"):
        refused = await chat(service, headers=bearer(), model=name).run()
        assert (refused.status, refused.json["message"]) == (404, "Model not found")
        assert (await page(service, f"/v1/models/{name}", bearer())).status == 404
        assert (await page(service, f"/v1/models/{name}/ready", bearer())).status == 404
    assert (await chat(service, headers=bearer(), model="m").run()).status == 200
    assert (await page(service, "/v1/models/m/ready", bearer())).status == 200


# -- rates


async def test_a_rate_holds_for_requests_at_the_same_time(hello: ScriptedEngine) -> None:
    service = guarded(hello, ring(requests_per_minute=10))
    requests = [chat(service, headers=bearer()) for _ in range(50)]
    async with anyio.create_task_group() as tasks:
        for request in requests:
            tasks.start_soon(request.run)
    assert sorted(request.status for request in requests) == [200] * 10 + [429] * 40
    refused = next(request for request in requests if request.status == 429)
    assert refused.json["limit"] == {"name": "requests_per_minute", "value": 11, "threshold": 10}
    assert refused.response_headers["x-penstock-limit"].startswith("requests_per_minute;")
    assert refused.response_headers["retry-after"] == "6"
    await anyio.sleep(6)
    assert (await chat(service, headers=bearer()).run()).status == 200
    assert (await chat(service, headers=bearer()).run()).status == 429


async def test_the_rate_of_one_key_leaves_another_alone_and_wrong_keys_use_none(hello: ScriptedEngine) -> None:
    keys = KeyRing(
        [ApiKey(name=name, hash=hash_of(key), requests_per_minute=1) for name, key in (("a", KEY), ("b", OTHER))]
    )
    service = guarded(hello, keys)
    assert [(await chat(service, headers=bearer("x" * 40)).run()).status for _ in range(5)] == [401] * 5
    assert [(await chat(service, headers=bearer()).run()).status for _ in range(2)] == [200, 429]
    assert (await chat(service, headers=bearer(OTHER)).run()).status == 200


async def test_a_key_that_used_up_its_tokens_waits_for_the_debt_to_be_filled(hello: ScriptedEngine) -> None:
    """An answer is 5 tokens of prompt and 2 of text; the bucket holds 6."""
    service = guarded(hello, ring(tokens_per_minute=6))
    assert (await chat(service, headers=bearer()).run()).status == 200
    refused = await chat(service, headers=bearer(), stream=True).run()
    assert (refused.status, refused.json["limit"]["name"]) == (429, "tokens_per_minute")
    await anyio.sleep(int(refused.response_headers["retry-after"]))
    assert (await chat(service, headers=bearer()).run()).status == 200


async def test_tokens_of_a_request_that_was_given_up_count_too() -> None:
    service = guarded(ScriptedEngine([*[token("a")] * 3, Wait(1000)]), ring(tokens_per_minute=2))
    leaving = chat(service, headers=bearer(), stream=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leaving.run)
        await leaving.until(lambda answer: answer.text == "aaa")
        leaving.leave()
    assert (await chat(service, headers=bearer()).run()).status == 429


async def test_probes_use_no_rate(hello: ScriptedEngine, page: Make) -> None:
    service = guarded(hello, ring(requests_per_minute=1))
    for _ in range(5):
        assert (await page(service, "/live", bearer())).status == 200
    assert (await chat(service, headers=bearer()).run()).status == 200


# -- privileges

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
    hello: ScriptedEngine, privilege: Privilege, field: str, body: dict[str, Any]
) -> None:
    others = [each for each in ALL_PRIVILEGES if each != privilege]
    refused = await chat(guarded(hello, ring(privileges=others)), headers=bearer(), **body).run()
    assert refused.status == 403
    assert refused.json["message"] == f"`{field}` needs a key with the privilege `{privilege}`"
    assert hello.started == 0
    assert (await chat(guarded(hello, ring(privileges=[privilege])), headers=bearer(), **body).run()).status == 200


@pytest.mark.parametrize(("privilege", "header"), sorted(set(HEADERS)), ids=lambda value: value)
async def test_a_header_for_the_privileged_is_refused_by_name_without_the_privilege(
    hello: ScriptedEngine, privilege: Privilege, header: str
) -> None:
    others = [each for each in ALL_PRIVILEGES if each != privilege]
    headers = bearer() | {header: "1"}
    refused = await chat(guarded(hello, ring(privileges=others)), headers=headers).run()
    assert refused.status == 403
    assert refused.json["message"] == f"`{header}` needs a key with the privilege `{privilege}`"
    assert (await chat(guarded(hello, ring(privileges=[privilege])), headers=headers).run()).status == 200


@pytest.mark.parametrize(
    ("wanted", "status", "got"), [(None, 200, 5), (5, 200, 5), (-3, 200, -3), (0, 200, 0), (6, 403, None)]
)
async def test_the_priority_of_a_key_is_set_and_is_the_highest(
    hello: ScriptedEngine, wanted: int | None, status: int, got: int | None
) -> None:
    body = {} if wanted is None else {"nvext": {"agent_hints": {"priority": wanted}}}
    answer = await chat(guarded(hello, ring(priority=5)), headers=bearer(), **body).run()
    assert answer.status == status
    assert [request.payload.nvext.agent_hints.priority for request in hello.requests] == [got] * (status == 200)


async def test_a_key_of_low_priority_cannot_raise_it(hello: ScriptedEngine) -> None:
    service = guarded(hello, ring(priority=-5))
    assert (await chat(service, headers=bearer() | {"x-dynamo-request-priority": "0"}).run()).status == 403


async def test_the_tenant_of_a_key_separates_its_cache_unless_it_may_choose(hello: ScriptedEngine) -> None:
    for options in (HttpOptions(), HttpOptions(nvext=False)):
        service = guarded(hello, ring(tenant="mine", privileges=["tenant"]), options=options)
        await chat(service, headers=bearer(), cache_salt="chosen").run()
        await chat(service, headers=bearer(), nvext={"cache_salt": ""}).run()
        await chat(service, headers=bearer()).run()
    assert [request.payload.cache_salt for request in hello.requests] == ["chosen", "mine", "mine"] * 2


async def test_the_workers_that_answered_may_be_read_without_a_privilege(hello: ScriptedEngine) -> None:
    body = {"nvext": {"extra_fields": ["worker_id", "timing"]}}
    assert (await chat(guarded(hello, ring()), headers=bearer(), **body).run()).status == 200


async def test_a_key_reaches_neither_metadata_nor_the_engine(hello: ScriptedEngine) -> None:
    headers = bearer() | {f"x-dynamo-meta-{name}": KEY for name in ("authorization", "x-api-key", "api-key", "cookie")}
    assert (await chat(guarded(hello, ring()), headers=headers).run()).status == 200
    assert KEY not in str((hello.requests[0].metadata, hello.requests[0].payload))


# -- browsers

ORIGIN = "https://chat.example"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_a_page_of_an_allowed_origin_may_ask_and_read_our_headers(hello: ScriptedEngine, page: Make) -> None:
    service = app({"m": hello}, access=Access(ring(requests_per_minute=1), cors_origins=(ORIGIN,)))
    allowed = await page(service, "/v1/chat/completions", PREFLIGHT, "OPTIONS")
    assert (allowed.status, allowed.response_headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "authorization" in allowed.response_headers["access-control-allow-headers"]
    for status in (200, 429):
        answer = await chat(service, headers=bearer() | {"origin": ORIGIN}).run()
        assert (answer.status, answer.response_headers["access-control-allow-origin"]) == (status, ORIGIN)
        assert answer.response_headers["access-control-expose-headers"] == "*"
    assert "access-control-allow-credentials" not in answer.response_headers
    assert (await page(service, "/v1/models", {"origin": ORIGIN})).status == 401


async def test_a_page_of_another_origin_is_not_allowed(hello: ScriptedEngine, page: Make) -> None:
    service = app({"m": hello}, access=Access(ring(), cors_origins=(ORIGIN,)))
    for origin in ("https://evil.example", "null", f"{ORIGIN}.evil.example"):
        answer = await page(service, "/v1/models", PREFLIGHT | {"origin": origin}, "OPTIONS")
        assert answer.status == 400
        assert "access-control-allow-origin" not in answer.response_headers
        read = await page(service, "/v1/models", bearer() | {"origin": origin})
        assert "access-control-allow-origin" not in read.response_headers


async def test_without_origins_there_is_no_cors(hello: ScriptedEngine, page: Make) -> None:
    answer = await page(app({"m": hello}), "/v1/models", PREFLIGHT, "OPTIONS")
    assert answer.status == 405
    assert not [name for name in answer.response_headers if name.startswith("access-control")]


# -- proxies


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "6.6.6.6, 203.0.113.9, 10.0.0.2", "203.0.113.9"),
        ("::ffff:10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "2001:db8::1", "2001:db8::1"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("192.0.2.1", "203.0.113.9", "192.0.2.1"),
        ("2001:db8::7", "203.0.113.9", "2001:db8::7"),
    ],
)
async def test_only_the_headers_of_a_trusted_proxy_name_the_client(peer: str, forwarded: str, client: str) -> None:
    seen: list[str] = []

    async def spy(scope: Any, receive: Any, send: Any) -> None:
        seen.append(caller_of(scope).identity)

    proxies = TrustedProxies(["10.0.0.0/8"])
    headers = [(b"x-forwarded-for", forwarded.encode())]
    await proxies.around(spy)({"type": "http", "client": (peer, 1), "headers": headers, "scheme": "http"}, None, None)
    assert seen == [client]
    assert proxies.trusted(peer) == (client != peer or forwarded == "")


async def test_a_client_behind_a_proxy_is_known_to_the_app(hello: ScriptedEngine) -> None:
    seen: list[Any] = []
    service = watched(app({"m": hello}, access=Access(proxies=TrustedProxies(["192.0.2.1"]))), seen)
    await answered(service, [(b"x-forwarded-for", b"203.0.113.9")])
    assert [caller.identity for caller in seen] == ["203.0.113.9"]
