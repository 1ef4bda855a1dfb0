"""What the fakes of the normal suite are held to is what the installed vLLM answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.vllm.recording import fits, local, published, replay, requests, send
from tests.vllm.servers import BYTE_HASHES, Role, Servers, VllmServer

pytestmark = pytest.mark.vllm

RECORDED = Path(__file__).parents[1] / "engines" / "upstream" / "recorded"
NAMES = [request["name"] for request in requests()]


def recorded(name: str = "vllm") -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return record


def events_of(records: list[dict[str, Any]]) -> list[Any]:
    """All events from the first store on: the server may send earlier, by itself, that all is cleared."""
    events = [event for each in records for event in each["decoded"][1]]
    first = next(number for number, event in enumerate(events) if event["type"] == "BlockStored")
    return events[first:]


@pytest.fixture
def client(server: VllmServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("name", NAMES)
def test_each_recorded_request_is_answered_in_the_recorded_form(name: str, client: httpx2.Client) -> None:
    exchange = next(each for each in recorded()["exchanges"] if each["name"] == name)
    answer = send(client, exchange)
    assert answer["status"] == exchange["answer"]["status"]
    assert fits(answer, exchange["answer"]), answer


def test_every_request_that_can_be_recorded_is_recorded() -> None:
    assert [each["name"] for each in recorded()["exchanges"]] == NAMES


def test_metrics_have_the_recorded_names_and_labels(client: httpx2.Client) -> None:
    lines = client.get("/metrics").text.splitlines()
    there = {line.partition("{")[0] for line in lines}
    assert {line.partition("{")[0] for line in recorded()["metrics"]} <= there


@pytest.mark.parametrize(("record", "role"), [("vllm", Role()), ("vllm_byte_hashes", BYTE_HASHES)])
def test_kv_events_have_the_recorded_form_live_and_replayed(record: str, role: Role, servers: Servers) -> None:
    server = servers.take(role)[0]
    with httpx2.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        source = client.get("/kv_event_sources").json()["0"]
        first = len(replay(local(source["replay_endpoint"]), 0)) - 1
        live = published(local(source["endpoint"]), client)
    expected = recorded(record)["kv_events"]
    assert [event["type"] for event in events_of(live)] == [event["type"] for event in events_of(expected)]
    assert all(map(fits, events_of(live), events_of(expected)))
    again = replay(local(source["replay_endpoint"]), first)
    # The same batches by both ways; an empty delimiter stands before a replayed one, and a mark after the last.
    assert [each["frames"][1:] for each in again[:-1]] == [each["frames"] for each in live]
    assert again[-1]["frames"] == ["", "", "ff" * 8, ""]
