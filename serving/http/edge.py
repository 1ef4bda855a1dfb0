"""Edge: an app whose every answer has a request id, whose messages name their request, and that may keep an access log.

It stands outside of everything else that answers: error pages, middlewares, the metrics page.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from ..log_format import current_fields
from .options import HttpOptions
from .refusals import Refusals
from .request_record import KEY, RequestRecord

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. The line of the access log is written when the answer has ended, however it did."""
        if scope["type"] != "http" or KEY in scope:
            await super().__call__(scope, receive, send)
            return
        record = scope[KEY] = RequestRecord(scope, send, self._refusals, self._options.shows_workers)
        token = current_fields.set(record.fields)
        try:
            await super().__call__(scope, receive, record.send)
        finally:
            if self._options.access_log and _access.isEnabledFor(logging.INFO):
                record.log_access()
            current_fields.reset(token)
