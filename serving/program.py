"""What the commands do, once their options are known to be right."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Mapping
from typing import Literal

from .availability import Availability
from .config import GraphConfig
from .graphs import standard_graph
from .http import app
from .options import HttpOptions
from .server import HttpServer, serve
from .service import served
from .telemetry import Telemetry


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
        await serve(server, availability, lambda: say(f"Serving {models} at {server.url}"))


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
