"""A worker process: floods who calls it with "flood", and gives others a token each 10 ms. Prints its instance."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from typing import Any

import anyio

from pipeline import Annotated, AsyncEngine, Context, ResponseStream
from pipeline.network.names import EndpointId, Instance
from pipeline.network.tcp import TcpOptions, TcpRequestPlane
from pipeline.protocols import LLMEngineOutput
from pipeline.rx import AnyIOScheduler
from pipeline.wire import to_json

STEP_S = 0.01


class Flooding(AsyncEngine[Any, Annotated[LLMEngineOutput]]):
    """Answers `{"items": n, "paced": bool}`."""

    async def generate(self, request: Context[Any]) -> ResponseStream[Annotated[LLMEngineOutput]]:
        return ResponseStream(self._items(request), request)

    async def _items(self, request: Context[Any]) -> AsyncGenerator[Annotated[LLMEngineOutput], None]:
        due_s = anyio.current_time()
        for number in range(request.payload["items"]):
            if request.is_stopped:
                return
            if request.payload["paced"]:
                due_s += STEP_S
                await anyio.sleep_until(due_s)
            yield Annotated(LLMEngineOutput([number]))


async def main() -> None:
    async with AnyIOScheduler() as scheduler:
        plane = TcpRequestPlane(scheduler, TcpOptions(has_unix_socket=False))
        await plane.open()
        instance, _ = await plane.serve(Instance.of(EndpointId("ns", "flood", "generate"), 1), Flooding())
        sys.stdout.write(to_json(instance).decode() + "\n")
        sys.stdout.flush()
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
