"""An app that wants keys: which requests get in, at which rate, and to which models."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from pipeline.testing import ScriptedEngine, Wait
from serving.access import ApiKey, KeyRing, hash_of
from serving.http import Access, Availability, HttpOptions, app
from serving.http.guard import sent_key
from tests.serving.access.worlds import KEY, OTHER, answered, bearer, guarded, hello, page, ring, watched
from tests.serving.worlds import chat, last, token

# -- admission


@pytest.mark.parametrize("headers", [bearer(), {"authorization": f"bearer  {KEY} "}, {"x-api-key": KEY}])
async def test_a_valid_key_gets_in(headers: dict[str, str]) -> None:
    service = guarded(hello(), ring())
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
async def test_no_key_and_every_wrong_one_get_the_same_answer(path: str) -> None:
    service = guarded(hello(), ring())
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


async def test_a_refusal_repeats_the_clients_request_id() -> None:
    answer = await page(guarded(hello(), ring()), "/v1/models", {"x-request-id": "mine"})
    assert (answer.status, answer.response_headers["x-request-id"]) == (401, "mine")


async def test_probes_need_no_key_and_see_no_workers() -> None:
    availability = Availability()
    service = guarded(hello(), ring(), availability=availability)
    for headers in ({}, bearer(OTHER), bearer()):
        assert (await page(service, "/health", headers)).json == {"status": "healthy"}
        assert (await page(service, "/live", headers)).json == {"status": "live"}
    availability.stop()
    assert (await page(service, "/health")).status == 503


async def test_only_a_probe_is_open() -> None:
    """Neither another method nor a path that only begins like one."""
    service = guarded(hello(), ring())
    assert (await page(service, "/live", method="POST")).status == 401
    assert (await page(service, "/health/../v1/models")).status == 401


async def test_probes_of_a_mounted_app_are_open() -> None:
    service = Starlette(routes=[Mount("/inner", guarded(hello(), ring()))])
    paths = ("/inner/live", "/inner/v1/models", "/inner/inner/live")
    assert [(await page(service, path)).status for path in paths] == [200, 401, 401]


async def test_other_paths_of_probes_are_open() -> None:
    service = guarded(hello(), ring(), options=HttpOptions(live_path="/fit"))
    assert [(await page(service, path)).status for path in ("/fit", "/live")] == [200, 401]


async def test_metrics_and_workers_are_for_keys_that_may_see_them() -> None:
    engine = hello()
    service = guarded(engine, ring(privileges=["admin"]))
    assert (await page(service, "/metrics", bearer())).status == 200
    assert (await page(service, "/health", bearer())).json.keys() == {"status", "endpoints", "instances", "roles"}
    refused = await page(guarded(engine, ring()), "/metrics", bearer())
    assert refused.status == 403
    assert "`admin`" in refused.json["message"]


async def test_internals_that_are_not_shown_here_are_not_there() -> None:
    service = app({"m": hello()}, options=HttpOptions(shows_internals=False))
    assert (await page(service, "/metrics")).status == 404
    assert (await page(service, "/health")).json == {"status": "healthy"}


async def test_without_keys_all_is_open_as_ever() -> None:
    service = app({"m": hello()}, access=Access())
    body: dict[str, Any] = {
        "nvext": {"backend_instance_id": 7, "agent_hints": {"strict_priority": 3}},
        "cache_salt": "t",
    }
    assert (await chat(service, **body).run()).status == 200
    assert (await page(service, "/metrics")).status == 200
    assert "instances" in (await page(service, "/health")).json


async def test_the_caller_is_the_name_of_the_key() -> None:
    seen: list[Any] = []

    service = watched(guarded(hello(), ring()), seen)
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


async def test_a_model_that_a_key_may_not_use_is_not_there_for_it() -> None:
    service = guarded(hello(), ring(models=["m"]))
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


async def test_a_rate_holds_for_requests_at_the_same_time() -> None:
    service = guarded(hello(), ring(requests_per_minute=10))
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


async def test_the_rate_of_one_key_leaves_another_alone_and_wrong_keys_use_none() -> None:
    keys = KeyRing(
        [ApiKey(name=name, hash=hash_of(key), requests_per_minute=1) for name, key in (("a", KEY), ("b", OTHER))]
    )
    service = guarded(hello(), keys)
    assert [(await chat(service, headers=bearer("x" * 40)).run()).status for _ in range(5)] == [401] * 5
    assert [(await chat(service, headers=bearer()).run()).status for _ in range(2)] == [200, 429]
    assert (await chat(service, headers=bearer(OTHER)).run()).status == 200


async def test_a_key_that_used_up_its_tokens_waits_for_the_debt_to_be_filled() -> None:
    """An answer is 5 tokens of prompt and 2 of text; the bucket holds 6."""
    service = guarded(hello(), ring(tokens_per_minute=6))
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


async def test_probes_use_no_rate() -> None:
    service = guarded(hello(), ring(requests_per_minute=1))
    for _ in range(5):
        assert (await page(service, "/live", bearer())).status == 200
    assert (await chat(service, headers=bearer()).run()).status == 200
