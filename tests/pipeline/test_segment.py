"""Linking, looking, swapping; graphs as engines."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import pytest

from pipeline import (
    AsyncEngine,
    Context,
    GraphError,
    LinkError,
    Operator,
    ResponseStream,
    Segment,
    Stage,
    function_engine,
    identity,
    link,
    map_request,
    map_response,
)
from pipeline.engine import ErasedEngine
from pipeline.errors import EdgeAlreadySet, NoEdge, NoNetworkEdge
from pipeline.graph import Chain, LateEngine, SegmentSink
from pipeline.signatures import Signature
from pipeline.testing import Faults, OpenStreams, Probe, ScriptedEngine, check_engine


@function_engine
async def characters(text: str) -> AsyncIterator[str]:
    for character in text:
        yield character


class Echo(AsyncEngine[str, str]):
    shown_texts = ("suffix",)

    def __init__(self, suffix: str = "") -> None:
        self.suffix = suffix

    async def generate(self, request: Context[str]) -> ResponseStream[str]:
        return ResponseStream.of(request.payload + self.suffix, request)


class Twice(Operator[str, str, str, str]):
    def __init__(self, times: int = 2) -> None:
        self.times = times

    async def generate(self, request: Context[str], next: AsyncEngine[str, str]) -> ResponseStream[str]:
        stream = await next.generate(request)
        return ResponseStream(self._repeat(stream), request, stream)

    async def _repeat(self, stream: ResponseStream[str]) -> AsyncGenerator[str, None]:
        async with stream:
            async for item in stream:
                for _ in range(self.times):
                    if not stream.context.is_killed:
                        yield item


class Length(Operator[str, int, int, int]):
    async def generate(self, request: Context[str], next: AsyncEngine[int, int]) -> ResponseStream[int]:
        return await next.generate(request.map(len))


class Count(AsyncEngine[int, int]):
    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        return ResponseStream.of(range(request.payload), request)


class Routed(Echo):
    """An engine with a side branch and a pool."""

    def branches(self) -> dict[str, Stage]:
        return {"prefill": Twice() >> Echo("!")}

    def members(self) -> list[str]:
        return ["worker 1", "worker 2"]


async def collect(graph: AsyncEngine[Any, Any], payload: Any) -> list[Any]:
    return await (await graph.generate(Context(payload))).collect()


async def test_an_engine_answers_through_a_graph_item_by_item(open_streams: OpenStreams) -> None:
    assert len(await collect(identity() >> characters, "test")) == 4


async def test_the_request_changes_on_its_way_down_and_the_stream_on_its_way_up(open_streams: OpenStreams) -> None:

    def greet(text: str) -> str:
        return text + " world"

    graph = map_request(greet) >> Twice() >> characters
    assert len(await collect(graph, "test")) == 20


@pytest.mark.parametrize("keep_stream", [False, True])
async def test_a_dropped_graph_is_released_once_its_streams_are_gone(keep_stream: bool) -> None:
    """Without a garbage collection: nothing forms a cycle."""
    graph = Twice() >> Echo()
    stages: list[weakref.ref[Any]] = [weakref.ref(graph), *(weakref.ref(stage) for stage in graph.stages)]
    gc.disable()
    try:
        stream = await graph.generate(Context("ab"))
        assert await anext(stream) == "a"
        del graph
        if keep_stream:
            assert [item async for item in stream] == ["a", "b", "b"]
        await stream.aclose()
        del stream
        assert [stage() for stage in stages] == [None, None, None]
    finally:
        gc.enable()


class Shouts(Operator[str, str, str, str]):
    """Holds neither itself nor the next stage in its stream."""

    async def generate(self, request: Context[str], next: AsyncEngine[str, str]) -> ResponseStream[str]:
        return (await next.generate(request)).map(str.upper)


@pytest.mark.parametrize("linked", [lambda: Shouts() >> Echo(), lambda: Shouts() >> identity()])
@pytest.mark.parametrize("keeps", ["request", "stream"])
async def test_a_graph_lives_as_long_as_a_request_that_runs_through_it(linked: Any, keeps: str) -> None:
    """Its stages were collected while the stream ran."""
    graph: Any = linked()
    stages = [weakref.ref(graph), *(weakref.ref(stage) for stage in graph.stages)]
    request = Context("abc")
    stream = await (graph.generate(request) if isinstance(graph, Segment) else graph.generate(request, Echo()))
    control = stream.context.control if keeps == "request" else None
    del graph, request
    gc.collect()
    assert await anext(stream) == "A"
    assert None not in [stage() for stage in stages]
    assert [item async for item in stream] == ["B", "C"]
    await stream.aclose()
    del stream
    gc.collect()
    if control is not None:
        assert None not in [stage() for stage in stages]
        del control
        gc.collect()
    assert {stage() for stage in stages} == {None}


def test_a_control_keeps_the_same_graph_once_however_often_it_retains_it() -> None:
    request, graph = Context("a"), Twice() >> Echo()
    for _ in range(100):
        graph.generate(request).close()
    assert request.control._retained == (graph,)


async def test_next_may_be_called_again_with_the_same_id() -> None:

    class Retry(Operator[str, str, str, str]):
        async def generate(self, request: Context[str], next: AsyncEngine[str, str]) -> ResponseStream[str]:
            first = await (await next.generate(request)).collect()
            second = await (await next.generate(request)).collect()
            return ResponseStream.of(first + second, request)

    assert await collect(Retry() >> Echo(), "ab") == ["a", "b", "a", "b"]


async def test_a_request_to_an_end_without_engine_fails_and_works_once_attached() -> None:
    late = LateEngine[str, str]()
    graph = Twice() >> late
    with pytest.raises(NoEdge):
        await graph.generate(Context("a", id="x"))
    late.attach(Echo())
    assert await (await graph.generate(Context("a", id="x"))).collect() == ["a", "a"]


async def test_a_segment_sink_takes_one_engine() -> None:
    sink = SegmentSink[str, str]()
    with pytest.raises(NoNetworkEdge):
        await sink.generate(Context("a"))
    sink.attach(Echo())
    with pytest.raises(EdgeAlreadySet):
        sink.attach(Echo())


async def test_a_graph_is_an_engine_inside_another() -> None:
    inner = Twice() >> Echo()
    assert await collect(Twice() >> inner, "a") == ["a"] * 4
    assert await collect((Twice() >> Twice()) >> (Twice() >> Echo()), "a") == ["a"] * 8


async def test_an_engine_stored_erased_is_recovered_under_its_exact_types_only() -> None:
    stored = ErasedEngine(Echo(), str, str)
    recovered = stored.typed(str, str)
    assert recovered is not None
    assert await collect(recovered, "ab") == ["a", "b"]
    for wrong in (stored.typed(int, str), stored.typed(str, int), stored.typed(str, str, OSError)):
        assert wrong is None


async def test_a_chain_is_an_operator() -> None:
    chain = Twice() >> Twice()
    assert isinstance(chain, Chain)
    assert await (await chain.generate(Context("a"), Echo())).collect() == ["a"] * 4


async def test_a_stage_that_does_not_touch_the_stream_hands_on_the_same_stream() -> None:
    taken: list[Any] = []

    class Keep(Echo):
        async def generate(self, request: Context[str]) -> ResponseStream[str]:
            taken.append(await super().generate(request))
            stream: ResponseStream[str] = taken[0]
            return stream

    graph = identity() >> map_request(str.upper) >> Keep()
    async with await graph.generate(Context("a")) as stream:
        assert stream is taken[0]


def test_a_graph_declares_what_its_ends_take_and_give() -> None:
    shouted = map_response(str) >> Length() >> Count()
    assert Signature.of(Length() >> Count(), AsyncEngine) == Signature(str, int)
    assert Signature.of(Probe() >> Length() >> Count(), AsyncEngine) == Signature(str, int)
    assert Signature.of(Probe() >> characters, AsyncEngine) == Signature(str, str)
    assert Signature.of(shouted, AsyncEngine) == Signature(str, Any)


def test_a_graph_prints_as_it_was_written() -> None:
    assert str(Twice(3) >> Faults(disconnect_after=3) >> Echo()) == "Twice(3) >> Faults(disconnect_after=3) >> Echo()"
    assert str(map_response(str) >> characters) == "MapResponse(str) >> characters"
    assert repr(link(Twice(), characters)) == "Twice() >> characters"


def loose(stage: object) -> Any:
    """The stage as untyped code would have it."""
    return stage


WRONG: dict[str, tuple[Callable[[], object], list[str]]] = {
    "a request that does not fit": (lambda: loose(Twice()) >> Count(), ["Twice()", "Count()", "str", "int"]),
    "items that do not fit": (lambda: loose(Length()) >> Mixed(), ["Length()", "Mixed()", "int", "bytes"]),
    "behind a pass-through": (lambda: loose(Twice()) >> identity() >> Count(), ["Identity()", "Count()", "str", "int"]),
    "upwards through a probe": (
        lambda: loose(Length()) >> Probe() >> Mixed(),
        ["Length()", "Probe()", "bytes", "int"],
    ),
    "a list": (lambda: link(Twice(), Length(), Twice(), Echo()), ["Length()", "Twice()", "int", "str"]),
    "a function engine": (lambda: loose(Length()) >> characters, ["Length()", "characters", "int", "str"]),
    "an engine in the middle": (lambda: link(Echo(), Twice()), ["Echo()", "nothing can follow"]),
    "no engine at the end": (lambda: link(Twice(), Twice()), ["Twice()", "ends in an engine"]),
    "not a stage": (lambda: loose(Twice()) >> 3, ["Twice()", "3"]),
    "not a stage in a list": (lambda: link(Twice(), loose("x")), ["'x'"]),
    "a swap that does not fit": (lambda: (Twice() >> Echo()).replace(Echo, Count()), ["Twice()", "Count()"]),
}


class Mixed(AsyncEngine[int, bytes]):
    async def generate(self, request: Context[int]) -> ResponseStream[bytes]:
        return ResponseStream.of([b"x"], request)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_edge_is_refused_at_declaration_naming_stages_and_types(case: str) -> None:
    make, names = WRONG[case]
    with pytest.raises(LinkError) as caught:
        make()
    assert all(name in str(caught.value) for name in names), str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_linking_nothing_is_refused() -> None:
    with pytest.raises(GraphError):
        link()


@pytest.mark.parametrize("target", [Twice, "Twice"])
async def test_replace_by_class_or_name_leaves_the_old_graph_untouched(target: Any) -> None:
    graph = Twice() >> Echo()
    swapped = graph.replace(target, identity())
    assert await collect(swapped, "a") == ["a"]
    assert await collect(graph, "a") == ["a", "a"]
    assert isinstance(swapped, Segment)


async def test_insert_before_and_after_put_a_stage_in_its_place() -> None:
    graph = Twice() >> Echo()
    assert str(graph.insert_before(Twice, Probe())) == "Probe() >> Twice() >> Echo()"
    assert str(graph.insert_after("Twice", Probe())) == "Twice() >> Probe() >> Echo()"
    assert str(graph.insert_before(Echo, Probe())) == "Twice() >> Probe() >> Echo()"
    with pytest.raises(LinkError):
        graph.insert_after(Echo, Probe())


def test_the_engine_itself_can_be_replaced() -> None:
    assert str((Twice() >> Echo()).replace(Echo, characters)) == "Twice() >> characters"


@pytest.mark.parametrize(("target", "problem"), [("Missing", "no stage"), (Probe, "no stage"), (Twice, "2 stages")])
def test_a_target_that_is_not_one_stage_is_an_error_that_shows_the_graph(target: Any, problem: str) -> None:
    graph = Twice() >> Twice() >> Echo()
    with pytest.raises(GraphError, match=problem) as caught:
        graph.replace(target, identity())
    assert "Twice >> Twice >> Echo" in str(caught.value)


async def test_stages_named_apart_are_found_by_their_names() -> None:
    graph = Twice().named("outer") >> Twice().named("inner") >> Echo()
    assert await collect(graph.replace("inner", identity()), "a") == ["a", "a"]
    assert graph["outer"] is graph.stages[0]
    assert str(graph) == "outer() >> inner() >> Echo()"


def test_text_shows_the_line_with_branches_and_instances() -> None:
    assert (Twice() >> Routed()).draw("text").splitlines() == [
        "Twice()",
        "▼",
        "Routed()",
        "    ○ worker 1",
        "    ○ worker 2",
        " └─ prefill ─► Twice()",
        "               ▼",
        "               Echo('!')",
    ]


def test_mermaid_and_dot_show_every_stage_edge_branch_and_instance() -> None:
    graph = Twice() >> Routed()
    mermaid, dot = graph.draw("mermaid"), graph.draw("dot")
    assert mermaid.splitlines()[0] == "flowchart TD"
    assert '-. "prefill" .->' in mermaid
    assert mermaid.count("-->") == 2
    assert dot.startswith("digraph {")
    assert dot.rstrip().endswith("}")
    assert 'label="prefill", style=dashed' in dot
    for text in ("Twice()", "Routed()", "Echo('!')", "worker 1", "worker 2"):
        assert text in mermaid
        assert text in dot


def test_labels_are_escaped_for_their_form() -> None:
    graph = identity() >> Echo('a"<b>#1;\\')
    assert "a#quot;#lt;b#gt;#35;1;" in graph.draw("mermaid")
    assert '\\"<b>' in graph.draw("dot")


def test_an_unknown_form_is_an_error() -> None:
    with pytest.raises(ValueError, match="mermaid"):
        (Twice() >> Echo()).draw("svg")  # type: ignore[arg-type]


async def test_a_whole_graph_holds_the_engine_contract() -> None:
    await check_engine(
        lambda: Twice() >> Probe() >> identity() >> ScriptedEngine(list("abcdefghijklmnopqrstuvwxyz")),
        request="x",
        expected=[c for c in "abcdefghijklmnopqrstuvwxyz" for _ in range(2)],
        open_count=lambda graph: graph["ScriptedEngine"].open + graph["Probe"].open,
    )
