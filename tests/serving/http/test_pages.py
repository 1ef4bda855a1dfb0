"""The small answers around the two APIs, and mounting the app in another one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

from operators import Detokenize, Model, Preprocess
from pipeline.telemetry import traced
from pipeline.testing import ScriptedEngine
from serving.deployment import GraphConfig, HostOptions, hosted_graph
from serving.http import HttpOptions, app
from tests.serving.worlds import Exchange, last, request_to, token


@pytest.fixture
def service() -> Starlette:
    """An app with two models, one of which ends like a question for readiness."""
    return app({"foo": ScriptedEngine([]), "shadow/ready": ScriptedEngine([])})


async def page(service: Starlette, path: str, method: str = "GET") -> Exchange:
    return await request_to(service, path, method=method, headers={}).run()


async def test_all_models_are_listed(service: Starlette) -> None:
    answer = await page(service, "/v1/models")
    assert answer.json["object"] == "list"
    assert [model["id"] for model in answer.json["data"]] == ["foo", "shadow/ready"]
    assert {(model["object"], model["owned_by"]) for model in answer.json["data"]} == {("model", "penstock")}
    assert not {"context_window", "max_output_tokens"} & answer.json["data"][0].keys()


async def test_sizes_of_models_can_be_overridden() -> None:
    options = HttpOptions(context_window_tokens=123, max_output_tokens=45)
    answer = await page(app({"m": ScriptedEngine([])}, options=options), "/v1/models/m")
    assert (answer.json["context_window"], answer.json["max_output_tokens"]) == (123, 45)


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/v1/models/foo", 200, {"id": "foo"}),
        ("/v1/models/shadow/ready", 200, {"id": "shadow/ready"}),
        ("/v1/models/foo/ready", 200, {"model": "foo", "namespaces": {}}),
        ("/v1/models/foo/readiness", 404, {"code": 404}),
        ("/v1/models/shadow", 404, {"message": "Model not found"}),
        ("/health", 200, {"status": "healthy"}),
        ("/live", 200, {"status": "live"}),
    ],
)
async def test_pages(service: Starlette, path: str, status: int, body: dict[str, Any]) -> None:
    answer = await page(service, path)
    assert answer.status == status
    assert body.items() <= answer.json.items()


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models/foo/", "/health/", "/", "/v1/files", "/busy_threshold"])
async def test_there_are_no_other_pages(service: Starlette, path: str) -> None:
    answer = await page(service, path)
    assert (answer.status, answer.json["type"]) == (404, "Not Found")


class Pool(ScriptedEngine):
    def members(self) -> list[str]:
        return ["ns/b/ep/2", "ns/a/ep/1", "ns/b/ep/1"]


async def test_paths_can_be_chosen() -> None:
    variables = {"CHAT": "/c", "CMP": "/t", "MODELS": "/m", "HEALTH": "/h", "LIVE": "/l", "METRICS": "/s"}
    environment = {f"DYN_HTTP_SVC_{name}_PATH": path for name, path in variables.items()}
    moved = app({"m": ScriptedEngine([])}, options=HttpOptions.from_environment(environment))
    found = {
        path: (await request_to(moved, path, method="GET").run()).status for path in ("/m", "/m/m", "/h", "/l", "/s")
    }
    assert set(found.values()) == {200}
    for path in ("/c", "/t"):
        assert (await request_to(moved, path, b"", headers={"content-type": "text/plain"}).run()).status == 415
    assert (await request_to(moved, "/v1/models", method="GET").run()).status == 404


async def test_health_names_the_instances_there_are() -> None:
    answer = await page(app({"m": Pool([]), "n": Pool([])}), "/health")
    assert answer.json == {
        "status": "healthy",
        "endpoints": ["ns/a/ep", "ns/b/ep"],
        "instances": ["ns/a/ep/1", "ns/b/ep/1", "ns/b/ep/2"],
        "roles": {"aggregated": ["ns/a/ep/1", "ns/b/ep/1", "ns/b/ep/2"]},
    }


async def test_health_names_the_workers_of_both_halves_by_role() -> None:
    config = GraphConfig(engine="mocker", workers=2, prefill_workers=1)
    async with hosted_graph(config, HostOptions({})) as opened:
        health = (await page(app(opened.graph), "/health")).json
        decode, prefill = (
            sorted(f"{worker.endpoint}/{worker.worker_id}" for worker in those)
            for those in (opened.workers, opened.prefill_workers)
        )
        assert health["roles"] == {"decode": decode, "prefill": prefill}
        assert health["instances"] == sorted([*decode, *prefill])
        assert health["endpoints"] == ["dyn://penstock.backend.generate", "dyn://penstock.prefill.generate"]


@pytest.mark.parametrize("outer", ["starlette", "fastapi"])
async def test_the_app_can_be_mounted_under_a_prefix(outer: str) -> None:
    inner = app({"m": ScriptedEngine([token("a"), last()])})
    if outer == "fastapi":
        mounted: Any = FastAPI()
        mounted.mount("/llm", inner)
    else:
        mounted = Starlette(routes=[Mount("/llm", inner)])
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    answer = await request_to(mounted, "/llm/v1/chat/completions", body).run()
    assert answer.text == "a"
    assert (await page(mounted, "/llm/v1/chat/completions")).status == 405
    unknown = await page(mounted, "/llm/nope")
    assert unknown.json["message"] == "Route not found: GET /llm/nope"


async def test_a_single_graph_serves_under_the_name_of_its_model() -> None:
    model = Model.byte_level("tiny", context_length=77)
    graph = Preprocess(model) >> Detokenize(model) >> ScriptedEngine([])
    for served in (graph, traced(graph)):
        answer = await page(app(served), "/v1/models")
        assert [(each["id"], each["context_window"]) for each in answer.json["data"]] == [("tiny", 77)]


def test_a_single_graph_without_a_model_needs_a_name() -> None:
    with pytest.raises(ValueError, match="mapping"):
        app(ScriptedEngine([]))


async def test_a_bug_of_ours_shows_nothing_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    service = app({"m": ScriptedEngine([])})
    monkeypatch.setattr("serving.http.application.to_json", lambda _: 1 / 0)
    exchange = request_to(service, "/v1/models", method="GET")
    with pytest.raises(ZeroDivisionError):  # for the server's log
        await exchange.run()
    assert exchange.status == 500
    assert json.loads(exchange.content)["message"] == "Internal server error"
