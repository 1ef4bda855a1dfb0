"""LiveEngine: an engine that is a server, asked over HTTP.

request in tokens ──► POST /v1/completions ──► server
items             ◄── server-sent events   ◄──
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from pipeline import Annotated, AsyncEngine, Cancelled, Context, InvalidArgument, ResponseStream
from pipeline.errors import InvalidMessage
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest

from .address import Address
from .answers import UNKNOWN_TOKEN as UNKNOWN_TOKEN
from .answers import AnswerReader
from .client import Client, Transport
from .exchange import Exchange
from .problems import of_status
from .requests import completion, headers_of

SILENCE_S = 600.0
"""How long a server may say nothing, unless said otherwise."""

_EVENTS = "text/event-stream"


class LiveEngine(AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]):
    """A model behind an OpenAI-compatible server, asked in token ids.

    `model` is asked for where a request names none. `nvext` says that the server knows that extension: then it tells
    the id of every token, its workers and its times. Without it the items have the right number of tokens, but each is
    `UNKNOWN_TOKEN`. No more than `silence_s` may pass between two signs of life. There are as many connections as there
    are requests; `transport` takes the place of the network.

    Errors come from the first read: CannotConnect and ConnectionTimeout; ResourceExhausted for the statuses 429 and
    529, Unavailable for 503, StatusError for any other of 3xx and 4xx, a BackendError for 5xx and for an error amid an
    answer; Disconnected and StreamIncomplete for an answer without its end, ResponseTimeout for silence, InvalidMessage
    for what is no answer at all. Stop and kill close the connection, by which the server hears of them, and end a
    wait at once; between two reads they do so with the next one. After a stop there is one more item, which says so.
    `aclose` closes every connection.
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
        if not silence_s > 0:
            raise InvalidArgument(f"must be above 0, got {silence_s:g}", field="live_timeout")
        self.address, self.model, self._nvext, self._api_key = address, model, nvext, api_key
        self._client = Client(address, silence_s, transport)

    @property
    def in_flight(self) -> int:
        """How many requests have a connection now, or wait for one."""
        return self._client.in_flight

    async def generate(self, request: Context[PreprocessedRequest]) -> ResponseStream[Annotated[LLMEngineOutput]]:
        payload = request.payload
        body = completion(payload, payload.model or self.model, nvext=self._nvext)
        return ResponseStream(self._items(request, body), request)

    async def aclose(self) -> None:
        """Closes every connection: a request that is still open, or comes later, ends with Disconnected."""
        await self._client.aclose()

    async def _items(
        self, request: Context[PreprocessedRequest], body: bytes
    ) -> AsyncGenerator[Annotated[LLMEngineOutput], None]:
        reader, control = AnswerReader(), request.control
        async with Exchange(self._client, control) as exchange:
            try:
                await self._begin(exchange, request, body)
                while not reader.is_done:
                    data = await exchange.read()
                    for output in reader.feed(data) if data else reader.end(whole=exchange.is_whole):
                        if control.is_killed:
                            return
                        yield Annotated(output)
                await exchange.finish()
            except Cancelled:
                if control.is_killed:
                    return
                yield Annotated(LLMEngineOutput.cancelled())

    async def _begin(self, exchange: Exchange, request: Context[PreprocessedRequest], body: bytes) -> None:
        """Until the answer begins; raises where none does."""
        status = await exchange.ask("POST", "/v1/completions", headers_of(request, self._api_key), body)
        if status != 200:
            raise of_status(status, await exchange.body())
        if exchange.content_type != _EVENTS:
            kind = exchange.content_type or "something without a content type"
            raise InvalidMessage(f"expected {_EVENTS}, the server sent {kind}")
