"""What real vLLM servers answered, read by VllmUpstream's readers; and the simulated server held to its form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engines.upstream import TokenAnswer, of_completion, of_generate
from pipeline import PenstockError
from pipeline.errors import EngineShutdown, InvalidArgument
from tests.engines.upstream.vllm_worlds import fake_vllm
from tests.engines.upstream.wire import as_event
from tests.engines.upstream.worlds import URL

RECORDED = json.loads((Path(__file__).parent / "recorded" / "vllm.json").read_text(encoding="utf-8"))
EXCHANGES: list[dict[str, Any]] = RECORDED["exchanges"]
STREAMS = [each for each in EXCHANGES if "events" in each["answer"]]


def names(exchanges: list[dict[str, Any]]) -> list[str]:
    return [each["name"] for each in exchanges]


def read(exchange: dict[str, Any], *, piece_bytes: int) -> list[int]:
    """The tokens of a recorded stream whose bytes come in pieces. Raise the error of one that is or has one."""
    body, generates = exchange["body"], "generate" in exchange["path"]
    choices = body.get("sampling_params", body).get("n", 1)
    answer = TokenAnswer(choices, 70, of_generate if generates else of_completion)
    data = b"".join(map(as_event, exchange["answer"]["events"]))
    tokens: list[int] = []
    for place in range(0, len(data), piece_bytes):
        tokens += [token for output in answer.feed(data[place : place + piece_bytes]) for token in output.token_ids]
    assert answer.is_done
    assert answer.tokens == len(tokens)
    return tokens


@pytest.mark.parametrize("piece_bytes", [7, 100_000])
@pytest.mark.parametrize("exchange", STREAMS, ids=names(STREAMS))
def test_a_recorded_stream_is_read(exchange: dict[str, Any], piece_bytes: int) -> None:
    events = [event for event in exchange["answer"]["events"] if isinstance(event, dict)]
    if "error" in events[0]:
        with pytest.raises(InvalidArgument) as caught:
            read(exchange, piece_bytes=piece_bytes)
        assert caught.value.message == events[0]["error"]["message"]
    elif exchange["name"] == "aborted":
        with pytest.raises(EngineShutdown):
            read(exchange, piece_bytes=piece_bytes)
    elif exchange["body"].get("logprobs") and "completions" in exchange["path"]:
        # Texts in the place of ids: what is never requested without `return_tokens_as_token_ids`.
        with pytest.raises(PenstockError):
            read(exchange, piece_bytes=piece_bytes)
    else:
        wanted = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
        assert read(exchange, piece_bytes=piece_bytes) == wanted


# -- the simulated server

SIMULATED = ("/v1/models", "/kv_event_sources", "/health", "/inference/", "/v1/completions")
NOT_SIMULATED = ("two choices", "bad option", "no tokens", "salt not allowed", "no such rank", "aborted")
"""What is random, or takes two requests, or is checked before it is sent."""
HELD = [each for each in EXCHANGES if each["path"].startswith(SIMULATED) and each["name"] not in NOT_SIMULATED]


def differences(made: Any, real: Any, place: str = "") -> list[str]:
    """Where a simulated value is not of the form of a real one; what the real one has beyond it does not matter."""
    if made is None or real is None:
        return []
    if isinstance(made, dict) and isinstance(real, dict):
        absent = [f"{place}.{name} is not there" for name in made if name not in real]
        return absent + [
            found for name in made if name in real for found in differences(made[name], real[name], f"{place}.{name}")
        ]
    if isinstance(made, list) and isinstance(real, list):
        return [found for one in made[:1] for found in (differences(one, real[0], f"{place}[]") if real else [])]
    if isinstance(made, int | float) and isinstance(real, int | float):
        return []
    return [] if type(made) is type(real) else [f"{place} is {type(made).__name__}, not {type(real).__name__}"]


def parsed(body: bytes) -> list[Any]:
    """The events of a stream, or the one value of any other body."""
    text = body.decode()
    if not text.startswith("data: "):
        return [json.loads(text) if text else None]
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


@pytest.mark.parametrize("exchange", HELD, ids=names(HELD))
async def test_the_simulated_server_answers_in_the_recorded_form(exchange: dict[str, Any]) -> None:
    sources = {"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": ""}}
    body = exchange["body"]
    if exchange["name"] == "prompt too long":  # recorded in short
        body = body | {"token_ids": [5] * 8193}
    async with fake_vllm(event_sources=sources, context_length=8192) as server:
        transport = server.transport
        async with httpx2.AsyncClient(transport=transport, base_url=URL, timeout=900.0) as client:
            answer = await client.request(exchange["method"], exchange["path"], headers=exchange["headers"], json=body)
            made = parsed(answer.content)
    real = exchange["answer"]
    assert answer.status_code == real["status"]
    expected: list[Any] = real.get("events") or [real.get("json")]
    for value in made:
        found = [differences(value, other) for other in expected if type(other) is type(value)]
        assert value is None or [] in found, (value, found)
    assert (made[-1] == "[DONE]") == (expected[-1] == "[DONE]")
