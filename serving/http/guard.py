"""Access: what stands before an application: proxies' headers, CORS, keys.

    request ──► client's address ──► CORS ──► key and rate ──► application

Each is there only if it is configured. Only CORS, which is off by default, changes the `send` of a request.
"""

from __future__ import annotations

from collections.abc import Iterable

import anyio
from attrs import frozen
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ..access import KeyRing, TooFast, TrustedProxies
from ..problems import Problem
from .caller import identify
from .options import HttpOptions
from .request import RequestRecord

NO_KEY = Problem(
    401, "Missing or wrong API key: expected `Authorization: Bearer KEY` or `x-api-key: KEY`", "validation"
)
"""The answer to a request without a key, with a wrong key, or with more than one."""

_FOR_PROBES = ("GET", "HEAD")


@frozen
class Access:
    """Who may use an app; by default, every client that reaches it."""

    keys: KeyRing | None = None
    """Valid keys; None: no key is needed."""
    proxies: TrustedProxies | None = None
    """Proxies whose headers name the client; None: there are none."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may use the app from a browser."""

    def middleware(self, options: HttpOptions) -> list[Middleware]:
        """Return what Starlette runs before the routes, outermost first."""
        found: list[Middleware] = []
        if self.proxies:
            found.append(Middleware(self.proxies.around))
        if self.cors_origins:
            # A preflight request has no key, so CORS stands outside the keys. A key is a header that a page must know,
            # not a cookie that the browser adds, so credentials stay off and any origin may be allowed.
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


class KeyGuard:
    """Passes on requests with a valid key, within the rate of the key; the others get 401 and 429.

    GET of an open path, for probes, needs no key and counts against no rate.
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
                await RequestRecord.of(scope).reply_problem(send, refusal)
                return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path: str = scope["path"]
        return path.removeprefix(scope.get("root_path", "")) in self._open and scope["method"] in _FOR_PROBES


def sent_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the key in the headers; empty if there is none, or several different ones."""
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
    text = f"This key may use {too_fast.threshold:.15g} {too_fast.name.replace('_', ' ')}"
    return Problem(429, text, "overload", retry_after_s=too_fast.retry_after_s, exceeded=too_fast.exceeded)
