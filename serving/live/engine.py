"""LiveEngine: an engine whose work is done by a server over HTTP; how its model is found, and an engine for it opened.

request in tokens ──► OpenAIUpstream ──► server
items             ◄──                ◄──
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

from attrs import frozen

from engines import GenerateContext
from engines.upstream import Address, IdForm, OpenAIUpstream, Transport
from pipeline import Annotated, AsyncEngine, Context, InvalidArgument, PenstockError, ResponseStream
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest

SILENCE_S = 600.0
"""Default of the longest wait for a server to send anything."""


class LiveEngine(AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]):
    """A model behind an OpenAI-compatible server, by an `OpenAIUpstream` whose health is not watched.

    The first read raises the errors of `Upstream`. Stop and kill close the connection, which shows the server that its
    client is gone; after a stop one more item, which is marked as cancelled, ends the stream. `aclose` closes every
    connection.
    """

    shown_texts = ("model",)

    def __init__(
        self,
        address: Address,
        model: str,
        *,
        nvext: bool = False,
        api_key: str | None = None,
        silence_s: float = SILENCE_S,
        transport: Transport | None = None,
    ) -> None:
        """`model` is used for requests without one.

        With `nvext` the server sends the id of every token, its workers and its times, because it knows that extension;
        without it the items have the right number of tokens, each of them `UNKNOWN_TOKEN`. `silence_s` is the longest
        wait for any byte. `transport` replaces the network.
        """
        if not silence_s > 0:
            raise InvalidArgument(f"must be above 0, got {silence_s:g}", field="live_timeout")
        self.address, self.model = address, model
        self._upstream = OpenAIUpstream(
            str(address),
            model=model,
            api_key=api_key,
            silence_s=silence_s,
            transport=transport,
            ids=IdForm.NVEXT if nvext else IdForm.NONE,
            is_continued=False,
        )

    @property
    def in_flight(self) -> int:
        """Number of requests that have a connection, or wait for one."""
        return self._upstream.in_flight

    async def generate(self, request: Context[PreprocessedRequest]) -> ResponseStream[Annotated[LLMEngineOutput]]:
        return ResponseStream(self._items(request), request)

    async def aclose(self) -> None:
        """Close every connection. A request that is still open, or comes later, ends with Disconnected."""
        await self._upstream.cleanup()

    async def _items(self, request: Context[PreprocessedRequest]) -> AsyncGenerator[Annotated[LLMEngineOutput], None]:
        context = GenerateContext(request, metadata=request.metadata)
        async with aclosing(self._upstream.generate(request.payload, context)) as chunks:
            async for chunk in chunks:
                yield Annotated(chunk)


# -- finding a server

_FIND_S = 30.0


@frozen
class LiveServer:
    """A server, its model, and whether it knows `nvext`."""

    address: Address
    model: str
    nvext: bool = False


async def find_server(
    url: str, *, model: str | None = None, api_key: str | None = None, transport: Transport | None = None
) -> LiveServer:
    """Return the server at this URL with its first model, or with `model`, by `GET /v1/models`.

    A server without that page is used with `model` as it is. Raise InvalidArgument for an invalid URL and for a model
    that the server does not have, Unavailable if it has no model, and the errors of `LiveEngine` if it does not answer.
    """
    address = Address.parse(url, field="live")
    server = OpenAIUpstream(str(address), model=model, api_key=api_key, silence_s=_FIND_S, transport=transport)
    try:
        name, knows_nvext = await server.found_model()
    except PenstockError as error:
        if str(address) not in error.message:
            error.message = f"{address}: {error.message}"
        raise
    finally:
        await server.cleanup()
    return LiveServer(address, name, knows_nvext)


def live_graph(
    server: LiveServer | str,
    *,
    api_key: str | None = None,
    silence_s: float = SILENCE_S,
    transport: Transport | None = None,
) -> Callable[[], AbstractAsyncContextManager[LiveEngine]]:
    """Return the opener of an engine for `serving.replay.run`: of a server, or of the first model at a URL."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[LiveEngine]:
        found = await find_server(server, api_key=api_key, transport=transport) if isinstance(server, str) else server
        engine = LiveEngine(
            found.address, found.model, nvext=found.nvext, api_key=api_key, silence_s=silence_s, transport=transport
        )
        async with aclosing(engine):
            yield engine

    return opened
