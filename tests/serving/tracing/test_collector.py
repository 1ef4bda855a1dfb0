"""The program with a collector of the test's own, over real sockets."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.serving.tracing.worlds import Node, one_tree
from tests.serving.worlds import program

CHAT = "POST /v1/chat/completions"
STAGES = """
  Preprocess
    Migration
      Detokenize
        PushRouter
          engine.generate"""
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """What was received by OTLP over HTTP."""

    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
                collector.received.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing is printed."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[Collector]:
        thread = Thread(target=self._server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def resources(self) -> list[dict[str, Any]]:
        return [_said(each.resource.attributes) for request in self.received for each in request.resource_spans]

    def traces(self) -> dict[str, list[Node]]:
        """The spans of each trace."""
        found: dict[str, list[Any]] = {}
        for request in self.received:
            for of_resource in request.resource_spans:
                for of_scope in of_resource.scope_spans:
                    assert of_scope.schema_url == "https://opentelemetry.io/schemas/1.41.1"
                    for span in of_scope.spans:
                        made = _node(span)
                        found.setdefault(made.trace_id, []).append(made)
        return found


def _node(span: Any) -> Node:
    parent_id = span.parent_span_id.hex()
    return Node(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        "" if parent_id == SPAN else parent_id,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        kind={1: "INTERNAL", 2: "SERVER"}[span.kind],
        status={0: "UNSET", 2: "ERROR"}[span.status.code],
        attributes=_said(span.attributes),
        links=tuple(link.span_id.hex() for link in span.links),
    )


def _said(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def post_chat(address: str, path: str = "/v1/chat/completions", headers: Any = None, **fields: Any) -> int:
    """Sends a request and reads its answer; the status."""
    messages = {} if "prompt" in fields else {"messages": [{"role": "user", "content": "hello"}]}
    body = {"model": "echo"} | messages | fields
    with closing(HTTPConnection(address, timeout=10)) as connection:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"} | (headers or {}))
        with connection.getresponse() as response:
            response.read()
            return response.status


def ended(process: Any) -> tuple[int, str, float]:
    """The program's exit code after a signal, what it has written to stderr, and how long it took."""
    began_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=40)
    return process.returncode, errors, time.monotonic() - began_s


def test_a_collector_receives_one_complete_tree_for_each_request() -> None:
    with Collector().running() as collector:
        variables: dict[str, Any] = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_RESOURCE_ATTRIBUTES": "deployment=test",
        }
        with program("--workers", "2", variables=variables) as (process, address):
            statuses = [
                post_chat(address, stream=True),
                post_chat(address, stream=False, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"}),
                post_chat(address, headers={"traceparent": f"00-{'2' * 32}-{SPAN}-00"}),
                post_chat(address, model="unknown"),
                post_chat(address, max_tokens=-1),
                post_chat(address, path="/v1/completions", prompt=["a", "b"]),
            ]
            code, errors, _ = ended(process)
    assert statuses == [200, 200, 200, 404, 400, 200]
    assert (code, errors) == (0, "")
    trees = [one_tree(nodes) for nodes in collector.traces().values()]
    assert sorted(map(str, trees)) == sorted(
        [CHAT + STAGES, CHAT + STAGES, CHAT, f"{CHAT}\n  Preprocess", "POST /v1/completions" + 2 * STAGES]
    )
    (unary,) = [tree for tree in trees if tree.root.trace_id == TRACE]
    assert unary.root.kind == "SERVER"
    assert unary.root.attributes["gen_ai.request.model"] == "echo"
    assert unary.root.attributes["server.address"] == "127.0.0.1"
    for resource in collector.resources():
        assert (resource["service.name"], resource["deployment"]) == ("penstock", "test")


@pytest.mark.slow
@pytest.mark.parametrize("answers", ["refuses", "hangs"])
def test_a_collector_that_does_not_answer_slows_neither_requests_nor_the_end(answers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if answers == "hangs" else 9
        variables: dict[str, Any] = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_BSP_SCHEDULE_DELAY": "10",
        }
        with program(variables=variables) as (process, address):
            began_s = time.monotonic()
            assert [post_chat(address) for _ in range(50)] == [200] * 50
            assert time.monotonic() - began_s < 25  # a try takes a second or more, where it is refused too
            code, errors, took_s = ended(process)
    assert code == 0
    assert took_s < 18  # the exporter alone would wait for half a minute
    if answers == "hangs":
        assert "are lost" in errors
