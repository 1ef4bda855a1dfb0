"""An app over a Switch: its models come and go while it serves."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import ASGIApp

from operators import Switch
from pipeline import Segment
from pipeline.testing import Probe, ScriptedEngine
from serving.http import app
from tests.serving.worlds import chat, last, request_to, token


class Pool(ScriptedEngine):
    """An engine that is a pool of one instance."""

    def __init__(self, name: str) -> None:
        super().__init__([token(name), last()])
        self.instance = name

    def members(self) -> list[str]:
        return [f"ns/{self.instance}/generate/1"]


async def listed(service: ASGIApp) -> list[str]:
    answer = await request_to(service, "/v1/models", method="GET").run()
    return [model["id"] for model in answer.json["data"]]


async def text_of(service: ASGIApp, model: str) -> str:
    return (await chat(service, model=model, stream=True).run()).text


@pytest.fixture
def switch() -> Switch[Any, Any]:
    return Switch({"a": Pool("a"), "b": Pool("b")})


async def test_each_model_answers_under_its_name_and_all_are_listed(switch: Switch[Any, Any]) -> None:
    service = app(switch)
    assert await listed(service) == ["a", "b"]
    assert [await text_of(service, name) for name in "ab"] == ["a", "b"]
    refused = await chat(service, model="c").run()
    assert (refused.status, refused.json["message"]) == (404, "Model not found")


async def test_models_come_and_go_while_the_app_serves(switch: Switch[Any, Any]) -> None:
    service = app(switch)
    assert await text_of(service, "a") == "a"
    switch.remove("a")
    assert await listed(service) == ["b"]
    assert (await chat(service, model="a").run()).status == 404
    assert (await request_to(service, "/v1/models/a", method="GET").run()).status == 404
    switch.add("a", Pool("new"))
    switch.add("c", Pool("c"))
    assert await listed(service) == ["b", "a", "c"]
    assert [await text_of(service, name) for name in "ac"] == ["new", "c"]


async def test_stages_above_the_switch_take_the_requests_of_all_models(switch: Switch[Any, Any]) -> None:
    probe = Probe()
    graph: Segment[Any, Any] = probe >> switch
    service = app(graph)
    assert await listed(service) == ["a", "b"]
    assert [await text_of(service, name) for name in "ab"] == ["a", "b"]
    assert probe.requests == 2
    assert (await chat(service, model="c").run()).status == 404


async def test_health_shows_the_instances_of_all_models(switch: Switch[Any, Any]) -> None:
    answer = await request_to(app(Probe() >> switch), "/health", method="GET").run()
    assert answer.json["instances"] == ["ns/a/generate/1", "ns/b/generate/1"]


async def test_without_any_model_the_app_is_not_ready() -> None:
    switch: Switch[Any, Any] = Switch()
    service = app(switch)
    assert await listed(service) == []
    assert (await chat(service).run()).status == 503
    health = await request_to(service, "/health", method="GET").run()
    assert (health.status, health.json["stage"]) == (503, "no_model")
    switch.add("m", Pool("m"))
    assert await text_of(service, "m") == "m"
    assert (await request_to(service, "/health", method="GET").run()).status == 200


async def test_a_model_that_is_awaited_is_not_listed_and_clients_come_back_later(switch: Switch[Any, Any]) -> None:
    service = app(switch)
    switch.remove("a")
    switch.expect("a")
    assert await listed(service) == ["b"]
    refused = await chat(service, model="a").run()
    assert (refused.status, refused.json["message"]) == (503, "No worker of the model is there now")
    assert (await chat(service, model="c").run()).status == 404
    switch.add("a", Pool("back"))
    assert await text_of(service, "a") == "back"
