"""Declare a graph, look at it, send it a request.

python examples/declare_graph.py
"""

from __future__ import annotations

import anyio

from engines import EchoEngine, as_engine
from operators import Detokenize, Model, Preprocess, PushRouter
from pipeline import Context
from pipeline.network import static_workers
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage

model = Model.byte_level("echo")
fast, slow = as_engine(EchoEngine()), as_engine(EchoEngine(delay_s=0.01))
workers = static_workers({1: fast, 2: slow}, name="demo")

graph = Preprocess(model) >> Detokenize(model) >> PushRouter(workers)


async def main() -> None:
    print(graph)
    print(graph.draw("text"))

    chat = ChatCompletionRequest(model="echo", messages=[ChatMessage(role="user", content="What runs uphill?")])
    async with fast, slow, await graph.generate(Context(chat)) as stream:
        async for item in stream:
            if item.data is not None and item.data.text:
                print(item.data.text, end="", flush=True)
    print()


if __name__ == "__main__":
    anyio.run(main)
