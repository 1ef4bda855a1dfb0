"""Access: what stands before an application: proxies' headers, CORS, keys.

    request ──► client's address ──► CORS ──► key and rate ──► application

Each is there only where it is set. None of them changes `send` of a request, but CORS, which is off by default.
"""

from __future__ import annotations

from collections.abc import Iterable

import anyio
from attrs import frozen
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ..access import KeyRing, TooFast, TrustedProxies
from .caller import identify
from .options import HttpOptions
from .problems import Problem
from .reply import reply_problem
from .request import RequestRecord

NO_KEY = Problem(
    401, "Missing or wrong API key: expected `Authorization: Bearer KEY` or `x-api-key: KEY`", "validation"
)
"""The one answer to no key, a wrong one, and more than one."""

_FOR_PROBES = ("GET", "HEAD")


@frozen
class Access:
    """Who may use an app; by default every client that reaches it."""

    keys: KeyRing | None = None
    proxies: TrustedProxies | None = None
    cors_origins: tuple[str, ...] = ()

    def middleware(self, options: HttpOptions) -> list[Middleware]:
        """What Starlette runs before the routes, outermost first."""
        found: list[Middleware] = []
        if self.proxies:
            found.append(Middleware(_around, self.proxies))
        if self.cors_origins:
            # A preflight comes without a key, so this is outside of the keys. Keys are headers that a page must know,
            # not cookies that the browser adds, so no credentials are allowed and any origin may be.
            found.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=self.cors_origins,
                    allow_methods=("GET", "POST"),
                    allow_headers=("*",),
                    expose_headers=("*",),
                )
            )
        if self.keys is not None:
            found.append(Middleware(KeyGuard, self.keys, (options.live_path, options.health_path)))
        return found


def _around(app: ASGIApp, proxies: TrustedProxies) -> ASGIApp:
    application: ASGIApp = proxies.around(app)
    return application


class KeyGuard:
    """Lets requests with a valid key through, in the rate of the key; others get 401 and 429.

    GET of the `open_paths`, for probes, needs no key and counts for no rate.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: Iterable[str]) -> None:
        self._app = app
        self._keys = keys
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held = self._keys.find(sent_key(scope["headers"]))
        identify(scope, held)
        if not self._is_open(scope):
            refusal = NO_KEY if held is None else _refusal(held.admit(anyio.current_time()))
            if refusal is not None:
                await reply_problem(send, refusal, RequestRecord.of(scope))
                return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path: str = scope["path"]
        return path.removeprefix(scope.get("root_path", "")) in self._open and scope["method"] in _FOR_PROBES


def sent_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The one key in the headers; empty if there is none, or there are several that differ."""
    found: set[bytes] = set()
    for name, value in headers:
        if name == b"x-api-key":
            found.add(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                found.add(key.strip())
    return found.pop() if len(found) == 1 else b""


def _refusal(too_fast: TooFast | None) -> Problem | None:
    if too_fast is None:
        return None
    text = f"This key may use {too_fast.threshold:g} {too_fast.name.replace('_', ' ')}"
    return Problem(429, text, "overload", retry_after_s=too_fast.retry_after_s, exceeded=too_fast.exceeded)
