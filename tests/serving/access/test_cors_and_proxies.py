"""Requests of browsers from other origins, and requests that came through a proxy."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from serving.access import TrustedProxies
from serving.http import Access, app
from serving.http.caller import caller_of
from tests.serving.access.worlds import answered, bearer, hello, page, ring, watched
from tests.serving.worlds import chat

ORIGIN = "https://chat.example"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_a_page_of_an_allowed_origin_may_send_requests_and_read_our_headers() -> None:
    service = app({"m": hello()}, access=Access(ring(requests_per_minute=1), cors_origins=(ORIGIN,)))
    allowed = await page(service, "/v1/chat/completions", PREFLIGHT, "OPTIONS")
    assert (allowed.status, allowed.response_headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "authorization" in allowed.response_headers["access-control-allow-headers"]
    for status in (200, 429):
        answer = await chat(service, headers=bearer() | {"origin": ORIGIN}).run()
        assert (answer.status, answer.response_headers["access-control-allow-origin"]) == (status, ORIGIN)
        assert answer.response_headers["access-control-expose-headers"] == "*"
    assert "access-control-allow-credentials" not in answer.response_headers
    assert (await page(service, "/v1/models", {"origin": ORIGIN})).status == 401


async def test_a_page_of_another_origin_is_not_allowed() -> None:
    service = app({"m": hello()}, access=Access(ring(), cors_origins=(ORIGIN,)))
    for origin in ("https://evil.example", "null", f"{ORIGIN}.evil.example"):
        answer = await page(service, "/v1/models", PREFLIGHT | {"origin": origin}, "OPTIONS")
        assert answer.status == 400
        assert "access-control-allow-origin" not in answer.response_headers
        read = await page(service, "/v1/models", bearer() | {"origin": origin})
        assert "access-control-allow-origin" not in read.response_headers


async def test_without_origins_there_is_no_cors() -> None:
    answer = await page(app({"m": hello()}), "/v1/models", PREFLIGHT, "OPTIONS")
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

    async def spy(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(caller_of(scope).identity)

    proxies = TrustedProxies(["10.0.0.0/8"])
    headers = [(b"x-forwarded-for", forwarded.encode())]
    await proxies.around(spy)({"type": "http", "client": (peer, 1), "headers": headers, "scheme": "http"}, None, None)
    assert seen == [client]
    assert proxies.trusted(peer) == (client != peer or forwarded == "")


async def test_a_client_behind_a_proxy_is_known_to_the_app() -> None:
    seen: list[Any] = []
    service = watched(app({"m": hello()}, access=Access(proxies=TrustedProxies(["192.0.2.1"]))), seen)
    await answered(service, [(b"x-forwarded-for", b"203.0.113.9")])
    assert [caller.identity for caller in seen] == ["203.0.113.9"]
