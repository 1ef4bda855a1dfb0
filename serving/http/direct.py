"""Direct: the way to the generation APIs past Starlette's routing and its handlers of exceptions.

These are coroutines and closures around each request for as long as it is open, 2 KB of memory, and the APIs need none
of them: they answer every error themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send


class Direct:
    """A middleware, the innermost: POST to one of these very paths goes to its app, all else to `app`."""

    def __init__(self, app: ASGIApp, paths: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._paths = dict(paths)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """See ASGI; no coroutine of its own. Where the whole is mounted below a path, routing is needed."""
        app = self._app
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            app = self._paths.get(scope["path"], app)
        return app(scope, receive, send)
