"""Every example runs and prints what it should."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
LINES_OF_A_PAGE = 66

PRINTED = {
    "declare_graph": ["Preprocess(echo) >> Detokenize(echo) >> PushRouter(demo)", "What runs uphill?"],
    "write_operator": ["holds the operator contract", "(cancelled)"],
    "typed_operator": ["What runs uphill?\nWhat runs\n"],
    "swap_in_test": ["passed"],
    "custom_engine": ["holds the engine contract", "[2, 1, 0] and lift-off"],
    "whole_graph": ["prefill ─► KvPushRouter(KvRouter)", "broke after 5 tokens and moves on"],
    "replay_in_test": ["300 requests", "rejected", "Time to first token"],
    "reactive_stream": ["[0, 4, 16, 36, 64]", "20 numbers in batches"],
}


@cache
def printed_by(name: str) -> str:
    """Run an example, once for all tests, and return what it printed."""
    command = [sys.executable, "-W", "error", str(EXAMPLES[name])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs_as_a_script_and_prints_what_it_should(name: str) -> None:
    printed = printed_by(name)
    for text in PRINTED[name]:
        assert text in printed


def test_the_answer_of_the_whole_graph_is_the_same_when_a_worker_breaks() -> None:
    undisturbed, moved_on, broken = printed_by("whole_graph").splitlines()[-3:]
    assert "moves on" in moved_on
    assert undisturbed == broken
    assert len(undisturbed) == 20


def test_the_fastapi_example_serves_its_route_and_the_api_under_its_prefix() -> None:
    command = [sys.executable, "-c", _ASK_FASTAPI]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ['"HEY"', "hey", "echo", "hey"], done.stderr


_ASK_FASTAPI = """
from fastapi.testclient import TestClient
from examples.embed_fastapi import application

with TestClient(application) as client:
    print(client.get("/shout?text=hey").text)
    print(client.get("/stream?text=hey").text)
    print(client.get("/ai/v1/models").json()["data"][0]["id"])
    chat = {"model": "echo", "messages": [{"role": "user", "content": "hey"}]}
    print(client.post("/ai/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"])
"""


def test_a_client_that_leaves_the_fastapi_example_closes_the_whole_stream() -> None:
    command = [sys.executable, "-W", "error", "-c", _LEAVE_FASTAPI]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["open", "True", "left", "0"], done.stderr


_LEAVE_FASTAPI = """
import anyio
from examples.embed_fastapi import application, engine
from pipeline.testing import watch_streams

SCOPE = {
    "type": "http", "method": "GET", "path": "/stream", "raw_path": b"/stream", "query_string": b"text=" + b"a" * 500,
    "headers": [], "http_version": "1.1", "scheme": "http", "asgi": {"version": "3.0", "spec_version": "2.3"},
}

async def main():
    with watch_streams() as streams:
        left = anyio.Event()
        async def receive():
            await left.wait()
            return {"type": "http.disconnect"}
        async def send(message):
            if message.get("body"):
                print("open", len(streams.open) > 0) if not left.is_set() else None
                left.set()
        async with engine:
            await application(SCOPE, receive, send)
            print("left", len(streams.open))

anyio.run(main)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray Serve is not installed")
def test_the_ray_serve_example_streams_and_sees_a_client_leave() -> None:
    command = [sys.executable, "-c", _ASK_RAY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=180)
    assert "echo\nstreams True\nleft 1.0\n" in done.stdout, done.stderr


_ASK_RAY = """
import time
import httpx2
from ray import init, serve
from examples.embed_ray_serve import application

init(num_cpus=2, include_dashboard=False)
serve.run(application)
print(httpx2.get("http://127.0.0.1:8000/v1/models").json()["data"][0]["id"])
chat = {"model": "echo", "stream": True, "messages": [{"role": "user", "content": "hello there " * 20}]}
with httpx2.stream("POST", "http://127.0.0.1:8000/v1/chat/completions", json=chat) as answer:
    times = [time.monotonic() for line in answer.iter_lines() if line]
    print("streams", times[-1] - times[0] > 1)
with httpx2.stream("POST", "http://127.0.0.1:8000/v1/chat/completions", json=chat) as answer:
    next(answer.iter_lines())
time.sleep(1)
metrics = httpx2.get("http://127.0.0.1:8000/metrics").text.splitlines()
print("left", next(line.split()[-1] for line in metrics if line.startswith("dynamo_frontend_disconnected_clients ")))
serve.shutdown()
"""


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_fits_on_a_page_and_shows_how_to_run_it(name: str) -> None:
    source = EXAMPLES[name].read_text()
    assert len(source.splitlines()) <= LINES_OF_A_PAGE
    assert name in (ast.get_docstring(ast.parse(source)) or "")


def test_the_graph_in_the_readme_runs_as_it_stands_and_has_twenty_lines() -> None:
    source = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert len(source.splitlines()) <= 20
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["H", "e", "l", "l", "o"], done.stderr


def test_the_typed_operator_in_the_contracts_is_the_one_of_the_example() -> None:
    document = (ROOT / "docs" / "contracts.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    assert any("class Ask(Operator[" in snippet for snippet in snippets)
    source = EXAMPLES["typed_operator"].read_text()
    assert [snippet for snippet in snippets if "Ask" in snippet and snippet.strip("\n") not in source] == []


def test_every_path_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_example_is_run_here() -> None:
    assert set(EXAMPLES) == {*PRINTED, "embed_fastapi", "embed_ray_serve"}
