"""What spans never hold, and how they join the trace of a caller."""

from __future__ import annotations

from typing import Any

from pipeline import AsyncEngine, Context
from pipeline.telemetry import inject
from serving.http import app
from tests.serving.tracing.worlds import Recorded, Serving
from tests.serving.worlds import chat, complete

ALONE = "POST /v1/chat/completions"
SECRET = "xyzzyplugh"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_prompts_and_answers_are_never_recorded(serving: Serving, recorded: Recorded) -> None:
    message = {"role": "user", "content": SECRET}
    async with serving() as it:
        for stream in (True, False):
            await chat(it.app, messages=[message], stream=stream, stop=[SECRET]).run()
            await complete(it.app, prompt=[SECRET, SECRET], stream=stream, echo=False).run()
        await chat(it.app, messages=[{"role": "user", "content": {"text": SECRET}}]).run()
        await chat(it.app, messages=[message | {"role": 7}]).run()
        await chat(it.app, messages=[message], max_tokens=-1).run()
        await chat(it.app, messages=SECRET).run()
    assert len(recorded.ended) > 20
    assert SECRET not in recorded.texts


async def test_what_a_client_may_write_is_cut(serving: Serving, recorded: Recorded) -> None:
    async with serving() as it:
        await chat(it.app, model="m" * 100_000, headers={"user-agent": "a" * 50_000}).run()
    assert len(recorded.texts) < 5_000


# -- the caller's trace


async def test_the_tree_hangs_below_the_callers_span(serving: Serving, recorded: Recorded) -> None:
    async with serving() as it:
        await chat(it.app, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"}).run()
    tree = recorded.tree()
    assert {node.trace_id for node in tree.nodes} == {TRACE}
    (root,) = [span for span in recorded.ended if span.name == ALONE]
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == SPAN


async def test_a_callers_decision_not_to_sample_is_respected(serving: Serving, recorded: Recorded) -> None:
    """The ids go on all the same, so that later requests carry the decision."""
    seen: list[Any] = []

    class Watched(AsyncEngine[Any, Any]):
        def __init__(self, graph: AsyncEngine[Any, Any]) -> None:
            self._graph = graph

        async def generate(self, request: Context[Any]) -> Any:
            seen.append(request.trace)
            return await self._graph.generate(request)

    async with serving() as it:
        traced_app = app({"m": Watched(it.opened.graph)}, tracer=recorded.tracer)
        answered = await chat(traced_app, headers={"traceparent": f"00-{TRACE}-{SPAN}-00"}).run()
    assert answered.status == 200
    assert (recorded.ended, recorded.open) == ([], {})
    request: Context[None] = Context(None)
    request.trace = seen[0]
    header = inject(request)["traceparent"]
    assert header.startswith(f"00-{TRACE}-")
    assert header.endswith("-00")


async def test_without_a_tracer_there_is_no_span_and_no_wrapper(recorded: Recorded) -> None:
    from serving.deployment import GraphConfig, HostOptions, hosted_graph

    async with hosted_graph(GraphConfig(model_name="m"), HostOptions()) as opened:
        plain = app({"m": opened.graph})
        await chat(plain).run()
        assert [type(stage).__name__ for stage in opened.graph.stages] == [
            *("Preprocess", "Migration", "Detokenize", "PushRouter")
        ]
    assert (recorded.ended, recorded.open) == ([], {})
