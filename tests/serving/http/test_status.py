"""The status app of a worker's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from engines import SystemHealth
from serving.http import STATUS_PORT, Telemetry, status_app
from tests.serving.worlds import request_to

RequestTo = Callable[..., Any]


async def test_readiness_flips_between_200_and_503() -> None:
    health = SystemHealth()
    health.register("ns/c/e/1", is_target=True, is_probed=True)
    health.register("ns/c/other/2", is_probed=True)
    app = status_app(health, Telemetry(), {})
    await anyio.sleep(3)
    for ready, status, word in ((False, 503, "notready"), (True, 200, "ready"), (False, 503, "notready")):
        health.set_ready("ns/c/e/1", ready)
        for path in ("/health", "/live"):
            answer = await request_to(app, path, method="GET").run()
            endpoints = {"ns/c/e/1": word, "ns/c/other/2": "notready"}
            expected = {"status": word, "uptime": pytest.approx(3), "endpoints": endpoints}
            assert (answer.status, answer.json) == (status, expected)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("GET", path, 404) for path in ("/", "/nowhere", "/health/", "/metrics/", "/v1/models")),
        ("POST", "/health", 405),
    ],
)
async def test_an_unknown_path_is_answered_as_text(method: str, path: str, status: int) -> None:
    answer = await request_to(status_app(SystemHealth(), Telemetry(), {}), path, method=method).run()
    text = b"Route not found" if status == 404 else b"Method Not Allowed"
    assert (answer.status, answer.content) == (status, text)


async def test_its_paths_may_be_others() -> None:
    environment = {"DYN_SYSTEM_HEALTH_PATH": "/fit", "DYN_SYSTEM_LIVE_PATH": "no path"}
    app = status_app(SystemHealth(process_ready=True), Telemetry(), environment)
    statuses = [(await request_to(app, path, method="GET").run()).status for path in ("/fit", "/health", "/live")]
    assert statuses == [200, 404, 200]


async def test_the_metrics_are_those_of_the_program() -> None:
    telemetry = Telemetry()
    telemetry.component_metrics.set("total_blocks", 7, dp_rank="0", **dict.fromkeys(LABELS, "x"))
    telemetry.add_text(lambda: "native 1\n")
    answer = await request_to(status_app(SystemHealth(), telemetry, {}), "/metrics", method="GET").run()
    assert answer.response_headers["content-type"] == telemetry.media_type
    assert b"dynamo_component_total_blocks{" in answer.content
    assert answer.content.endswith(b"\nnative 1\n")


LABELS = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint", "worker_id")


@pytest.mark.parametrize(
    ("text", "port"),
    [
        (None, None),
        *((text, None) for text in ("", "-1", "-8080", "65536", "9" * 5000, "http", "8.0", "²")),
        *((text, int(text)) for text in ("0", "8081", "65535", " 8081 ")),
    ],
)
def test_a_server_is_wanted_where_the_port_is_one(text: str | None, port: int | None) -> None:
    assert STATUS_PORT.of({} if text is None else {"DYN_SYSTEM_PORT": text}) == port
