"""The engines in docs/engines.md are right, as they stand there, and its tables name what there is."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest

from engines import as_engine, run_conformance
from engines.conformance import MEANINGS
from pipeline import Context, Disconnected, InvalidArgument
from pipeline.protocols import PreprocessedRequest, StopConditions
from pipeline.testing import run_in_virtual_time

TEXT = (Path(__file__).parents[1] / "docs" / "engines.md").read_text()
Backend = Literal["asyncio", "trio"]
BACKENDS: list[Backend] = ["asyncio", "trio"]


def engine_of(name: str) -> Callable[..., Any]:
    """The class that the page defines, in the block that has it."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (block,) = [block for block in blocks if f"class {name}(LLMEngine)" in block]
    space: dict[str, Any] = {}
    exec(compile(block, f"docs/engines.md: {name}", "exec"), space)
    made: Callable[..., Any] = space[name]
    return made


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_smallest_engine_holds_the_contract(backend: Backend) -> None:
    run_in_virtual_time(run_conformance, engine_of("Backwards"), backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_engine_in_threads_holds_the_contract(backend: Backend) -> None:
    """In real time: threads have no other."""
    anyio.run(run_conformance, engine_of("InThreads"), backend=backend)


class _Tokens(BaseHTTPRequestHandler):
    """Six tokens, or as many as the request wants; a prompt that begins with 0 is refused, one with 9 cut off."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["prompt"][0] == 0:
            self.send_error(400, "no zero")
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        most, length = body["max_tokens"], max(6, body["min_tokens"] or 0)
        if most is not None:
            length = most if body["ignore_eos"] else min(length, most)
        try:
            for place in range(length):
                time.sleep(0.002)
                if body["prompt"][0] == 9:
                    self.close_connection = True
                    return
                self.send_chunk({"token": body["prompt"][-1] * 7 + place})
            self.send_chunk({"finish": "length" if length == most else "stop"})
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True  # the client has left

    def send_chunk(self, event: dict[str, Any]) -> None:
        line = json.dumps(event).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 64
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no error."""


@pytest.fixture
def url() -> Iterator[str]:
    with _Server(("127.0.0.1", 0), _Tokens) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


# On trio httpx2 leaves generators behind the one that is closed to the collector, which warns of each.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_engine_around_an_upstream_holds_the_contract(backend: Backend, url: str) -> None:
    anyio.run(run_conformance, lambda: engine_of("Upstream")(url), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("prompt", "error"), [([0], InvalidArgument), ([9], Disconnected)])
def test_what_the_upstream_refuses_or_breaks_off_has_its_class(
    prompt: list[int], error: type, backend: Backend, url: str
) -> None:
    async def check() -> None:
        async with as_engine(engine_of("Upstream")(url)) as engine:
            stream = await engine.generate(Context(PreprocessedRequest(prompt)))
            assert isinstance((await stream.collect())[-1].extract_error(), error)

    anyio.run(check, backend=backend)


def test_an_engine_refuses_what_it_cannot_do() -> None:
    async def check() -> None:
        async with as_engine(engine_of("Backwards")()) as engine:
            more = PreprocessedRequest([1, 2], stop_conditions=StopConditions(min_tokens=3))
            stream = await engine.generate(Context(more))
            assert isinstance((await stream.collect())[-1].extract_error(), InvalidArgument)

    run_in_virtual_time(check)


def test_the_table_of_failures_names_each_of_them_with_its_rule() -> None:
    table = TEXT[TEXT.index("| name | rule | what was found |") :].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    named = {name: rule for names, rule, _ in rows for name in re.findall(r"`(\w+)`", names)}
    hosted = {f"E{number}" for number in range(1, 14)}
    assert named == {name: rule for name, (rule, _) in MEANINGS.items() if name not in hosted} | {
        "E1": "E1 to E13",
        "E13": "E1 to E13",
    }
