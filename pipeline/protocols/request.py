"""PreprocessedRequest: a request in tokens, as it travels to a worker, and the records inside it.

Source: dynamo lib/llm/src/protocols/common/preprocessor.rs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from uuid import UUID

from attrs import define, field, frozen

from .field_rules import U16, U32, U64, InvalidRecord, never, null, skip
from .options import OutputOptions, SamplingOptions, StopConditions
from .routing import MigrationState, RouterConfigOverride, RouterParams, RoutingHints
from .timing import TraceLink
from .tracker import RequestTracker
from .usage import PromptTokensDetails

_URL = re.compile(r"[a-z][a-z0-9+.-]*:\S+", re.IGNORECASE)
_HOST = re.compile(r"(?!(?:https?|wss?|ftp):)|\w+://[^\s/?#]", re.IGNORECASE)
"""The schemes that name a host must do so."""


@define(slots=True)
class BootstrapInfo:
    """Where a decode worker meets its prefill worker for the KV transfer of a request."""

    bootstrap_host: str
    bootstrap_port: U16
    bootstrap_room: U64
    """Identifies the transfer at this host and port."""
    handoff_id: UUID | None = None
    """Identifies the transfer beside its room, if set."""


@define(slots=True)
class PrefillResult:
    """The result of a prefill worker, passed to the decode worker."""

    disaggregated_params: Any
    """Parameters of the engine; opaque to the stages."""
    prompt_tokens_details: PromptTokensDetails | None = None
    """Usage of the prompt, such as cached tokens."""


@define(slots=True)
class MmObject:
    """A media object inside a block: its hash and the token ranges [start, end] it covers."""

    mm_hash: U64
    offsets: list[tuple[U64, U64]]


@define(slots=True)
class BlockExtraInfo:
    """The media objects of one block."""

    mm_objects: list[MmObject]


@define(slots=True)
class MmRoutingInfo:
    """Another token sequence to route a prompt with media by."""

    routing_token_ids: list[U32]
    """The tokens whose blocks are looked up."""
    block_mm_infos: list[BlockExtraInfo | None]
    """The media of each block; None for a block without media."""
    expanded_prompt_len: U64 = 0
    """Tokens of the prompt once its media are expanded."""


@frozen
class MultimodalData:
    """One media item: a link, a link taken unchecked, a decoded buffer's descriptor, or just its id.

    On the wire an object with the kind as its one key. `RawUrl` is written as `Url`, so only a receiver that gets a
    well formed link can read it back.
    """

    kind: Literal["Url", "RawUrl", "Decoded", "UuidOnly"]
    value: Any

    def to_wire(self) -> dict[str, Any]:
        return {"Url" if self.kind == "RawUrl" else self.kind: self.value}

    @classmethod
    def from_wire(cls, value: Any) -> MultimodalData:
        """Raise InvalidRecord for anything but one known key with its kind of value."""
        if not isinstance(value, dict) or len(value) != 1:
            raise InvalidRecord("expected an object with one of the keys Url, RawUrl, Decoded, UuidOnly")
        ((kind, content),) = value.items()
        if kind not in ("Url", "RawUrl", "Decoded", "UuidOnly"):
            raise InvalidRecord("expected one of the keys Url, RawUrl, Decoded, UuidOnly")
        if kind == "Decoded":
            if not isinstance(content, dict):
                raise InvalidRecord("expected an object", kind)
        elif not isinstance(content, str):
            raise InvalidRecord("expected a string", kind)
        elif kind == "Url" and not (_URL.fullmatch(content) and _HOST.match(content)):
            raise InvalidRecord("expected a URL with its scheme", kind)
        return cls(kind, content)


@define(slots=True)
class Compaction:
    """Why and how an agent shortened its conversation before this request."""

    trigger: str | None = None
    reason: str | None = None
    implementation: str | None = None
    phase: str | None = None
    strategy: str | None = None


@define(slots=True)
class AgentKvHints:
    """What an agent knows about its cached blocks."""

    evict_session: bool | None = None


@define(slots=True)
class AgentContext:
    """The agent session a request belongs to."""

    session_id: str
    parent_session_id: str | None = None
    """The session that started this one."""
    session_final: bool | None = None
    """Whether this is the last request of the session."""
    compaction: Compaction | None = None
    """Set if the conversation was shortened before this request."""
    kv_hints: AgentKvHints | None = None
    input_trigger: Literal["user_message", "tool_result", "other"] | None = None
    """The kind of input that led to this request."""


class _HasAnnotations:
    """The methods of a request with annotations."""

    __slots__ = ()
    annotations: list[str]

    def has_annotation(self, annotation: str) -> bool:
        """Return whether the request has exactly this annotation."""
        return annotation in self.annotations

    def get_annotation_value(self, key: str) -> str | None:
        """Return the text after `key:` of the first annotation that starts so, colons included."""
        prefix = f"{key}:"
        return next((text[len(prefix) :] for text in self.annotations if text.startswith(prefix)), None)


@define(slots=True)
class PreprocessedRequest(_HasAnnotations):
    """A request in tokens."""

    token_ids: Sequence[U32]
    """The prompt; while the request migrates, with the tokens delivered so far. A list from the wire; an array of u32
    costs the stages of one process less."""
    model: str = ""
    """Name of the model, as the client sent it."""
    prompt_embeds: str | None = None
    """Base64 of an embedded prompt; it takes precedence over `token_ids`."""
    multi_modal_data: dict[str, list[MultimodalData]] | None = None
    """Media items by kind."""
    multi_modal_uuids: dict[str, list[str | None]] | None = None
    """Ids of the media items by kind; None for an item without one."""
    mm_routing_info: MmRoutingInfo | None = None
    """Tokens to route by, for a prompt with media."""
    stop_conditions: StopConditions = field(factory=StopConditions)
    sampling_options: SamplingOptions = field(factory=SamplingOptions)
    output_options: OutputOptions = field(factory=OutputOptions)
    eos_token_ids: list[U32] = field(factory=list)
    """Ids that end the sequence, from the model."""
    mdc_sum: str | None = null()
    """Checksum of the model's card."""
    annotations: list[str] = field(factory=list)
    """Plain names, or `key:value`."""
    routing: RoutingHints | None = None
    """Pins, priorities and constraints for the routers. Default: the routers decide."""
    router_config_override: RouterConfigOverride | None = null()
    """Router settings for this request only."""
    prefill_result: PrefillResult | None = None
    """Set for a decode worker after a remote prefill."""
    encoder_result: dict[str, Any] | None = None
    """Result of an encode worker."""
    migration_link: TraceLink | None = None
    """Span of the worker before this one: of a failed attempt, or of the prefill."""
    bootstrap_info: BootstrapInfo | None = None
    """Where prefill and decode worker meet for the KV transfer."""
    extra_args: Any = None
    """Engine arguments without a field of their own."""
    require_reasoning: bool = skip(False)
    router: RouterParams | None = None
    """Latency targets."""
    agent_context: AgentContext | None = None
    mm_processor_kwargs: Any = None
    """Arguments of the engine's media processor."""
    request_timestamp_ms: float | None = None
    """When the request was received, in milliseconds since the epoch."""
    is_probe: bool = skip(False, name="_HEALTH_CHECK")
    """Marks a health probe, which an engine serves without contacting other workers."""
    tracker: RequestTracker | None = never()
    """Collects the request's times and workers; stays in this process."""
    migration_state: MigrationState | None = never()
    """Failed workers of this request; stays in this process."""

    def ensure_routing(self) -> RoutingHints:
        """Return the routing hints, made empty if there were none."""
        if self.routing is None:
            self.routing = RoutingHints()
        return self.routing

    def block_mm_routing_info(self) -> tuple[Sequence[int], list[BlockExtraInfo | None] | None]:
        """Return the tokens to look for in the KV index and their blocks' media.

        Those of the media routing information if it has tokens, else the prompt's own and None.
        """
        info = self.mm_routing_info
        if info is None or not info.routing_token_ids:
            return self.token_ids, None
        return info.routing_token_ids, info.block_mm_infos

    def attach_router_hint(self, hint: Mapping[str, Any]) -> None:
        """Merge `hint` into `extra_args.kv_transfer_params`; other keys stay, a part that is no object is replaced.

        A key that is there already gets the new value, so a request that moves on carries its newest hint.
        """
        extra = dict(self.extra_args) if isinstance(self.extra_args, dict) else {}
        known = extra.get("kv_transfer_params")
        extra["kv_transfer_params"] = {**(known if isinstance(known, dict) else {}), **hint}
        self.extra_args = extra


@define(slots=True)
class PreprocessedEmbeddingRequest(_HasAnnotations):
    """Texts to embed, each as its token ids."""

    token_ids: list[list[U32]]
    model: str
    encoding_format: str | None = null()
    dimensions: U32 | None = null()
    mdc_sum: str | None = null()
    annotations: list[str] = field(factory=list)
