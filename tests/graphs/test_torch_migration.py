"""Answers of a language model that break in the middle and are sent again: the tokens of undisturbed ones."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import pytest

from engines import as_engine
from operators import Migration, PushRouter
from pipeline import Context
from pipeline.network import static_workers
from pipeline.testing import Fault, Faults
from tests.engines.torch.tiny_model import plain_answer, random_prompt, tiny_engine
from tests.engines.torch.worlds import request_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

REQUESTS = 50
TOKENS = 20


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Real time: the engines have threads of their own."""
    return request.param


async def test_fifty_answers_that_migrate_equal_plain_decoding() -> None:
    random = Random(21)
    prompts = [random_prompt(random, 1, 80) for _ in range(REQUESTS)]
    faults = {f"request-{number}": Fault(disconnect_after=random.randrange(1, TOKENS)) for number in range(REQUESTS)}
    answers: dict[int, list[int]] = {}
    one, two = tiny_engine(), tiny_engine()
    async with as_engine(one) as first, as_engine(two) as second:
        workers = static_workers({1: first, 2: second})
        each_once = Faults(plan=lambda request: faults.pop(request.id, None))
        graph = Migration(limit=1) >> each_once >> PushRouter(workers)
        places = anyio.CapacityLimiter(8)

        async def ask(number: int) -> None:
            request = request_of(prompts[number], max_tokens=TOKENS)
            async with places, await graph.generate(Context(request, id=f"request-{number}")) as stream:
                items = [item.data async for item in stream]
            answers[number] = [token for data in items if data is not None for token in data.token_ids]

        async with anyio.create_task_group() as tasks:
            for number in range(REQUESTS):
                tasks.start_soon(ask, number)
    assert not faults
    assert [answers[number] for number in range(REQUESTS)] == [plain_answer(prompt, TOKENS) for prompt in prompts]
    assert [engine.batcher.pool.active for engine in (one, two)] == [0, 0]
