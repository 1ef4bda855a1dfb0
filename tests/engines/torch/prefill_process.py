"""A prefill worker as a process of its own: prompts in, one JSON line each, and their disaggregated_params out.

python -m tests.engines.torch.prefill_process
"""

from __future__ import annotations

import json
import sys
from typing import Any

import anyio

from engines import DisaggregationMode, as_engine
from engines.torch import SocketHandover, TorchEngine, TorchSettings
from pipeline import Context

from .tiny_model import loader
from .worlds import request_of


async def compute(stage: Any, number: int, prompt: list[int]) -> None:
    """Compute one prompt, and print its number with what decode needs."""
    async with await stage.generate(Context(request_of(prompt, max_tokens=4))) as stream:
        params = [item.data.disaggregated_params async for item in stream if item.data is not None]
    print(json.dumps([number, params[0]]), flush=True)  # noqa: T201


async def main() -> None:
    """Compute prompts until standard input ends."""
    settings = TorchSettings(role="prefill", block_size_tokens=8, kv_cache_blocks=2048)
    engine = TorchEngine(loader(), settings, handover=SocketHandover(prefills=True))
    async with as_engine(engine, mode=DisaggregationMode.PREFILL) as stage, anyio.create_task_group() as tasks:
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            number, prompt = json.loads(line)
            tasks.start_soon(compute, stage, number, prompt)


if __name__ == "__main__":
    anyio.run(main)
