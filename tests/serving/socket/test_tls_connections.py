"""The same limits under TLS: a handshake counts as a connection and has its time; what is written still has an end."""

from __future__ import annotations

import asyncio
import socket
import ssl

import anyio
import pytest
import trustme
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.serving.socket.worlds import serve

GET = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"


Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


@pytest.fixture(scope="module")
def certificates() -> Contexts:
    """The context of a server and that of a client that trusts it."""
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    return server, client


def schemes(seen: list[str]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["scheme"])
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message["body"]), message["more_body"]
        body = b"%d" % size
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    return app


async def test_requests_are_served_and_kept_within_limits_under_tls(certificates: Contexts) -> None:
    server, client = certificates
    seen: list[str] = []
    async with serve(schemes(seen), tls=server, max_header_bytes=2000) as served:
        raw = await served.connect(ssl=client)
        await raw.send(GET + GET)
        assert [(await raw.answer()).status for _ in range(2)] == [200, 200]
        size = 3_000_000
        await raw.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size + bytes(size))
        assert (await raw.answer()).body == b"%d" % size
        await raw.send(GET[:-2] + b"a: b\r\n" * 1000)
        assert (await raw.answer()).status == 431
    assert seen == ["https"] * 3
    assert served.limits_hit == ["max_header_bytes"]


async def test_plain_http_at_a_port_with_tls_gets_400(certificates: Contexts) -> None:
    async with serve(tls=certificates[0]) as served:
        answer = await served.request(GET)
        assert (answer.status, answer.json["message"]) == (
            400,
            "The request is not valid HTTP: this port speaks TLS",
        )


@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01\x02\x00", b"\x16" + bytes(100_000)])
async def test_a_handshake_that_does_not_come_to_its_end_is_cut(
    certificates: Contexts, first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(tls=certificates[0], tls_handshake_timeout_s=0.3) as served:
        raw = await served.connect()
        await raw.send(first)
        with anyio.fail_after(5):
            await raw.rest()
            while served.server._connections.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert [task for task in asyncio.all_tasks() if "_shake_hands" in repr(task)] == []
    assert caplog.messages == []


async def test_handshakes_count_as_connections(certificates: Contexts) -> None:
    server, client = certificates
    async with serve(schemes([]), tls=server, max_connections=3) as served:
        opened = [await served.connect() for _ in range(3)]
        with pytest.raises((OSError, EOFError)):
            await served.connect(ssl=client)
        await opened[0].close()
        while len(served.server._connections.open) > 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await served.request(GET, ssl=client)).status == 200


async def test_silence_half_heads_and_readers_that_stop_are_cut_under_tls(certificates: Contexts) -> None:
    server, client = certificates
    gone = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        async with anyio.create_task_group() as tasks:

            async def write() -> None:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                while True:
                    await send({"type": "http.response.body", "body": bytes(16_384), "more_body": True})
                    await asyncio.sleep(0)

            tasks.start_soon(write)
            await receive()
            tasks.cancel_scope.cancel()
        gone.set()

    async with serve(endless, tls=server, head_timeout_s=0.5, write_timeout_s=0.4) as served:
        half = await served.connect(ssl=client)
        await half.send(GET[:10])
        assert (await half.answer()).status == 408
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", served.port))
        stopped = await served.connect(ssl=client, sock=plain)
        stopped.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await stopped.send(GET)
        with anyio.fail_after(10):
            await gone.wait()
        stopped.writer.transport.abort()
    assert served.limits_hit == ["head_timeout_s", "write_timeout_s"]
