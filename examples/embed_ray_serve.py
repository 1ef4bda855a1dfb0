"""Embed a graph in Ray Serve: each replica has the OpenAI-compatible API of a graph of its own.

pip install "ray[serve]"
serve run examples.embed_ray_serve:application        then: curl localhost:8000/v1/models
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from ray import serve  # pyright: ignore[reportMissingImports]

from engines import EchoEngine, as_engine
from operators import Detokenize, Model, Preprocess, PushRouter
from pipeline.network import static_workers
from serving.http import app


def replica() -> FastAPI:
    """Return the app of one replica; made there, since a graph belongs to one process."""
    model = Model.byte_level("echo")
    engine = as_engine(EchoEngine(delay_s=0.01))
    graph = Preprocess(model) >> Detokenize(model) >> PushRouter(static_workers({1: engine}))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    front = FastAPI(lifespan=lifespan)
    front.mount("/", app(graph))
    return front


application = serve.deployment(serve.ingress(replica)()).bind()
