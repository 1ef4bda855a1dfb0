"""The status app of a worker's process: whether its endpoints are ready, and its metrics.

Source: dynamo lib/runtime/src/system_status_server.rs. Left out are its engine, adapter and metadata routes.

The app of the admin address of several processes: the state of each, and the metrics of all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio
from attrs import asdict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from engines import SystemHealth
from pipeline.settings import Variable, url_path, whole

from ..openai import encode
from .edge import Edge
from .metrics import Telemetry
from .options import HttpOptions

if TYPE_CHECKING:
    from ..processes import ProgramState


HEALTH_PATH = Variable("DYN_SYSTEM_HEALTH_PATH", "/health", "Path of a worker's health on its status port.", url_path)
LIVE_PATH = Variable("DYN_SYSTEM_LIVE_PATH", "/live", "Path of a worker's liveness on its status port.", url_path)


def _port(text: str) -> int | None:
    return None if text.startswith("-") and text[1:].isdecimal() else whole(0, 2**16 - 1)(text)


_WORDS = {True: "ready", False: "notready"}

STATUS_PORT: Variable[int | None] = Variable(
    "DYN_SYSTEM_PORT", None, "Port of a worker's status, on all addresses; 0 takes a free one, below 0: none.", _port
)


def status_app(health: SystemHealth, telemetry: Telemetry, environment: Mapping[str, str]) -> Edge:
    """Return an app whose `/health` and `/live` answer 200 while the process is healthy, else 503, and `/metrics`.

    Call it where a loop runs: the uptime is measured by its clock.
    """
    begun_s = anyio.current_time()

    async def state(_: Request) -> Response:
        ready = health.is_healthy
        endpoints = {name: _WORDS[is_ready] for name, is_ready in health.endpoints.items()}
        uptime_s = round(anyio.current_time() - begun_s, 3)
        body = encode({"status": _WORDS[ready], "uptime": uptime_s, "endpoints": endpoints})
        return Response(body, 200 if ready else 503, media_type="application/json")

    async def metrics(_: Request) -> Response:
        return Response(telemetry.text(), media_type=telemetry.media_type)

    routes = [
        Route(HEALTH_PATH.of(environment), state),
        Route(LIVE_PATH.of(environment), state),
        Route("/metrics", metrics),
    ]
    return Edge(routes, {HTTPException: _unroutable}, HttpOptions(), telemetry.refusals)


def group_app(metrics: Callable[[], Awaitable[str]], states: Callable[[], Sequence[ProgramState]]) -> Edge:
    """Return an app with `/metrics`, `/live`, and `/health`: 200 once every process serves, else 503; with all states.

    `metrics` returns the text of all processes, `states` the state of each.
    """
    telemetry = Telemetry()

    async def health(_: Request) -> Response:
        found = states()
        is_ready = all(each.is_ready for each in found)
        body = {"status": "healthy" if is_ready else "not_ready", "processes": [asdict(each) for each in found]}
        return Response(encode(body), 200 if is_ready else 503, media_type="application/json")

    async def live(_: Request) -> Response:
        return Response(encode({"status": "live"}), media_type="application/json")

    async def all_metrics(_: Request) -> Response:
        return Response(await metrics(), media_type=Telemetry.media_type)

    routes = [Route("/health", health), Route("/live", live), Route("/metrics", all_metrics)]
    return Edge(routes, {HTTPException: _unroutable}, HttpOptions(), telemetry.refusals)


async def _unroutable(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = "Route not found" if error.status_code == 404 else error.detail
    return PlainTextResponse(text, error.status_code, error.headers)
