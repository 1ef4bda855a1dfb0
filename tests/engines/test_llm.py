"""The config of an engine, and the methods it may leave out."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from engines import EngineConfig, GenerateContext, LLMEngine, MetricsBindings, MetricsContext
from engines.conformance import cancelling_context, mock_context
from engines.llm import FirstToken
from engines.publishing import EngineMetrics
from pipeline import Context, Gate, InvalidArgument
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


# -- what an engine sees of a request's life


async def test_it_shows_and_moves_the_requests_own_life() -> None:
    request = Context("payload", id="mine")
    context = GenerateContext(request)
    assert (context.id, context.inner, context.metadata) == ("mine", request, {})
    assert (context.is_stopped, context.is_killed) == (False, False)
    context.stop()
    await context.stopped()
    assert (request.is_stopped, context.is_stopped, context.is_killed) == (True, True, False)
    context.kill()
    await context.killed()
    assert (request.is_killed, context.is_killed) == (True, True)
    assert repr(context) == "GenerateContext(id='mine', state=killed)"


async def test_a_stop_wakes_stop_waiters_and_not_kill_waiters() -> None:
    context = GenerateContext(Context(None))
    with anyio.move_on_after(5) as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(context.stopped)
            await anyio.wait_all_tasks_blocked()
            context.stop()
    assert not scope.cancelled_caught
    with anyio.move_on_after(5) as scope:
        await context.killed()
    assert scope.cancelled_caught


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_it_takes_offered_tokens_only_while_the_request_runs(how: str) -> None:
    taken: list[tuple[int, None]] = []
    context = GenerateContext(Context(None))
    assert not context.offer_token(1)

    def take(token_id: int, index: None) -> bool:
        taken.append((token_id, index))
        return True

    context.feed(take, Gate())
    assert not context.offer_token(2), "before the first token was yielded"
    context.is_steady = True
    assert context.offer_token(3)
    getattr(context, how)()
    assert not context.offer_token(4)
    assert taken == [(3, None)]


def test_it_takes_two_parts_in_order_and_metadata_by_name() -> None:
    first_token = FirstToken()
    context = GenerateContext(Context(None), first_token, metadata={"tenant": "a"})
    assert context.metadata == {"tenant": "a"}
    context.notify_first_token()
    assert first_token.is_fired


def test_the_first_token_may_be_notified_without_a_waiter() -> None:
    GenerateContext(Context(None)).notify_first_token()


def test_the_first_token_fires_once_for_early_waiters_and_at_once_for_late_ones() -> None:
    first_token, fired = FirstToken(), list[str]()
    first_token.on_fire(lambda: fired.append("early"))
    first_token.on_fire(lambda: fired.append("early too"))
    assert fired == []
    first_token.fire()
    first_token.fire()
    first_token.on_fire(lambda: fired.append("late"))
    assert fired == ["early", "early too", "late"]


def test_a_mock_context_is_neither_stopped_nor_killed() -> None:
    context = mock_context("mine")
    assert (context.id, context.is_stopped, context.is_killed) == ("mine", False, False)
    assert mock_context().id != mock_context().id


async def test_a_cancelling_context_stops_itself_after_its_time() -> None:
    async with cancelling_context(5.0) as context:
        await anyio.sleep(4.9)
        assert not context.is_stopped
        await context.stopped()
        assert anyio.current_time() == pytest.approx(5.0)
        assert not context.is_killed


async def test_a_cancelling_context_forgets_its_stop_at_the_end() -> None:
    async with cancelling_context(5.0) as context:
        pass
    await anyio.sleep(10)
    assert not context.is_stopped


async def test_a_cancelling_context_lets_errors_pass_as_they_are() -> None:
    with pytest.raises(KeyError):
        async with cancelling_context(5.0):
            raise KeyError
