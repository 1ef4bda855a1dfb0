"""UpstreamConfig: the servers behind a graph, and how each becomes an engine."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import anyio
from attrs import field, frozen

from engines import DisaggregationMode
from pipeline import InvalidArgument
from pipeline.errors import InvalidMessage, Unavailable
from pipeline.settings import one_of, setting
from pipeline.wire import from_json

if TYPE_CHECKING:
    from engines.upstream import Client, KvConnector, ServerFacts, Transport, Upstream, VllmText

UpstreamKind = Literal["auto", "vllm", "sglang", "openai"]
KvConnectorName = Literal["nixl", "mooncake", "lmcache"]

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
    connector: KvConnectorName = setting("nixl", "", one_of(*get_args(KvConnectorName)), variable="", option=())
    """How vLLM servers hand KV blocks over; SGLang's servers do it by themselves."""
    lease_s: float | None = None
    """How long prefill servers keep the blocks of a prompt, in seconds; None: as long as they do by default."""
    model_paths: Mapping[str, Path] = field(factory=dict)
    """Local folders of models by the names that servers have for them."""
    api_key: str | None = field(default=None, repr=False)
    """Key for the servers."""

    def __attrs_post_init__(self) -> None:
        from engines.upstream import Address

        if find_spec("zmq") is None:  # found out here, not by the first server with KV events
            raise ModuleNotFoundError("engines.upstream needs pyzmq: pip install 'penstock[upstream]'", name="zmq")
        if not self.urls:
            raise InvalidArgument("is needed beside prefill servers: they only compute prompts", field="upstream")
        seen: set[str] = set()
        for name, urls in (("upstream", self.urls), ("prefill_upstream", self.prefill_urls)):
            for url in urls:
                if (address := str(Address.parse(url, field=name))) in seen:
                    raise InvalidArgument(f"{address} is given twice", field=name)
                seen.add(address)
        self.new_connector()

    def check_mode(self, engine: Upstream, url: str, mode: DisaggregationMode) -> None:
        """Raise InvalidArgument for an SGLang server that was started for another part of requests than it has here."""
        from engines.upstream import SglangUpstream

        if isinstance(engine, SglangUpstream) and engine.server.mode is not mode:
            field = "prefill_upstream" if mode is DisaggregationMode.PREFILL else "upstream"
            text = f"{url} was started with --disaggregation-mode {engine.server.mode.value}, and is to be {mode.value}"
            raise InvalidArgument(text, field=field)

    @staticmethod
    def may_prefill(engine: Upstream) -> bool:
        """Return whether a server that decodes can compute the prompts of requests without a prefill too."""
        from engines.upstream import SglangUpstream

        return not isinstance(engine, SglangUpstream)

    async def found(
        self,
        url: str,
        mode: DisaggregationMode,
        connector: KvConnector,
        transport: Transport | None,
        needs_text: Callable[[ServerFacts], bool],
    ) -> tuple[Upstream, ServerFacts]:
        """Return the engine of a server that is there, not started, and what it has.

        If the model `needs_text`, it is an engine that gives texts, where there is one for the server's kind: see
        `text_of`. Raise as `engine`, `check_mode` and the discovery of the engine, and `no_tokenizer` for a server of
        such a kind that was started without one.
        """
        from engines.upstream import VllmText, VllmUpstream

        engine = await self.engine(url, mode, connector, transport)
        try:
            facts = await engine.discover()
            self.check_mode(engine, url, mode)
            if type(engine) is VllmUpstream and needs_text(facts):
                await engine.cleanup()
                engine = VllmText(url, api_key=self.api_key, transport=transport)
                facts = await _with_text(engine, facts)
        except BaseException:
            await closed(engine)
            raise
        return engine, facts

    @staticmethod
    def text_of(engine: Upstream) -> VllmText | None:
        """Return the engine if it gives texts."""
        from engines.upstream import VllmText

        return engine if isinstance(engine, VllmText) else None

    def servers(self) -> list[tuple[str, DisaggregationMode]]:
        """Return the servers with what each one does, those that prefill first."""
        answers = DisaggregationMode.DECODE if self.prefill_urls else DisaggregationMode.AGGREGATED
        prefill = [(url, DisaggregationMode.PREFILL) for url in self.prefill_urls]
        return [*prefill, *((url, answers) for url in self.urls)]

    def new_connector(self) -> KvConnector:
        """Return the connector that the servers of one graph share. Raise InvalidArgument for a wrong lease."""
        from engines.upstream import kv_connector

        try:
            return kv_connector(self.connector, self.lease_s)
        except InvalidArgument as error:
            raise InvalidArgument(str(error), field="kv_lease_s") from error

    async def engine(
        self, url: str, mode: DisaggregationMode, connector: KvConnector, transport: Transport | None = None
    ) -> Upstream:
        """Return the engine of a server for its part of requests, not started; `transport` replaces the network.

        Raise what the server's list of models raises if its kind is not given, and InvalidArgument for a server that
        cannot do its part.
        """
        from engines.upstream import OpenAIUpstream, SglangUpstream, VllmDecode, VllmPrefill, VllmUpstream

        kind = await self._shown_kind(url, transport) if self.kind == "auto" else self.kind
        if kind == "vllm":
            if mode is DisaggregationMode.PREFILL:
                return VllmPrefill(url, connector=connector, api_key=self.api_key, transport=transport)
            if mode is DisaggregationMode.DECODE:
                return VllmDecode(url, connector=connector, api_key=self.api_key, transport=transport)
            return VllmUpstream(url, api_key=self.api_key, transport=transport)
        if kind == "sglang":
            return SglangUpstream(url, api_key=self.api_key, transport=transport)
        if mode is not DisaggregationMode.AGGREGATED:
            field = "prefill_upstream" if mode is DisaggregationMode.PREFILL else "upstream"
            raise InvalidArgument(f"{url} is no vLLM or SGLang server: it hands over no KV blocks", field=field)
        return OpenAIUpstream(url, api_key=self.api_key, transport=transport)

    async def _shown_kind(self, url: str, transport: Transport | None) -> str:
        """Return the kind of a server by the owners in its list of models."""
        from engines.upstream import Address, Client

        client = Client(Address.parse(url), FIND_S, transport)
        try:
            owner = await _owner(client, self.api_key)
        finally:
            await client.aclose()
        return owner if owner in ("vllm", "sglang") else "openai"


def no_tokenizer(facts: ServerFacts) -> InvalidArgument:
    """Return the error for a server whose model's tokenizer is neither here nor of use there."""
    where = "shows no folder" if facts.root is None else f"has it from {facts.root!r}, which is no folder here"
    name = shlex.quote(facts.model)
    text = (
        f"the tokenizer of {facts.model!r} is not on this machine: its server {where}, and has no tokenizer that can be"
        f" used from here. Give a folder with its tokenizer by --model-path FOLDER, or --upstream-model-path"
        f" {name}=FOLDER"
    )
    return InvalidArgument(text, field="model_path")


async def _with_text(engine: VllmText, facts: ServerFacts) -> ServerFacts:
    """Return what the server has, for an engine that gives texts; `facts` name the model in the error of `found`."""
    try:
        return await engine.discover()
    except InvalidArgument as error:
        if error.field != "model_path":
            raise
        raise no_tokenizer(facts) from error


async def closed(engine: Upstream) -> None:
    """Close an engine that no worker has."""
    with anyio.CancelScope(shield=True):
        await engine.cleanup()


async def _owner(client: Client, api_key: str | None) -> str:
    """Return what owns the models of a server; empty if it has no list of them."""
    from engines.upstream import authorization, fetched, of_status

    headers = {"accept": "application/json", **authorization(api_key)}
    status, body = await fetched(client, "GET", "/v1/models", headers, within_s=FIND_S)
    if status in (404, 405, 501):
        return ""
    if status != 200:
        raise of_status(status, body)
    try:
        models: list[Any] = from_json(body, dict[str, Any])["data"]
        owners = [str(one.get("owned_by")) for one in models]
    except (InvalidArgument, KeyError, TypeError, AttributeError) as error:
        raise InvalidMessage(f"{client.address}/v1/models is no list of models", cause=error) from error
    if not owners:
        raise Unavailable(f"{client.address} has no model now")
    return owners[0]
