"""Write an operator: one class with `generate`. This one gives each request a deadline.

python examples/write_operator.py
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import anyio

from engines import EchoEngine, as_engine
from operators import Detokenize, Model, Preprocess
from pipeline import Annotated, AsyncEngine, Context, Operator, ResponseStream
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from pipeline.testing import check_operator


class Deadline(Operator[Any, Any, Any, Any]):
    """Stops a request that takes longer than `seconds`: its engine ends early, what it made is delivered.

        request ──► unchanged        items ◄── unchanged, until the deadline

    It looks at the clock when an item passes, so it costs no task and no timer.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        deadline = anyio.current_time() + self.seconds
        stream = await next.generate(request)
        return ResponseStream(self._items(stream, deadline), request, stream)

    async def _items(self, stream: ResponseStream[Any], deadline: float) -> AsyncGenerator[Any, None]:
        async with stream:
            async for item in stream:
                if anyio.current_time() >= deadline:
                    stream.context.stop()
                yield item


async def main() -> None:
    await check_operator(lambda: Deadline(60), request="ask", items=[Annotated(n) for n in range(40)])
    print("Deadline holds the operator contract")

    model = Model.byte_level("echo")
    engine = as_engine(EchoEngine(delay_s=0.03))
    graph = Deadline(0.1) >> Preprocess(model) >> Detokenize(model) >> engine
    chat = ChatCompletionRequest(model="echo", messages=[ChatMessage(role="user", content="slowly, please")])
    async with engine, await graph.generate(Context(chat)) as stream:
        async for item in stream:
            print(item.data.text or f"({item.data.finish_reason})", end=" ")
    print()


if __name__ == "__main__":
    anyio.run(main)
