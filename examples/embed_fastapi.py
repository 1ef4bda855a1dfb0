"""Embed a graph in a FastAPI app: as an OpenAI-compatible API under a prefix, and called from routes of one's own.

uvicorn examples.embed_fastapi:application        then: curl localhost:8000/ai/v1/models
                                                        curl -N "localhost:8000/stream?text=hello"
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from engines import EchoEngine, as_engine
from operators import Detokenize, Model, Preprocess, PushRouter
from pipeline import Context
from pipeline.network import static_workers
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from serving.http import app

model = Model.byte_level("echo")
engine = as_engine(EchoEngine(delay_s=0.01))
graph = Preprocess(model) >> Detokenize(model) >> PushRouter(static_workers({1: engine}))


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with engine:
        yield


application = FastAPI(lifespan=lifespan)
application.mount("/ai", app(graph))


async def answer(text: str) -> AsyncIterator[str]:
    """Yield the texts of the answer. A client that leaves cancels the task, which closes the whole stream."""
    chat = ChatCompletionRequest(model="echo", messages=[ChatMessage(role="user", content=text)])
    async with await graph.generate(Context(chat)) as stream:
        async for item in stream:
            if item.data and item.data.text:
                yield item.data.text


@application.get("/shout")
async def shout(text: str) -> str:
    return "".join([part.upper() async for part in answer(text)])


@application.get("/stream")
async def stream(text: str) -> StreamingResponse:
    return StreamingResponse(answer(text), media_type="text/plain")
