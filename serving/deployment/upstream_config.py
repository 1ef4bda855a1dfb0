"""UpstreamConfig: the servers behind a graph, and how each becomes an engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from attrs import field, frozen

from engines import DisaggregationMode
from pipeline import Control, InvalidArgument
from pipeline.errors import InvalidMessage, Unavailable
from pipeline.settings import one_of, setting
from pipeline.wire import from_json

if TYPE_CHECKING:
    from engines.upstream import Client, Transport, Upstream

UpstreamKind = Literal["auto", "vllm"]

FIND_S = 30.0
"""Longest wait for a server that is to show its kind."""


@frozen(kw_only=True)
class UpstreamConfig:
    """Servers that run already. Raise InvalidArgument that names the option for what cannot be.

    Making one needs the extra upstream.
    """

    urls: tuple[str, ...]
    """Servers that answer requests; beside prefill servers they decode."""
    prefill_urls: tuple[str, ...] = ()
    """Servers that compute prompts only."""
    kind: UpstreamKind = setting("auto", "", one_of(*get_args(UpstreamKind)), variable="", option=())
    """What they are; `auto`: what each one shows."""
    model_paths: Mapping[str, Path] = field(factory=dict)
    """Local folders of models by the names that servers have for them."""
    api_key: str | None = field(default=None, repr=False)
    """Key for the servers."""

    def __attrs_post_init__(self) -> None:
        from engines.upstream import Address

        if not self.urls:
            raise InvalidArgument("is needed beside prefill servers: they only compute prompts", field="upstream")
        seen: set[str] = set()
        for name, urls in (("upstream", self.urls), ("prefill_upstream", self.prefill_urls)):
            for url in urls:
                if (address := str(Address.parse(url, field=name))) in seen:
                    raise InvalidArgument(f"{address} is given twice", field=name)
                seen.add(address)

    def servers(self) -> list[tuple[str, DisaggregationMode]]:
        """Return the servers with what each one does, those that prefill first."""
        answers = DisaggregationMode.DECODE if self.prefill_urls else DisaggregationMode.AGGREGATED
        prefill = [(url, DisaggregationMode.PREFILL) for url in self.prefill_urls]
        return [*prefill, *((url, answers) for url in self.urls)]

    async def engine(self, url: str, transport: Transport | None = None) -> Upstream:
        """Return the engine of a server, not started; `transport` replaces the network.

        Raise what the server's list of models raises if its kind is not given, and InvalidArgument for a server of a
        kind that is not known.
        """
        from engines.upstream import VllmUpstream

        kinds: Mapping[str, type[Upstream]] = {"vllm": VllmUpstream}
        kind = await self._shown_kind(url, transport) if self.kind == "auto" else self.kind
        if kind not in kinds:
            known = ", ".join(kinds)
            raise InvalidArgument(f"{url} is a server of {kind!r}, expected one of {known}", field="upstream_kind")
        return kinds[kind](url, api_key=self.api_key, transport=transport)

    async def _shown_kind(self, url: str, transport: Transport | None) -> str:
        """Return what owns the models of a server, by its list of them."""
        from engines.upstream import Address, Client

        client = Client(Address.parse(url), FIND_S, transport)
        try:
            return await _owner(client, self.api_key)
        finally:
            await client.aclose()


async def _owner(client: Client, api_key: str | None) -> str:
    from engines.upstream import Exchange, of_status

    headers = {"accept": "application/json"} | ({} if api_key is None else {"authorization": f"Bearer {api_key}"})
    async with Exchange(client, Control()) as exchange:
        status = await exchange.send("GET", "/v1/models", headers)
        body = await exchange.body()
        await exchange.finish()
    if status != 200:
        raise of_status(status, body)
    try:
        models: list[Any] = from_json(body, dict[str, Any])["data"]
        owners = [str(one["owned_by"]) for one in models]
    except (InvalidArgument, KeyError, TypeError) as error:
        raise InvalidMessage(f"{client.address}/v1/models is no list of models", cause=error) from error
    if not owners:
        raise Unavailable(f"{client.address} has no model now")
    return owners[0]
