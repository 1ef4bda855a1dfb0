"""Embed a graph in a FastAPI app: as an OpenAI-compatible API under a prefix, and called from a route of one's own.

uvicorn examples.embed_fastapi:application        then: curl localhost:8000/ai/v1/models
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from engines import EchoEngine, as_engine
from operators import Detokenize, Model, Preprocess, PushRouter
from pipeline import Context
from pipeline.network import static_workers
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from serving.http import app

model = Model.byte_level("echo")
engine = as_engine(EchoEngine())
graph = Preprocess(model) >> Detokenize(model) >> PushRouter(static_workers({1: engine}))


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with engine:
        yield


application = FastAPI(lifespan=lifespan)
application.mount("/ai", app(graph))


@application.get("/shout")
async def shout(text: str) -> str:
    chat = ChatCompletionRequest(model="echo", messages=[ChatMessage(role="user", content=text)])
    async with await graph.generate(Context(chat)) as stream:
        return "".join([item.data.text.upper() async for item in stream if item.data and item.data.text])
