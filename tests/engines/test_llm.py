"""The config of an engine, and the methods it may leave out."""

from __future__ import annotations

from typing import Any

import pytest

from engines import EngineConfig, LLMEngine, MetricsBindings, MetricsContext
from engines.conformance import mock_context
from engines.publishing import EngineMetrics
from pipeline import InvalidArgument
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest


def test_only_the_model_must_be_named_and_nothing_else_is_advertised() -> None:
    config = EngineConfig(model="m")
    assert (config.model_aliases, config.runtime_data) == ([], {})
    for name in ("served_model_name", "context_length", "kv_cache_block_size", "total_kv_blocks", "max_num_seqs"):
        assert getattr(config, name) is None
    for name in ("max_num_batched_tokens", "data_parallel_size", "data_parallel_start_rank", "bootstrap_host"):
        assert getattr(config, name) is None
    assert config.bootstrap_port is None


@pytest.mark.parametrize(
    "plain",
    [
        {"model": "m", "context_length": 8, "max_num_seqs": 2},
        {"model": "m", "llm": {"context_length": 8, "max_num_seqs": 2}},
        {"model": "m", "context_length": 9, "llm": {"context_length": 8, "max_num_seqs": 2}},
        {"model": "m", "context_length": 8, "max_num_seqs": 2, "llm": None},
    ],
)
def test_both_spellings_of_a_config_are_read(plain: dict[str, Any]) -> None:
    assert EngineConfig.from_plain(plain) == EngineConfig(model="m", context_length=8, max_num_seqs=2)


@pytest.mark.parametrize(
    ("plain", "field"),
    [
        ({}, "model"),
        ({"model": "m", "size": 1}, "size"),
        ({"model": "m", "llm": {"size": 1}}, "size"),
        ({"model": "m", "llm": [1]}, "llm"),
    ],
)
def test_a_config_that_misses_its_model_or_names_something_unknown_is_refused(
    plain: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        EngineConfig.from_plain(plain)
    assert caught.value.field == field


class Required(LLMEngine):
    """Has the required methods only."""

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m")

    async def generate(self, request: PreprocessedRequest, context: Any) -> Any:
        yield LLMEngineOutput.stop()

    async def cleanup(self) -> None:
        """Release nothing."""


@pytest.mark.parametrize("missing", ["start", "generate", "cleanup"])
def test_start_generate_and_cleanup_must_be_written(missing: str) -> None:
    methods = {name: getattr(Required, name) for name in {"start", "generate", "cleanup"} - {missing}}
    cls: Any = type("Lacks", (LLMEngine,), methods)
    with pytest.raises(TypeError, match=missing):
        cls()


async def test_all_else_is_left_out_unless_it_is_written() -> None:
    engine = Required()
    assert list(await engine.kv_event_sources()) == []
    context = MetricsContext("m", "backend", 0.0, EngineMetrics())
    assert await engine.setup_metrics(context) == MetricsBindings()
    assert await engine.health_check_payload() is None
    assert not engine.ends_on_kill
    await engine.background()
    await engine.abort(mock_context())
    await engine.drain()
