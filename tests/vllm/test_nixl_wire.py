"""What the hand-over by NIXL is on the wire: the records that the fakes are held to, and that its tokens are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.recording import fits
from tests.vllm.recording_nixl import PROMPT, hand_over
from tests.vllm.servers import BLOCK_SIZE_TOKENS, Servers, VllmServer, nixl
from tests.vllm.tiny_model import BYTES_A_TOKEN

pytestmark = pytest.mark.vllm

RECORD = Path(__file__).parents[1] / "engines" / "upstream" / "recorded" / "vllm_nixl.json"


@pytest.fixture
def prefill_and_decode(servers: Servers) -> tuple[VllmServer, VllmServer]:
    prefill, decode = servers.take(nixl("kv_producer"), nixl("kv_consumer"))
    return prefill, decode


def tokens_of(exchange: dict[str, Any]) -> list[int]:
    """The tokens of a streamed answer."""
    events = [event for event in exchange["answer"]["events"] if event != "[DONE]"]
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


def test_a_hand_over_has_the_recorded_form_and_the_tokens_of_one_server(
    prefill_and_decode: tuple[VllmServer, VllmServer],
) -> None:
    prefill, decode = prefill_and_decode
    expected = json.loads(RECORD.read_text(encoding="utf-8"))["exchanges"]
    undisturbed = decode.greedy(PROMPT, 5)
    # Not the hits of the external prefix cache: those count pulls that fail, too.
    before = decode.metric("vllm:nixl_bytes_transferred_sum")
    exchanges = hand_over(prefill.url, decode.url)
    assert [each["name"] for each in exchanges] == [each["name"] for each in expected]
    assert all(fits(each["answer"], other["answer"]) for each, other in zip(exchanges, expected, strict=True)), (
        exchanges
    )
    assert tokens_of(exchanges[1]) == undisturbed
    blocks = -(-len(PROMPT) // BLOCK_SIZE_TOKENS)
    assert decode.metric("vllm:nixl_bytes_transferred_sum") - before == blocks * BLOCK_SIZE_TOKENS * BYTES_A_TOKEN


def test_a_decode_server_answers_after_a_hand_over_that_failed(
    prefill_and_decode: tuple[VllmServer, VllmServer],
) -> None:
    prefill, decode = prefill_and_decode
    *_, failed = hand_over(prefill.url, decode.url)
    assert failed["answer"]["events"][0]["error"]["code"] == 500
    assert len(decode.greedy(PROMPT, 5)) == 5
