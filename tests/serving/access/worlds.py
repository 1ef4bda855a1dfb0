"""An app that wants keys, a client of it, and certificates."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import trustme
from attrs import define, field
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.testing import ScriptedEngine
from serving.access import ApiKey, KeyRing, hash_of
from serving.http import Access, app
from serving.http.caller import caller_of
from tests.serving.worlds import Exchange, last, request_to, token

KEY = "penstock-0123456789abcdefghijklmnopqrstuv"
OTHER = KEY[::-1]


def bearer(key: str = KEY) -> dict[str, str]:
    """Return the header with a key."""
    return {"authorization": f"Bearer {key}"}


def ring(**known: Any) -> KeyRing:
    """Return a ring of one valid key: `KEY`, with the name `a` and these fields."""
    return KeyRing([ApiKey(name="a", hash=hash_of(KEY), **known)])


def guarded(engine: Any, keys: KeyRing, **options: Any) -> Starlette:
    """Return an app that wants these keys, with the models `m` and `n`."""
    return app({"m": engine, "n": engine}, access=Access(keys), **options)


def watched(service: Starlette, seen: list[Any]) -> Starlette:
    """Return the app, which appends the caller of each request that reaches its routes to `seen`."""
    router = service.router

    async def spy(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(caller_of(scope))
        await router(scope, receive, send)

    service.router = spy  # type: ignore[assignment]
    return service


def hello() -> ScriptedEngine:
    """Return an engine that answers `Hello` in two tokens."""
    return ScriptedEngine([token("Hel"), token("lo"), last()])


async def page(service: ASGIApp, path: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Exchange:
    """Return the answer to a GET of this path with these headers."""
    return await request_to(service, path, method=method, headers=headers or {}).run()


async def answered(service: ASGIApp, headers: list[tuple[bytes, bytes]], path: str = "/v1/models") -> tuple[Any, ...]:
    """Return status, headers and body of the answer to a GET with exactly these headers. No body may be read before."""
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


@define
class Certificates:
    """A CA, and the two files of a server's certificate, which can be written anew."""

    folder: Path
    ca: trustme.CA = field(factory=trustme.CA)

    @property
    def cert(self) -> Path:
        return self.folder / "cert.pem"

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"

    @property
    def ca_file(self) -> Path:
        path = self.folder / "ca.pem"
        self.ca.cert_pem.write_to_path(path)
        return path

    def issue(self, *hosts: str) -> Certificates:
        """Write a new certificate and its key."""
        made = self.ca.issue_cert(*(hosts or ("127.0.0.1", "localhost")))
        self.write(self.cert, b"".join(part.bytes() for part in made.cert_chain_pems))
        self.write(self.key, made.private_key_pem.bytes())
        return self

    def write(self, path: Path, content: bytes) -> None:
        """Write a file, with a time of its own: two writes may fall into one tick of the file system's clock."""
        later = path.stat().st_mtime_ns + 10**9 if path.exists() else None
        path.write_bytes(content)
        if later is not None:
            os.utime(path, ns=(later, later))
