"""Switch: a request goes to the graph of the model that it names, and to no other."""

from __future__ import annotations

from typing import Any

import pytest

from operators import ModelNotFound, Switch
from operators.switch import AWAITED_MAX
from pipeline import Annotated, Context, InvalidArgument, LinkError, Unavailable, identity, link
from pipeline.errors import may_migrate
from pipeline.protocols import PreprocessedRequest
from pipeline.testing import Probe, ScriptedEngine, Stall, check_engine
from pipeline.wire import from_json, to_json


def request(model: str) -> Context[PreprocessedRequest]:
    return Context(PreprocessedRequest([1], model=model))


async def test_it_holds_the_contract_of_an_engine() -> None:
    await check_engine(
        lambda: Switch({"a": ScriptedEngine(list(range(40))), "b": ScriptedEngine([])}),
        request=PreprocessedRequest([1], model="a"),
        expected=list(range(40)),
        bad_request=PreprocessedRequest([1], model="c"),
    )


async def test_a_request_goes_to_the_graph_of_its_model_unchanged() -> None:
    engines = {name: ScriptedEngine([name]) for name in ("a", "b")}
    sent = request("b")
    assert await (await Switch(engines).generate(sent)).collect() == ["b"]
    assert engines["b"].requests == [sent]
    assert engines["a"].requests == []


async def test_a_graph_may_have_several_names() -> None:
    engine = ScriptedEngine([1])
    switch: Switch[Any, Any] = Switch({"a": engine, "alias": engine})
    for name in ("a", "alias"):
        assert await (await switch.generate(request(name))).collect() == [1]
    assert [each.payload.model for each in engine.requests] == ["a", "alias"]


@pytest.mark.parametrize("name", ["", "A", "a ", "c"])
async def test_a_model_that_is_not_served_is_not_found(name: str) -> None:
    engine = ScriptedEngine([1])
    with pytest.raises(ModelNotFound) as caught:
        await Switch({"a": engine}).generate(request(name))
    assert (caught.value.status, caught.value.message, engine.requests) == (404, "Model not found", [])
    assert not may_migrate(caught.value)


def test_not_found_keeps_its_class_and_status_between_processes() -> None:
    item = from_json(to_json(Annotated[Any].from_error(ModelNotFound())), Annotated[Any])
    came = item.extract_error()
    assert type(came) is ModelNotFound
    assert came.status == 404


async def test_graphs_come_and_go_while_requests_run() -> None:
    first, second = ScriptedEngine([1, Stall(), 2]), ScriptedEngine([3])
    switch: Switch[Any, Any] = Switch({"a": first})
    async with await switch.generate(request("a")) as stream:
        assert await anext(stream) == 1
        switch.remove("a")
        with pytest.raises(ModelNotFound):
            await switch.generate(request("a"))
        switch.add("a", second)
        assert await (await switch.generate(request("a"))).collect() == [3]
        assert first.open == 1  # the removed graph goes on with what it took
        stream.context.control.stop()
        assert await stream.collect() == []
    assert (first.open, second.open) == (0, 0)


async def test_requests_for_a_model_that_is_awaited_are_unavailable_until_it_is_back() -> None:
    switch: Switch[Any, Any] = Switch({"a": ScriptedEngine([1])})
    switch.remove("a")
    switch.expect("a")
    switch.expect("a")
    assert list(switch.awaited) == ["a"]
    with pytest.raises(Unavailable, match="no worker of 'a'"):
        await switch.generate(request("a"))
    with pytest.raises(ModelNotFound):
        await switch.generate(request("b"))
    switch.add("a", ScriptedEngine([2]))
    assert await (await switch.generate(request("a"))).collect() == [2]
    assert not switch.awaited


def test_of_many_names_that_are_awaited_the_oldest_are_forgotten() -> None:
    switch: Switch[Any, Any] = Switch()
    for number in range(AWAITED_MAX + 5):
        switch.add(f"m{number}", ScriptedEngine([]))
        switch.remove(f"m{number}")
        switch.expect(f"m{number}")
    assert len(switch.awaited) == AWAITED_MAX
    assert "m4" not in switch.awaited
    assert "m5" in switch.awaited


def test_a_name_has_one_graph() -> None:
    switch: Switch[Any, Any] = Switch({"a": ScriptedEngine([])})
    for name, message in (("a", "served already"), ("", "empty"), ("  ", "empty")):
        with pytest.raises(InvalidArgument, match=message):
            switch.add(name, ScriptedEngine([]))
    with pytest.raises(InvalidArgument, match="not served"):
        switch.remove("b")
    assert list(switch.graphs) == ["a"]


async def test_stages_above_are_shared_and_those_of_a_model_are_its_own() -> None:
    shared, own = Probe(), Probe()
    graph = shared >> Switch({"a": own >> ScriptedEngine([1]), "b": ScriptedEngine([2])})
    assert await (await graph.generate(request("a"))).collect() == [1]
    assert await (await graph.generate(request("b"))).collect() == [2]
    assert (shared.requests, own.requests) == (2, 1)


def test_it_ends_a_graph_and_its_graphs_are_drawn() -> None:
    switch: Switch[Any, Any] = Switch({"a": identity() >> ScriptedEngine([1]), "b": ScriptedEngine([2])})
    with pytest.raises(LinkError, match="nothing can follow"):
        link(switch, ScriptedEngine([1]))
    drawing = (identity() >> switch).draw()
    assert "a ─► Identity" in drawing
    assert "b ─► ScriptedEngine" in drawing
