"""What bodies that were made to cost much do to everyone else: the longest stall of the event loop and the memory.

    python -m benchmarks.body_attacks [--megabytes 45] [--only NAME]

Each body is sent to the app in this process in parts of 64 KB, as a server gives them. Beside it a task takes a turn of
the loop after the other. `loop` is the longest CPU time the loop's thread took between two of its turns; `stall` is the
longest real time, work in other threads and other programs included. `memory` is what was allocated at the peak beside
the body as it was sent, in a second run, as a multiple of the body.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from typing import Any

import anyio
from anyio.lowlevel import checkpoint
from attrs import frozen
from rich.console import Console
from rich.table import Table

from operators.text import validate
from pipeline import Annotated, function_engine
from pipeline.protocols import BackendOutput, CompletionUsage, FinishReason
from serving.http import app

PART_BYTES = 65_536
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_MB = 1_000_000


@frozen
class Attack:
    """A body of about a given number of bytes, and the statuses that are a right answer to it."""

    name: str
    make: Callable[[int], bytes]
    path: str = COMPLETION
    statuses: tuple[int, ...] = (400, 413)
    bytes_max: int = 45 * _MB
    """How long it may become; large bodies that are right have a natural size."""
    bytes_min: int = 0
    """How long it must be to be refused."""

    def body(self, size: int) -> bytes:
        """The body, of about this size as far as that is in its bounds."""
        return self.make(max(min(size, self.bytes_max), self.bytes_min))


def _around(before: bytes, unit: bytes, after: bytes, *, joint: bytes = b",") -> Callable[[int], bytes]:
    """A body with the unit repeated until the size is reached."""

    def make(size: int) -> bytes:
        times = max(1, (size - len(before) - len(after)) // len(unit + joint))
        return before + joint.join([unit] * times) + after

    return make


def _numbered(before: bytes, unit: bytes, after: bytes) -> Callable[[int], bytes]:
    """A body with the unit repeated, its number in each."""

    def make(size: int) -> bytes:
        return before + b",".join(unit % i for i in range(max(1, size // (len(unit) + 6)))) + after

    return make


def _field(name: bytes, unit: bytes, *, joint: bytes = b",", ends: bytes = b"[]") -> Callable[[int], bytes]:
    return _around(b'{"model":"m","prompt":"x","' + name + b'":' + ends[:1], unit, ends[1:] + b"}", joint=joint)


_PROMPT = b'{"model":"m","prompt":'
_CHAT = b'{"model":"m","messages":['
_SAY = b'{"role":"user","content":"'

ATTACKS = (
    Attack("empty prompts", _around(_PROMPT + b"[", b"[]", b"]}")),
    Attack("prompts of one letter", _around(_PROMPT + b"[", b'"a"', b"]}")),
    Attack("prompts of one id", _around(_PROMPT + b"[", b"[1]", b"]}")),
    Attack("ids of one digit", _around(_PROMPT + b"[", b"1", b"]}"), bytes_min=3 * _MB),
    Attack("ids and a wrong one", _around(_PROMPT + b"[", b"1", b',"a"]}')),
    Attack("floats of 30 digits", _around(_PROMPT + b"[", b"0.12345678901234567890123456789", b"]}")),
    Attack("control characters", _around(_PROMPT + b'"', b"\x01", b'"}', joint=b"")),
    Attack("quotes", _around(_PROMPT, b'"', b"}", joint=b"")),
    Attack("escaped quotes without an end", _around(_PROMPT + b'"', b'\\"', b"", joint=b"")),
    Attack("bytes that are no UTF-8", _around(_PROMPT + b'"', b"\xff", b'"}', joint=b"")),
    Attack("backslashes", _around(_PROMPT + b'"', b"\\", b"", joint=b"")),
    Attack("blanks", _around(_PROMPT, b" ", b'"x"}', joint=b"")),
    Attack("brackets that never close", _around(b"", b"[", b"", joint=b"")),
    Attack("braces that never close", _around(b"", b'{"a":', b"", joint=b"")),
    Attack("a number without an end", _around(_PROMPT, b"1", b"}", joint=b"")),
    Attack("a long name", _around(b'{"', b"a", b'":1}', joint=b"")),
    Attack("messages", _around(_CHAT, _SAY + b'"}', b"]}"), CHAT),
    Attack("messages and a wrong one", _around(_CHAT, _SAY + b'"}', b",1]}"), CHAT),
    Attack("content parts", _around(_CHAT + _SAY[:-1] + b"[", b'{"type":"text","text":""}', b"]}]}"), CHAT),
    Attack("keys of messages", _numbered(_CHAT + _SAY + b'",', b'"%d":1', b"}]}"), CHAT),
    Attack(
        "tool calls",
        _around(_CHAT + b'{"role":"assistant","tool_calls":[', b'{"id":"","function":{"name":""}}', b"]}]}"),
        CHAT,
    ),
    Attack(
        "arguments of lists",
        _around(
            _CHAT + b'{"role":"assistant","tool_calls":[{"id":"","function":{"name":"f","arguments":"{\\"a\\":[',
            b"[]",
            b']}"}}]}]}',
        ),
        CHAT,
    ),
    Attack("tools", _around(_CHAT + _SAY + b'"}],"tools":[', b'{"function":{"name":"f"}}', b"]}"), CHAT),
    Attack("template arguments", _around(_CHAT + _SAY + b'"}],"chat_template_args":{"a":[', b"[]", b"]}}"), CHAT),
    Attack("logit_bias", _numbered(b'{"model":"m","prompt":"x","logit_bias":{', b'"%d":0', b"}}")),
    Attack("unknown fields", _numbered(b'{"model":"m","prompt":"x",', b'"u%d":0', b"}")),
    Attack("stop strings", _field(b"stop", b'"a"')),
    Attack("stop ids", _field(b"stop_token_ids", b"1")),
    Attack("banned words", _field(b"bad_words_token_ids", b"[1,2]")),
    Attack("annotations", _around(b'{"model":"m","prompt":"x","nvext":{"annotations":[', b'"a"', b"]}}")),
    Attack("metadata", _numbered(b'{"model":"m","prompt":"x","metadata":{', b'"%d":""', b"}}")),
    Attack("a schema of objects", _around(b'{"model":"m","prompt":"x","guided_json":[', b'{"type":"object"}', b"]}")),
    Attack("a text too long", _around(_CHAT + _SAY, b"a", b'"}]}', joint=b""), CHAT, bytes_min=9 * _MB),
    Attack(
        "a wide text too long", _around(_CHAT + _SAY + "😀".encode(), b"a", b'"}]}', joint=b""), CHAT, bytes_min=9 * _MB
    ),
    Attack("escapes", _around(_CHAT + _SAY, b"\\u4e2d", b'"}]}', joint=b""), CHAT, (200, 400)),
    Attack(
        "an unknown model of a long name", _around(b'{"prompt":"x","model":"', b"a", b'"}', joint=b""), statuses=(404,)
    ),
)
"""Bodies that are refused."""


def _ids(size: int) -> bytes:
    return json.dumps({"model": "m", "prompt": [100_000 + i % 28_000 for i in range(size // 8)]}).encode()


def _batch(size: int) -> bytes:
    prompts = [[100_000 + i for i in range(size // 8 // 128)]] * 128
    return json.dumps({"model": "m", "prompt": prompts}).encode()


def _agent(size: int) -> bytes:
    """2,000 messages of an agent with 1,536 tools."""
    text = 'def f(x):\n\treturn "x"\n' * max(1, size // 2000 // 30)
    call = {"id": "c", "function": {"name": "f", "arguments": json.dumps({"text": text[:400]})}}
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "", "tool_calls": [call]}] * 1000
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {name: {"type": "string", "description": name} for name in "abcd"},
            },
        },
    }
    return json.dumps({"model": "m", "messages": messages, "tools": [tool] * 1536}).encode()


RIGHT = (
    Attack("a million token ids", _ids, statuses=(200,), bytes_max=8 * _MB),
    Attack("128 prompts of 8,000 ids", _batch, statuses=(200,), bytes_max=8 * _MB),
    Attack(
        "8 MB of text", _around(_CHAT + _SAY, b"Some text, a line of it.\\n", b'"}]}', joint=b""), CHAT, (200,), 8 * _MB
    ),
    Attack("8 MB of Chinese text", _around(_CHAT + _SAY, "中文".encode(), b'"}]}', joint=b""), CHAT, (200,), 8 * _MB),
    Attack(
        "an image in base64",
        _around(
            _CHAT + _SAY[:-1] + b'[{"type":"image_url","image_url":{"url":"data:image/png;base64,',
            b"iVBORw0KGgoA",
            b'"}}]}]}',
            joint=b"",
        ),
        CHAT,
    ),
    Attack("an agent's 2,000 messages and 1,536 tools", _agent, CHAT, (200,), 8 * _MB),
)
"""Bodies that are long and right, or refused for nothing but their image."""


@frozen
class Measured:
    """What one body did."""

    status: int
    answer: bytes
    sent_bytes: int
    loop_s: float
    stall_s: float
    whole_s: float


async def send(body: bytes, path: str, *, part_bytes: int = PART_BYTES) -> Measured:
    """Send the body to a new app, and measure the turns of the loop meanwhile."""
    status, answer, at, whole_s, done = 0, b"", 0, 0.0, False
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "root_path": "",
        "scheme": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "client": ("127.0.0.1", 1),
        "server": ("x", 80),
    }

    async def receive() -> MutableMapping[str, Any]:
        nonlocal at
        if at > len(body):
            await anyio.sleep_forever()
        await checkpoint()
        part, at = body[at : at + part_bytes], at + part_bytes
        return {"type": "http.request", "body": part, "more_body": at < len(body)}

    async def take(message: MutableMapping[str, Any]) -> None:
        nonlocal status, answer
        status = message.get("status", status)
        answer += message.get("body", b"")

    longest = [0.0, 0.0]

    async def watch() -> None:
        before = time.thread_time(), time.perf_counter()
        while not done:
            await anyio.sleep(0.0005)
            now = time.thread_time(), time.perf_counter()
            longest[:] = [max(most, end - begin) for most, begin, end in zip(longest, before, now, strict=True)]
            before = time.thread_time(), time.perf_counter()

    service = app({"m": _checking})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await anyio.sleep(0.005)
        began_s = time.perf_counter()
        await service(scope, receive, take)
        whole_s = time.perf_counter() - began_s
        await anyio.sleep(0.005)
        done = True
    return Measured(status, answer, min(at, len(body)), longest[0], longest[1], whole_s)


@function_engine
async def _checking(request: Any) -> AsyncIterator[Annotated[BackendOutput]]:
    """The graph behind the app: what it checks before anything else, and an answer without a token."""
    validate(request, ignore_unsupported=True)
    yield Annotated(
        BackendOutput([], [], None, finish_reason=FinishReason.STOP, completion_usage=CompletionUsage.of(1, 0))
    )


def peak_bytes(body: bytes, path: str) -> int:
    """What handling the body allocates at its peak; the body as the client sent it is not counted."""
    tracemalloc.start()
    try:
        anyio.run(send, body, path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=45)
    parser.add_argument("--only", default="")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args(arguments)
    table = Table("body", "MB", "read", "status", "loop ms", "stall ms", "whole ms", "memory")
    for attack in (*ATTACKS, *RIGHT):
        if given.only not in attack.name:
            continue
        body = attack.body(int(given.megabytes * _MB) - 1000)
        found = anyio.run(send, body, attack.path)
        memory = f"{peak_bytes(body, attack.path) / len(body):.1f}" if given.memory else ""
        right = "" if found.status in attack.statuses else " !"
        table.add_row(
            *(attack.name, f"{len(body) / _MB:.1f}", f"{found.sent_bytes / _MB:.1f}", f"{found.status}{right}"),
            *(f"{seconds * 1e3:.1f}" for seconds in (found.loop_s, found.stall_s, found.whole_s)),
            memory,
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
