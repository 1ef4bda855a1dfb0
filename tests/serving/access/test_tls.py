"""TLS: what files are taken, what a client gets, and a certificate that changes; real sockets, on asyncio only."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx2
import openai
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from pipeline import InvalidArgument
from pipeline.testing import ScriptedEngine, Stall
from serving.access import ApiKey, KeyRing, Tls, hash_of, tls_of
from serving.http import Access, app
from serving.limits import HttpLimits
from serving.server import HttpServer, listen
from tests.serving.access.worlds import Certificates
from tests.serving.worlds import last, token

KEY = "penstock-0123456789abcdefghijklmnopqrstuv"
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def serving(application: Any, tls: Tls, use: Callable[[str], Awaitable[None]], timeout_s: float = 10) -> None:
    """Run a function with the URL of a TLS server of the app."""
    limits = HttpLimits(tls_handshake_timeout_s=timeout_s)
    server = HttpServer(application, listen("127.0.0.1", 0), tls=tls.context, limits=limits)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        try:
            with anyio.fail_after(20):
                await use(server.url)
        finally:
            server.stop()


def trusting(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.create_default_context()
    certificates.ca.configure_trust(context)
    return context


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def serial_of(url: str, context: ssl.SSLContext, host: str = "127.0.0.1") -> str:
    """The serial number of the certificate that the server shows."""
    _, writer = await asyncio.open_connection("127.0.0.1", port_of(url), ssl=context, server_hostname=host)
    serial: str = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
    writer.close()
    await writer.wait_closed()
    return serial


@pytest.fixture
def hello() -> ScriptedEngine:
    return ScriptedEngine([token("Hel"), token("lo"), last()])


async def test_the_openai_client_talks_to_it_with_its_key(certificates: Certificates, hello: ScriptedEngine) -> None:
    keys = KeyRing([ApiKey(name="a", hash=hash_of(KEY))])
    context = trusting(certificates)

    async def use(url: str) -> None:
        assert url.startswith("https://127.0.0.1:")
        for key, works in ((KEY, True), ("wrong", False)):
            http = openai.DefaultAsyncHttpxClient(verify=context)
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=http) as client:
                if not works:
                    with pytest.raises(openai.AuthenticationError, match="Missing or wrong API key"):
                        await client.models.list()
                    continue
                assert [model.id async for model in client.models.list()] == ["m"]
                stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
                assert [chunk.choices[0].delta.content async for chunk in stream] == ["Hel", "lo", None]
                with pytest.raises(openai.PermissionDeniedError, match="`pin`"):
                    await client.chat.completions.create(
                        model="m", messages=HI, extra_headers={"x-dynamo-worker-instance-id": "7"}
                    )

    tls = Tls(certificates.cert, certificates.key)
    await serving(app({"m": hello}, access=Access(keys)), tls, use)


async def test_new_connections_get_a_changed_certificate_and_open_ones_go_on(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    tls, context = Tls(certificates.cert, certificates.key), trusting(certificates)

    async def use(url: str) -> None:
        async with httpx2.AsyncClient(verify=context, base_url=url) as client:
            assert (await client.get("/live")).status_code == 200
            for host in ("127.0.0.1", "localhost"):  # without a server name in the handshake, and with one
                before = await serial_of(url, context, host)
                certificates.issue()
                await tls.watched.check()
                assert await serial_of(url, context, host) != before
            now = await serial_of(url, context)
            certificates.write(certificates.key, certificates.folder.joinpath("cert.pem").read_bytes())
            await tls.watched.check()
            certificates.ca.issue_cert("x").private_key_pem.write_to_path(certificates.key)  # of another certificate
            await tls.watched.check()
            assert await serial_of(url, context) == now
            assert (await client.get("/live")).status_code == 200

    await serving(app({"m": ScriptedEngine([Stall()])}), tls, use)
    assert [record.levelname for record in caplog.records if record.name.startswith("serving")] == [
        "WARNING",
        "WARNING",
        "ERROR",
        "ERROR",
    ]


async def test_a_client_that_never_shakes_hands_is_cut_off(certificates: Certificates, hello: ScriptedEngine) -> None:
    async def use(url: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        writer.write(b"\x16\x03\x01")  # the beginning of a handshake
        assert await reader.read() == b""
        writer.close()

    with anyio.fail_after(5):
        await serving(app({"m": hello}), Tls(certificates.cert, certificates.key), use, timeout_s=0.2)


@pytest.mark.parametrize("sent", [b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n", b"\x00" * 4096, b"\x16\x03\x01\xff\xff"])
async def test_what_is_no_handshake_ends_its_connection_and_no_other(
    certificates: Certificates, hello: ScriptedEngine, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    context = trusting(certificates)

    async def use(url: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        writer.write(sent)
        writer.write_eof()
        await reader.read()
        writer.close()
        async with httpx2.AsyncClient(verify=context) as client:
            assert (await client.get(f"{url}/live")).status_code == 200

    caplog.set_level(logging.INFO)
    await serving(app({"m": hello}), Tls(certificates.cert, certificates.key), use)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_versions_before_1_2_are_refused(certificates: Certificates, hello: ScriptedEngine) -> None:
    context = trusting(certificates)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")

    async def use(url: str) -> None:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await serial_of(url, context)
        context.maximum_version = context.minimum_version = ssl.TLSVersion.TLSv1_2
        assert await serial_of(url, context)

    tls = Tls(certificates.cert, certificates.key)
    assert tls.context.minimum_version is ssl.TLSVersion.TLSv1_2
    await serving(app({"m": hello}), tls, use)


async def test_a_client_that_does_not_trust_the_certificate_does_not_talk(
    certificates: Certificates, hello: ScriptedEngine
) -> None:
    async def use(url: str) -> None:
        async with httpx2.AsyncClient() as client:
            with pytest.raises(httpx2.ConnectError):
                await client.get(f"{url}/live")

    await serving(app({"m": hello}), Tls(certificates.cert, certificates.key), use)


# -- files


def test_one_option_without_the_other_is_refused_and_neither_is_no_tls(certificates: Certificates) -> None:
    assert tls_of(None, None) is None
    for given, missing in (
        ((certificates.cert, None), "tls_key_path"),
        ((None, certificates.key), "tls_cert_path"),
    ):
        with pytest.raises(InvalidArgument, match="is needed with") as refused:
            tls_of(*given)
        assert refused.value.field == missing


@pytest.mark.parametrize(
    ("file", "content", "field", "what"),
    [
        ("cert", None, "tls_cert_path", "cannot be read"),
        ("key", None, "tls_key_path", "cannot be read"),
        ("cert", b"", "tls_cert_path", "no certificate"),
        ("key", b"no key", "tls_key_path", "no private key"),
        ("cert", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "tls_key_path", "does not go with"),
        ("key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "tls_key_path", "does not go with"),
    ],
)
def test_a_file_that_cannot_be_used_names_its_option(
    certificates: Certificates, file: str, content: bytes | None, field: str, what: str
) -> None:
    path: Path = getattr(certificates, file)
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=what) as refused:
        Tls(certificates.cert, certificates.key)
    assert refused.value.field == field
    assert str(path) in str(refused.value)


def test_a_key_of_another_certificate_is_refused(certificates: Certificates) -> None:
    certificates.ca.issue_cert("x").private_key_pem.write_to_path(certificates.key)
    with pytest.raises(InvalidArgument, match="does not go with"):
        Tls(certificates.cert, certificates.key)


def test_a_key_with_a_passphrase_is_refused_and_nothing_is_read_from_the_terminal(certificates: Certificates) -> None:
    key = load_pem_private_key(certificates.key.read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    certificates.key.write_bytes(locked)
    with pytest.raises(InvalidArgument, match="locked with a passphrase") as refused:
        Tls(certificates.cert, certificates.key)
    assert refused.value.field == "tls_key_path"
