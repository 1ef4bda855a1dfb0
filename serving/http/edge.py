"""Edge: an app whose every answer has a request id, whose messages name their request, and that may keep an access log.

It stands outside of everything else that answers: error pages, middlewares, the metrics page.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from ..log_format import current_fields
from .metrics import Refusals
from .options import HttpOptions
from .problems import INTERNAL
from .reply import reply_problem
from .request import KEY, RequestRecord

_access = logging.getLogger("serving.access")

Handlers = dict[Any, Callable[..., Awaitable[Any]]]


class Edge(Starlette):
    """A Starlette app with a record of each request in its scope; paths are exact."""

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
        """What Starlette builds, less its `ServerErrorMiddleware`.

        That keeps a coroutine and a closure of each open request, 0.6 KB; what it does is done in `__call__`.
        """
        stack: ASGIApp = ExceptionMiddleware(self.router, handlers=self.exception_handlers)
        for cls, args, kwargs in reversed(self.user_middleware):
            stack = cls(stack, *args, **kwargs)
        return stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. The line of the access log is written when the answer has ended, however it did.

        Where the app raises before there is an answer this gives one; the server logs what was raised.
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
                await reply_problem(record.send, INTERNAL, record)
            raise
        finally:
            if self._options.access_log and _access.isEnabledFor(logging.INFO):
                record.log_access()
            current_fields.set(outer)  # the token of a reset would be kept for as long as the request
            # The scope and the record refer to each other, and tasks that outlive the request have the record's fields:
            # neither may keep the request.
            del scope[KEY]
            record.close()
