"""LiveEngine: an engine whose work is done by a server over HTTP; how its model is found, and an engine for it opened.

request in tokens ──► POST /v1/completions ──► server
items             ◄── server-sent events   ◄──
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

from attrs import frozen

from engines.upstream import Address, Client, Exchange, Transport, of_status
from pipeline import (
    Annotated,
    AnyContext,
    AsyncEngine,
    Cancelled,
    Context,
    Control,
    InvalidArgument,
    PenstockError,
    ResponseStream,
)
from pipeline.errors import InvalidMessage, Unavailable
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.telemetry import inject
from pipeline.wire import from_json

from ..openai import encode
from .stream import AnswerReader

SILENCE_S = 600.0
"""Default of the longest wait for a server to send anything."""

_EVENTS = "text/event-stream"


class LiveEngine(AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]):
    """A model behind an OpenAI-compatible server. Prompts are sent as token ids, each request on its own connection.

    The first read raises the errors: CannotConnect and ConnectionTimeout; ResourceExhausted for the statuses 429 and
    529, Unavailable for 503, InvalidArgument for 400 and 422, StatusError for any other 3xx and 4xx, a BackendError for
    5xx and for an error within an answer; Disconnected and StreamIncomplete for an answer without its end,
    ResponseTimeout for silence, InvalidMessage for an answer of another form. Stop and kill close the connection, which
    shows the server that its client is gone; they end a wait at once, and between two reads they take effect with the
    next one. After a stop one more item, which is marked as cancelled, ends the stream. `aclose` closes every
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
        self.address, self.model, self._nvext, self._api_key = address, model, nvext, api_key
        self._client = Client(address, silence_s, transport)

    @property
    def in_flight(self) -> int:
        """Number of requests that have a connection, or wait for one."""
        return self._client.in_flight

    async def generate(self, request: Context[PreprocessedRequest]) -> ResponseStream[Annotated[LLMEngineOutput]]:
        payload = request.payload
        body = completion(payload, payload.model or self.model, nvext=self._nvext)
        return ResponseStream(self._items(request, body), request)

    async def aclose(self) -> None:
        """Close every connection. A request that is still open, or comes later, ends with Disconnected."""
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
        """Return when the answer begins. Raise the error of a server that sends none."""
        status = await exchange.send("POST", "/v1/completions", headers_of(request, self._api_key), body)
        if status != 200:
            raise of_status(status, await exchange.body())
        if exchange.content_type != _EVENTS:
            kind = exchange.content_type or "something without a content type"
            raise InvalidMessage(f"expected {_EVENTS}, the server sent {kind}")


# -- the request: headers and body

EXTRA_FIELDS = ("worker_id", "timing", "completion_token_ids")
"""Fields of the answer that are requested of a server with `nvext`, beside the text."""

_STOP = ("max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids")
_SAMPLING = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("use_beam_search", "length_penalty", "seed", "include_stop_str_in_output"),
)
_SESSION = "x-dynamo-session-id"
_METADATA = "x-dynamo-meta-"
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]+")
_NO_NAME = re.compile(r"[^A-Za-z0-9!#$%&'*+.^_`|~-]+")


def completion(request: PreprocessedRequest, model: str, *, nvext: bool) -> bytes:
    """Return the body. Raise InvalidArgument for a field that a completion in token ids does not have."""
    _check(request)
    stop, sampling = request.stop_conditions, request.sampling_options
    body: dict[str, Any] = {"model": model, "prompt": request.token_ids, "stream": True}
    for part, names in ((stop, _STOP), (sampling, _SAMPLING)):
        body |= {name: value for name in names if (value := getattr(part, name)) is not None}
    # Without ids, running totals show how many tokens a chunk holds.
    body["stream_options"] = {"include_usage": True} | ({} if nvext else {"continuous_usage_stats": True})
    if nvext:
        body["nvext"] = {"extra_fields": list(EXTRA_FIELDS)} | _extras(request)
    return encode(body)


def headers_of(request: AnyContext, api_key: str | None) -> dict[str, str]:
    """Return the headers of one request: its id, session, metadata, its span if it is traced, and the key."""
    headers = {"content-type": "application/json", "accept": "text/event-stream", "x-request-id": _value(request.id)}
    for name, value in request.metadata.items():
        name = _NO_NAME.sub("-", name.lower())
        headers[name if name == _SESSION else _METADATA + name] = _value(value)
    return headers | inject(request) | authorization(api_key)


def authorization(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": _value(f"Bearer {api_key}")}


def _value(text: str) -> str:
    """Return the text without characters that a header may not have."""
    return _NOT_PRINTABLE.sub("?", text.strip())


def _check(request: PreprocessedRequest) -> None:
    """Raise InvalidArgument for a field without which the server would answer another request."""
    not_sent = {
        "prompt_embeds": request.prompt_embeds,
        "multi_modal_data": request.multi_modal_data,
        "prefill_result": request.prefill_result,
        "sampling_options.guided_decoding": request.sampling_options.guided_decoding,
        "sampling_options.n": (request.sampling_options.n or 1) > 1,
        "output_options.logprobs": request.output_options.logprobs,
    }
    for name, value in not_sent.items():
        if value is not None and value is not False:
            raise InvalidArgument("cannot be sent to a live server", field=name)


def _extras(request: PreprocessedRequest) -> dict[str, Any]:
    """Return the other fields of `nvext`: annotations and priority."""
    extras: dict[str, Any] = {"annotations": request.annotations} if request.annotations else {}
    if (routing := request.routing) is not None:
        known = {"priority": routing.priority, "strict_priority": routing.strict_priority}
        hints = {name: value for name, value in known.items() if value is not None}
        extras |= {"agent_hints": hints} if hints else {}
    return extras


# -- finding a server

_NVEXT_OWNERS = ("penstock", "nvidia")
"""`owned_by` of the models of a server that understands `nvext`: ours, and NVIDIA Dynamo's front end."""

_FIND_S = 30.0
_NO_SUCH_PAGE = (404, 405, 501)
_SHOWN = 8


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
    try:
        models = await _models(address, api_key, transport)
    except PenstockError as error:
        if str(address) not in error.message:
            error.message = f"{address}: {error.message}"
        raise
    if models is None:
        if model is None:
            raise InvalidArgument(f"{address} does not list its models; name one", field="model")
        return LiveServer(address, model)
    if not models:
        raise Unavailable(f"{address} has no model now")
    name = next(iter(models)) if model is None else model
    if name not in models:
        others = [*list(models)[:_SHOWN], *(["..."] if len(models) > _SHOWN else [])]
        raise InvalidArgument(f"{address} has no {name!r}; it has {', '.join(others)}", field="model")
    return LiveServer(address, name, models[name] in _NVEXT_OWNERS)


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


async def _models(address: Address, api_key: str | None, transport: Transport | None) -> dict[str, Any] | None:
    """Return the owners of the models by name, None if the server has no such page."""
    async with aclosing(Client(address, _FIND_S, transport)) as client, Exchange(client, Control()) as exchange:
        status = await exchange.send("GET", "/v1/models", {"accept": "application/json"} | authorization(api_key))
        body = await exchange.body()
    if status in _NO_SUCH_PAGE:
        return None
    if status != 200:
        raise of_status(status, body)
    try:
        return {str(one["id"]): one.get("owned_by") for one in from_json(body, dict[str, Any])["data"]}
    except (InvalidArgument, KeyError, TypeError, AttributeError) as error:
        raise InvalidMessage("/v1/models is no list of models", cause=error) from error
