"""Probes: how they are made and recognised, and how the engine answers them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines import DisaggregationMode, EchoEngine, LLMEngine, as_engine
from engines.adapter import RequestAdapter
from engines.worker.probe import ProbeEngine, bos_token_id, health_payload, is_probe, payload_from_text, stamp
from pipeline import Annotated, Context, InvalidArgument
from pipeline.errors import BackendUnknown
from pipeline.protocols import PreprocessedRequest
from pipeline.testing import check_engine
from tests.engines.worlds import Chunk, scripted


async def probed(engine: LLMEngine, payload: Any, **settings: Any) -> list[Annotated[Chunk]]:
    probe = ProbeEngine(RequestAdapter(engine, **settings))
    return await (await probe.generate(Context(payload))).collect()


# -- payloads


def test_every_payload_requests_one_token() -> None:
    assert health_payload(5, model="m") == {
        "token_ids": [5],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "model": "m",
    }
    assert health_payload()["token_ids"] == [1]
    assert health_payload(token_ids=[9])["token_ids"] == [9]


@pytest.mark.parametrize("payload", [{"a": 1}, {}, {"a": 1, "_HEALTH_CHECK": False}])
def test_a_stamp_marks_a_copy(payload: dict[str, Any]) -> None:
    before = dict(payload)
    assert stamp(payload) == {**payload, "_HEALTH_CHECK": True}
    assert payload == before


@pytest.mark.parametrize(("value", "is_one"), [(True, True), (False, False), ("true", False), (1, False)])
def test_only_the_marker_itself_makes_a_probe(value: Any, is_one: bool) -> None:
    assert is_probe({"_HEALTH_CHECK": value}) is is_one


def test_without_the_marker_it_is_no_probe() -> None:
    assert not is_probe({"token_ids": [1]})


@pytest.mark.parametrize(
    ("tokenizer", "default", "found"),
    [
        (SimpleNamespace(bos_token_id=7), 1, 7),
        (SimpleNamespace(tokenizer=SimpleNamespace(bos_token_id=7)), 1, 7),
        (SimpleNamespace(bos_token_id=None, tokenizer=SimpleNamespace(bos_token_id=7)), 1, 7),
        (SimpleNamespace(bos_token_id=0), 1, 0),
        (None, 1, 1),
        (object(), 5, 5),
    ],
)
def test_the_token_that_begins_a_text_is_looked_for_in_the_object_and_its_tokenizer(
    tokenizer: Any, default: int, found: int
) -> None:
    assert bos_token_id(tokenizer, default) == found


@pytest.mark.parametrize("text", [None, "", "  ", "[1]", "7", "{", "null", "@/nowhere/at/all", "@"])
def test_a_value_that_is_not_an_object_is_no_payload(text: str | None) -> None:
    assert payload_from_text(text) is None


def test_a_payload_may_be_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    file.write_text('{"token_ids": [3]}')
    assert payload_from_text(f" @{file}") == {"token_ids": [3]}
    assert payload_from_text('{"token_ids": [3]}') == {"token_ids": [3]}
    assert payload_from_text("{}") == {}
    file.write_bytes(b"\xff{}")
    assert payload_from_text(f"@{file}") is None


# -- answers


async def test_a_probe_is_read_and_answered_as_any_request() -> None:
    engine = scripted(Chunk.token(4), Chunk.length())
    items = await probed(engine, stamp({"token_ids": [1]}))
    assert [item.data for item in items] == [Chunk.token(4), Chunk.length()]
    assert [payload for payload, _ in engine.calls] == [PreprocessedRequest([1], is_probe=True)]


async def test_a_chunk_that_finished_with_an_error_becomes_an_error_item_and_the_last() -> None:
    items = await probed(scripted(Chunk.token(4), Chunk.error("x")), stamp({"token_ids": [1]}))
    assert items[0].data == Chunk.token(4)
    error = items[1].extract_error()
    assert (type(error), str(error), len(items)) == (BackendUnknown, "x", 2)


@pytest.mark.parametrize("payload", [{}, {"token_ids": "text"}, {"token_ids": [1], "_HEALTH_CHECK": 1}, [1], None, "x"])
async def test_a_payload_that_is_no_request_is_an_error_item(payload: Any) -> None:
    engine = scripted(Chunk.stop())
    (item,) = await probed(engine, payload)
    assert isinstance(item.extract_error(), InvalidArgument)
    assert engine.calls == []


async def test_a_decode_worker_answers_its_probe_without_a_prefill() -> None:
    items = await probed(EchoEngine(), stamp(health_payload()), mode=DisaggregationMode.DECODE)
    assert [item.data and item.data.token_ids for item in items] == [[1]]


async def test_every_engines_own_payload_is_a_probe_it_answers() -> None:
    payload = await EchoEngine().health_check_payload()
    items = await probed(EchoEngine(), stamp(payload))
    assert items[-1].data is not None
    assert str(items[-1].data.finish_reason) == "length"


async def test_probing_holds_the_engine_contract() -> None:
    @asynccontextmanager
    async def probed_echo() -> AsyncIterator[ProbeEngine]:
        async with as_engine(EchoEngine(0.01)) as served:
            yield ProbeEngine(served)

    await check_engine(probed_echo, request=stamp({"token_ids": list(range(60))}), bad_request={"token_ids": "text"})
