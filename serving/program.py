"""What the commands do, once their options are known to be right."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from .config import GraphConfig
from .environment import integer
from .graphs import standard_graph
from .http import Availability, HttpOptions, Telemetry, app, served
from .server import GRACE_S, HttpServer, serve


async def serve_graph(
    config: GraphConfig,
    listener: socket.socket,
    environment: Mapping[str, str],
    say: Callable[[str], object],
    *,
    access_log: bool = False,
) -> None:
    """Serves the standard graph until a signal; says where and which models. Raises InvalidArgument."""
    async with standard_graph(config) as graph:
        models = ", ".join(served(graph))
        availability = Availability()
        application = app(
            graph,
            options=HttpOptions.from_environment(environment),
            availability=availability,
            telemetry=Telemetry(prefix=environment.get("DYN_METRICS_PREFIX"), environment=environment),
        )
        server = HttpServer(application, listener, access_log=access_log)
        _settle()
        grace_s = integer(environment.get("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS"), 0, 10**9)
        ready = partial(say, f"Serving {models} at {server.url}")
        await serve(server, availability, ready, GRACE_S if grace_s is None else grace_s)


def _settle() -> None:
    """Takes what start-up has made, which stays anyway, out of every later garbage collection.

    A collection of it all holds up every stream for some 25 ms.
    """
    gc.collect()
    gc.freeze()


async def draw_graph(
    config: GraphConfig, form: Literal["text", "mermaid", "dot"], say: Callable[[str], object]
) -> None:
    """Says the drawing of the standard graph."""
    async with standard_graph(config) as graph:
        say(graph.draw(form))
