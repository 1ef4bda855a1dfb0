"""Find a server's model, and open an engine for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

from attrs import frozen

from pipeline import Control, InvalidArgument, PenstockError
from pipeline.errors import InvalidMessage, Unavailable
from pipeline.wire import from_json

from .client import Address, Client, Transport
from .engine import SILENCE_S, LiveEngine, authorization
from .errors import of_status
from .stream import Exchange

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
    address = Address.parse(url)
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
