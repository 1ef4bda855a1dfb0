"""The connections of a client: what they share."""

from __future__ import annotations

import ssl

import anyio
import pytest
import trustme
from anyio.streams.tls import TLSListener

from engines.upstream import Address, Client
from engines.upstream.http_exchange import fetched
from engines.upstream.transport import system_tls
from pipeline.errors import CannotConnect


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """In real time: sockets know no other."""
    backend: str = request.param
    return backend


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_every_client_has_the_systems_certificates_and_they_are_read_once(
    is_trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    made: list[ssl.SSLContext] = []

    def read() -> ssl.SSLContext:
        made.append(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        (authority if is_trusted else trustme.CA()).configure_trust(made[-1])
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", read)
    system_tls.cache_clear()
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)

    async def answer(stream: anyio.abc.ByteStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    try:
        async with TLSListener(listener.listeners[0], context, False) as served, anyio.create_task_group() as tasks:
            tasks.start_soon(served.serve, answer)
            for _ in range(3):
                client = Client(Address.parse(f"https://127.0.0.1:{port}"), 60.0)
                if is_trusted:
                    assert await fetched(client, "GET", "/", {}, within_s=60.0) == (200, b"ok")
                else:
                    with pytest.raises(CannotConnect, match="certificate"):
                        await fetched(client, "GET", "/", {}, within_s=60.0)
                await client.aclose()
            tasks.cancel_scope.cancel()
    finally:
        system_tls.cache_clear()
    assert len(made) == 1
