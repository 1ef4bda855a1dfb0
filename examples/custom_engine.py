"""Write an engine: one class with three methods. This one spells the numbers below its prompt's last token.

python examples/custom_engine.py                        prove it, then send it a request
penstock worker examples.custom_engine:CountDown        host it, with an OpenAI server beside it
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio

from engines import EngineConfig, GenerateContext, LLMEngine, as_engine, run_conformance
from pipeline import Context, InvalidArgument
from pipeline.protocols import CompletionUsage, LLMEngineOutput, PreprocessedRequest
from pipeline.testing import run_in_virtual_time


class CountDown(LLMEngine):
    """Counts down to zero, a number each `pause_s`."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="count-down", context_length=1000)

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        prompt, stop = request.token_ids, request.stop_conditions
        limit, least = stop.max_tokens, stop.max_tokens if stop.ignore_eos else stop.min_tokens
        if not prompt or prompt[-1] < (least or 0) or (request.sampling_options.n or 1) > 1:
            raise InvalidArgument("there is one way to count down, and it ends at zero")
        said = 0
        for number in range(prompt[-1] - 1, -1, -1):
            await anyio.sleep(self.pause_s)
            if context.is_stopped or said == limit:
                break
            said += 1
            yield LLMEngineOutput.token(number)
        usage = CompletionUsage.of(len(prompt), said)
        if context.is_stopped:
            yield LLMEngineOutput.cancelled().with_usage(usage)
        else:
            yield (LLMEngineOutput.length() if said == limit else LLMEngineOutput.stop()).with_usage(usage)

    async def cleanup(self) -> None:
        """There is nothing to release."""


async def test_count_down_holds_the_engine_contract() -> None:
    await run_conformance(CountDown)


async def main() -> None:
    await test_count_down_holds_the_engine_contract()
    print("holds the engine contract")
    async with (
        as_engine(CountDown(pause_s=1.0)) as engine,
        await engine.generate(Context(PreprocessedRequest([3]))) as stream,
    ):
        print([token async for item in stream if item.data for token in item.data.token_ids], "and lift-off")


if __name__ == "__main__":
    run_in_virtual_time(main)
