"""`penstock replay --live` as a user starts it, against a server that is really there, and where none is."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from engines.upstream import network
from engines.upstream.transport import Http1Transport
from serving.cli import progress as progress_bars
from tests.serving.worlds import program

Replay = Callable[..., tuple[int, str, str]]

LOAD = ("--input-tokens", 200, "--output-tokens", 5, "--requests", 12, "--arrival-interval-ms", 10)


def test_a_replay_against_a_server_that_is_interrupted_the_second_time(
    replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    file, page = tmp_path / "live.json", tmp_path / "live.html"
    serving = ("--engine", "mocker", "--workers", "2", "--router", "kv", "--engine-arg", "speedup_ratio=50")
    with program(*serving) as (_, address):
        code, out, err = replay(
            *LOAD, "--live", f"http://{address}/v1", "--json", file, "--html", page, "--per-request"
        )
        assert (code, err) == (0, "")
        assert "12 requests, 12 completed" in out
        report = json.loads(file.read_bytes())
        assert (report["total_output_tokens"], report["total_input_tokens"]) == (60, 2400)
        assert sum(one["requests"] for one in report["workers"]) == 12
        assert [one["worker"] for one in report["workers"]] == [0, 1]
        replay(*LOAD, "--json", tmp_path / "graph.json")
        of_graph = json.loads((tmp_path / "graph.json").read_bytes())["settings"]
        assert report["settings"].pop("load_digest") == of_graph["load_digest"], "the same load, whatever its tokens"
        ids = report["settings"].pop("worker_ids")
        assert (len(ids["decode"]), ids["prefill"]) == (2, [])
        assert report["settings"] == {
            "live": f"http://{address}",
            "model": "echo",
            "live_ids": "1000-31999",
            "trace": None,
            "format": "mooncake",
            "seed": 42,
            "speed_up": 1.0,
            "concurrency": None,
        }
        lines = [json.loads(line) for line in (tmp_path / "live.requests.jsonl").read_bytes().splitlines()]
        assert sorted(one["name"] for one in lines) == sorted({one["name"] for one in lines})
        assert [one["output_length"] for one in lines] == [5] * 12
        assert report["per_request"] is None
        assert "secret" not in file.read_text() + out + page.read_text()

        @contextmanager
        def interrupting(total: int, to: Any) -> Iterator[Callable[[int], None]]:
            yield lambda ended: os.kill(os.getpid(), signal.SIGINT) if ended == 4 else None

        monkeypatch.setattr(progress_bars, "progress", interrupting)
        longer = ("--requests", 500, "--arrival-interval-ms", 40)
        code, out, err = replay(*LOAD, *longer, "--live", f"http://{address}", "--json", file)
        assert (code, err) == (130, "")
        assert "INTERRUPTED" in out
        report = json.loads(file.read_bytes())
        assert report["settings"]["interrupted"] is True
        assert report["num_requests"] + report["unsent_requests"] == 500
        assert report["completed_requests"] >= 4
        assert report["unsent_requests"] > 0

        code, _, err = replay(*LOAD, "--live", f"http://{address}", "--model", "other")
        assert (code, err) == (2, f"Error: --model: http://{address} has no 'other'; it has echo\n")
        code, _, err = replay(*LOAD, "--live", f"https://{address}")
        assert (code, err.count("\n")) == (1, 1)
        assert err.startswith(f"Error: no connection to https://{address}: [SSL")
        # What was cut off is over: nothing keeps the server busy.
        connection = http.client.HTTPConnection(address, timeout=10)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()


LOOPS: dict[str, dict[str, Any]] = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}


@pytest.mark.parametrize("loop", LOOPS)
def test_every_byte_is_sent_at_once(loop: str) -> None:
    """The end of a request does not wait for the server to acknowledge its beginning."""

    async def has_no_delay() -> bool:
        transport = network()
        assert isinstance(transport, Http1Transport)
        connection = await transport._network.connect_tcp("127.0.0.1", port)
        try:
            found = connection.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        finally:
            await connection.aclose()
        return bool(found)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert anyio.run(has_no_delay, **LOOPS[loop])


def test_a_server_that_does_not_answer_is_reported_in_one_line_before_the_load(replay: Replay, tmp_path: Path) -> None:
    (tmp_path / "live.requests.jsonl").write_text("of the last time")
    asked = ("--live", "http://127.0.0.1:1", "--json", tmp_path / "live.json", "--per-request")
    said = "Error: no connection to http://127.0.0.1:1: Connection refused\n"
    assert replay(*LOAD, *asked) == (1, "", said)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("live.requests.jsonl", "of the last time")
    ]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--router", "round-robin"),
        ("--workers", "1"),
        ("--prefill-workers", "0"),
        ("--enforce-disagg", None),
        ("--engine", "mocker"),
        ("--engine-arg", "block_size=64"),
        ("--router-config", "x.toml"),
        ("--no-kv-events", None),
        ("--migration-limit", "3"),
        ("--migration-max-seq-len-tokens", "9"),
        ("--active-decode-blocks-threshold", "0.5"),
        ("--active-prefill-tokens-threshold", "5"),
        ("--active-prefill-tokens-threshold-frac", "0.5"),
        ("--fault", "worker 0 dies at 1"),
        ("--real-time", None),
        ("--wall-time", None),
        ("--gpus-per-worker", "1"),
        ("--gpus-per-prefill-worker", "1"),
    ],
)
def test_an_option_of_the_graph_is_refused_with_a_server_even_with_its_default(
    replay: Replay, option: str, value: str | None
) -> None:
    given = [option] if value is None else [option, value]
    code, out, err = replay(*LOAD, "--live", "http://127.0.0.1:1", *given)
    assert (code, out) == (2, "")
    named = "--kv-events" if option == "--no-kv-events" else option
    assert err == f"Error: {named}: cannot go with --live: that server is there, as it is\n"


def test_variables_of_the_graph_do_not_count_with_a_server(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_MIGRATION_LIMIT", "1")
    code, _, err = replay(*LOAD, "--live", "http://127.0.0.1:1")
    assert (code, "no connection" in err) == (1, True)


@pytest.mark.parametrize("option", ["--model", "--live-ids", "--live-timeout"])
def test_an_option_of_a_server_is_refused_without_one(replay: Replay, option: str) -> None:
    assert replay(*LOAD, option, "5") == (2, "", f"Error: {option}: is for --live only\n")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--live", "localhost:8000"), "--live: expected a URL"),
        (("--live", "http://127.0.0.1:1", "--live-ids", "5"), "--live-ids: expected FIRST-LAST"),
        (("--live", "http://127.0.0.1:1", "--live-ids", "9-9"), "--live-ids: expected FIRST-LAST"),
        (("--live", "http://127.0.0.1:1", "--live-ids", "0-9999999999"), "--live-ids: expected at least two"),
        (("--live", "http://127.0.0.1:1", "--live-timeout", "0"), "--live-timeout: must be above 0"),
        (("--live", "http://127.0.0.1:1", "--per-request"), "--per-request: with --live needs --json"),
    ],
)
def test_a_wrong_value_is_named_before_any_request(replay: Replay, given: tuple[str, ...], said: str) -> None:
    code, out, err = replay(*LOAD, *given)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"Error: {said}")
