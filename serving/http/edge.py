"""Edge: the outermost application, and the short way past Starlette's routing to the generation APIs.

Every answer of an Edge has a request id, and every message of a request's tasks names that request; it can keep an
access log. It surrounds everything else that answers: error pages, middlewares, the metrics page.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.telemetry import Tracer

from ..log_format import current_fields
from ..problems import INTERNAL
from .metrics import Refusals
from .options import HttpOptions
from .request import KEY, RequestRecord
from .server_span import STATUS_CODE, ServerSpan

_access = logging.getLogger("serving.access")

Handlers = dict[Any, Callable[..., Awaitable[Any]]]
"""Starlette's exception handlers, by the exception's class."""


class Edge(Starlette):
    """A Starlette app with a `RequestRecord` in the scope of each request. Paths are matched exactly."""

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        exception_handlers: Handlers,
        options: HttpOptions,
        refusals: Refusals,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        super().__init__(routes=routes, exception_handlers=exception_handlers, middleware=middleware)
        self.router.redirect_slashes = False
        self._options, self._refusals = options, refusals

    def build_middleware_stack(self) -> ASGIApp:
        """Return what Starlette builds, without its `ServerErrorMiddleware`.

        That keeps a coroutine and a closure of each open request, 0.6 KB; `__call__` does the same work.
        """
        stack: ASGIApp = ExceptionMiddleware(self.router, handlers=self.exception_handlers)
        for cls, args, kwargs in reversed(self.user_middleware):
            stack = cls(stack, *args, **kwargs)
        return stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. The line of the access log is written when the answer has ended in any way.

        If the app raises before its answer begins, this answers with status 500; the server logs the error.
        """
        if scope["type"] != "http" or KEY in scope:
            await super().__call__(scope, receive, send)
            return
        record = scope[KEY] = RequestRecord(scope, send, self._refusals, self._options.shows_workers)
        scope["app"] = self
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        outer = current_fields.get()
        current_fields.set(record.fields)
        try:
            await self.middleware_stack(scope, receive, record.send)
        except Exception:
            if not record.status:
                await record.reply_problem(record.send, INTERNAL)
            raise
        finally:
            if self._options.access_log and _access.isEnabledFor(logging.INFO):
                record.log_access()
            current_fields.set(outer)  # the token of a reset would be kept for as long as the request
            # The scope and the record refer to each other, and tasks that outlive the request hold the record's
            # `fields`: neither may keep the request alive.
            del scope[KEY]
            record.close()


class DirectRoutes:
    """The innermost middleware: a POST to one of these exact paths goes to its application, all else to `app`.

    Starlette's routing and exception handlers are coroutines and closures around each open request, 2 KB of memory. The
    generation APIs need none of them: they answer every error themselves.
    """

    def __init__(self, app: ASGIApp, paths: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._paths = dict(paths)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """See ASGI; adds no coroutine of its own. An app that is mounted below a path needs the routing."""
        app = self._app
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            app = self._paths.get(scope["path"], app)
        return app(scope, receive, send)


class TracedEndpoint:
    """An endpoint with a span around each request; `route` is its path."""

    def __init__(self, endpoint: ASGIApp, route: str, tracer: Tracer) -> None:
        self._endpoint, self._route, self._tracer = endpoint, route, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. The span ends after the endpoint has closed everything it opened."""
        record = RequestRecord.of(scope)
        span = record.span = ServerSpan.begin(scope, record.headers.values, self._route, record.id, self._tracer)

        async def recording(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.annotate({STATUS_CODE: message["status"]})
            await send(message)

        try:
            await self._endpoint(scope, receive, recording if span.is_recording else send)
        except BaseException as error:
            span.end(error)
            raise
        span.end(None)
