"""The way of one request as a picture, drawn from the spans of a graph that runs.

    python -m benchmarks.request_path --svg docs/pictures/request_path.svg

A chat goes through the ASGI app and the whole standard graph, with the KV router and a prefill pool, to mock engines in
virtual time. Each row is a span: the stage or step, the file it is in, and when it ran. Rows are nested as the calls
are: the request goes from top to bottom, each token of the answer back from the last row of its branch to the first.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from types import FrameType
from typing import Any
from xml.sax.saxutils import escape

import anyio
from attrs import define, field, frozen
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider

import operators
from pipeline.testing import run_in_virtual_time
from serving.deployment import GraphConfig, HostOptions, hosted_graph
from serving.http import app

ROOT = Path(operators.__file__).parents[1]
CONFIG = GraphConfig(engine="mocker", router="kv", workers=2, prefill_workers=2, seed=1)
WARM_UP, PROMPT, TOKENS = "x" * 2000, "y" * 2000, 12
ABOUT_SPANS = ("tracing", "metrics")
PICTURE = Path("docs/pictures/request_path.svg")

ROW, INDENT = 21, 14
NAMES_X, FILES_X, BARS_X, WIDTH = 12, 345, 600, 920
COLOURS = {"serving": "#6b7280", "operators": "#2563eb", "engines": "#b45309", "pipeline": "#047857"}


@define(eq=False)
class Step:
    """One span."""

    name: str
    file: str
    """Where it is started, from the root of the repository; of a stage, where its class is."""
    begin_s: float
    parent: int | None
    """Span id of the step above."""
    end_s: float = 0.0


@define
class Recorder(SpanProcessor):
    """Keeps the steps by span id, in the order they begin, on the clock of the loop."""

    steps: dict[int, Step] = field(factory=dict)

    def on_start(self, span: Span, parent_context: object = None) -> None:
        assert span.context is not None
        file = _file_of_stage(span.name) or _file_of_caller(sys._getframe(1))
        parent = None if span.parent is None else span.parent.span_id
        self.steps[span.context.span_id] = Step(span.name, file, anyio.current_time(), parent)

    def on_end(self, span: ReadableSpan) -> None:
        assert span.context is not None
        self.steps[span.context.span_id].end_s = anyio.current_time()


def _file_of_stage(name: str) -> str | None:
    stage = getattr(operators, name, None)
    return None if not inspect.isclass(stage) else Path(inspect.getfile(stage)).relative_to(ROOT).as_posix()


def _file_of_caller(frame: FrameType | None) -> str:
    """The file of the nearest caller that does more than open a span."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            file = path.relative_to(ROOT).as_posix()
            if file.startswith(tuple(COLOURS)) and path.stem not in ABOUT_SPANS and "span" not in frame.f_code.co_name:
                return file
        frame = frame.f_back
    return ""


@frozen
class Row:
    """A step at its depth in the tree."""

    span_id: int
    step: Step
    depth: int


def rows(steps: dict[int, Step]) -> list[Row]:
    """The steps from the top, each followed by those below it."""

    def below(parent: int | None, depth: int) -> Iterator[Row]:
        for span_id, step in steps.items():
            if step.parent == parent:
                yield Row(span_id, step, depth)
                yield from below(span_id, depth + 1)

    return list(below(None, 0))


async def request_steps() -> dict[int, Step]:
    """Send one chat through a graph that is warm, and return its spans."""
    provider, recorder = TracerProvider(shutdown_on_exit=False), Recorder()
    provider.add_span_processor(recorder)
    tracer = provider.get_tracer("picture")
    async with hosted_graph(CONFIG, HostOptions(tracer=tracer)) as opened:
        served = app(opened.graph, tracer=tracer)
        await _chat(served, WARM_UP)
        await anyio.sleep(1)
        recorder.steps.clear()
        await _chat(served, PROMPT)
        await anyio.sleep(1)
        return recorder.steps


async def _chat(served: Any, prompt: str) -> None:
    """Send a chat as an ASGI server does, and read its answer."""
    content = {"model": "echo", "messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS, "stream": True}
    bodies, path = [json.dumps(content).encode()], "/v1/chat/completions"
    sent: list[MutableMapping[str, Any]] = []
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip

    async def receive() -> MutableMapping[str, Any]:
        if not bodies:
            await anyio.sleep_forever()
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await served(scope, receive, send)
    assert sent[0]["status"] == 200, sent


def picture(steps: dict[int, Step]) -> str:
    """The rows as SVG: name, file, and a bar over time."""
    tree = rows(steps)
    begin_s, end_s = min(step.begin_s for step in steps.values()), max(step.end_s for step in steps.values())
    scale = (WIDTH - BARS_X - 60) / ((end_s - begin_s) or 1.0)
    top, places = 58, {row.span_id: number for number, row in enumerate(tree)}
    height = top + len(tree) * ROW + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        "<style>text{font-size:12.5px}.head{font-weight:bold;fill:#374151}.file{font-family:monospace;font-size:11px;"
        "fill:#4b5563}.ms{font-size:11px;fill:#6b7280}path{fill:none;stroke:#9ca3af}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text class="head" x="{NAMES_X}" y="22">the request, down; its tokens, up</text>',
        f'<text class="head" x="{FILES_X}" y="22">file</text>',
        f'<text class="head" x="{BARS_X}" y="22">when</text>',
        f'<text class="ms" x="{BARS_X}" y="42">0 ms, in virtual time</text>',
    ]
    for number, row in enumerate(tree):
        y = top + number * ROW
        x = NAMES_X + row.depth * INDENT
        package = row.step.file.partition("/")[0]
        colour = COLOURS.get(package, "#6b7280")
        if row.step.parent is not None:
            parent_y = top + places[row.step.parent] * ROW
            parts.append(f'<path d="M{x - INDENT + 4} {parent_y + 7}V{y - 4}h{INDENT - 6}"/>')
        parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{escape(row.step.name)}</text>')
        parts.append(f'<text class="file" x="{FILES_X}" y="{y}">{escape(row.step.file)}</text>')
        left = BARS_X + (row.step.begin_s - begin_s) * scale
        took_s = row.step.end_s - row.step.begin_s
        width = max(2.0, took_s * scale)
        parts.append(f'<rect x="{left:.1f}" y="{y - 10}" width="{width:.1f}" height="11" rx="2" fill="{colour}"/>')
        if took_s:
            parts.append(f'<text class="ms" x="{left + width + 4:.1f}" y="{y}">{took_s * 1e3:.0f} ms</text>')
    parts.append("</svg>\n")
    return "\n".join(parts)


def outline(steps: dict[int, Step]) -> str:
    """The rows as text."""
    return "\n".join(f"{'  ' * row.depth}{row.step.name}  ({row.step.file})" for row in rows(steps))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.request_path", description="Draws the way of one request."
    )
    parser.add_argument("--svg", type=Path, help=f"where the picture is written; the one in the docs is {PICTURE}")
    arguments = parser.parse_args()
    steps = run_in_virtual_time(request_steps, backend="asyncio")
    print(outline(steps))
    if arguments.svg is not None:
        arguments.svg.parent.mkdir(parents=True, exist_ok=True)
        arguments.svg.write_text(picture(steps), encoding="utf-8")


if __name__ == "__main__":
    main()
