"""as_engine: an LLMEngine alone, started and cleaned up by its own block."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engines import DisaggregationMode, EchoEngine, EngineConfig, GenerateContext, LLMEngine, as_engine
from pipeline import Context, EngineShutdown, InvalidArgument
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.testing import check_engine


class Noted(LLMEngine):
    """Records its calls; raises where the test demands it."""

    def __init__(self, *fails: str) -> None:
        self.fails = fails
        self.calls: list[str] = []

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fails:
            raise RuntimeError(call)

    async def start(self, worker_id: int) -> EngineConfig:
        self._note(f"start {worker_id}")
        return EngineConfig(model="noted", context_length=8)

    async def background(self) -> None:
        self._note("background")
        try:
            await anyio.sleep_forever()
        finally:
            self.calls.append("background ends")

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        await checkpoint()
        yield LLMEngineOutput.stop()

    async def drain(self) -> None:
        self._note("drain")

    async def cleanup(self) -> None:
        self._note("cleanup")


REQUEST = PreprocessedRequest([1, 2])
WHOLE_LIFE = ["start 7", "background", "drain", "cleanup", "background ends"]


async def test_its_block_starts_drains_and_cleans_up_in_order() -> None:
    engine = Noted()
    async with as_engine(engine, worker_id=7) as served:
        assert served.config.context_length == 8
        await anyio.wait_all_tasks_blocked()
        assert len(await (await served.generate(Context(REQUEST))).collect()) == 1
    assert engine.calls == WHOLE_LIFE


async def test_outside_of_its_block_it_has_shut_down() -> None:
    served = as_engine(Noted())
    with pytest.raises(EngineShutdown):
        await served.generate(Context(REQUEST))
    async with served:
        pass
    with pytest.raises(EngineShutdown):
        await served.generate(Context(REQUEST))


async def test_a_start_that_fails_is_cleaned_up_and_its_error_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    for fails in (["start 7"], ["start 7", "cleanup"]):
        engine = Noted(*fails)
        with pytest.raises(RuntimeError, match="start 7"):
            async with as_engine(engine, worker_id=7):
                pytest.fail("it has not started")
        assert engine.calls == ["start 7", "cleanup"]
    assert [record.getMessage() for record in caplog.records] == ["Noted failed to clean up"]


@pytest.mark.parametrize("step", ["drain", "cleanup"])
async def test_what_the_end_raises_is_logged(step: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    engine = Noted(step)
    async with as_engine(engine, worker_id=7):
        await anyio.wait_all_tasks_blocked()
    assert engine.calls == WHOLE_LIFE
    assert [str(record.exc_info and record.exc_info[1]) for record in caplog.records] == [step]


async def test_an_error_of_the_block_goes_on_as_it_is() -> None:
    engine = Noted()

    async def fail() -> None:
        async with as_engine(engine, worker_id=7):
            await anyio.wait_all_tasks_blocked()
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    assert engine.calls == WHOLE_LIFE


async def test_a_block_that_is_cancelled_still_drains_and_cleans_up() -> None:
    engine = Noted()
    with anyio.move_on_after(1) as scope:
        async with as_engine(engine, worker_id=7):
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert sorted(engine.calls) == sorted(WHOLE_LIFE)


async def test_a_background_that_fails_ends_the_block() -> None:
    engine = Noted("background")
    with pytest.raises(ExceptionGroup) as caught:
        async with as_engine(engine, worker_id=7):
            await anyio.sleep_forever()
    assert [str(error) for error in caught.value.exceptions] == ["background"]
    assert engine.calls == ["start 7", "background", "drain", "cleanup"]


async def test_a_block_that_fails_beside_its_background_raises_both_errors() -> None:
    async def fail() -> None:
        async with as_engine(Noted("background")):
            try:
                await anyio.sleep_forever()
            finally:
                raise KeyError("block")

    with pytest.raises(ExceptionGroup) as caught:
        await fail()
    assert [type(error) for error in caught.value.exceptions] == [KeyError, RuntimeError]


async def test_the_mode_holds_for_its_requests() -> None:
    async with as_engine(EchoEngine(), mode=DisaggregationMode.DECODE) as served:
        with pytest.raises(InvalidArgument):
            await served.generate(Context(REQUEST))


def test_it_prints_as_it_is_written() -> None:
    assert str(as_engine(EchoEngine())) == "as_engine(EchoEngine)"


async def test_it_holds_the_engine_contract() -> None:
    await check_engine(
        lambda: as_engine(EchoEngine(0.01)),
        request=PreprocessedRequest(list(range(60))),
        bad_request=PreprocessedRequest([], prompt_embeds="AAAA"),
    )
