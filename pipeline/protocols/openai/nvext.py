"""nvext: the extension object of a request and of a response, and the headers that override it.

Source: dynamo lib/llm/src/protocols/openai/nvext.rs. Other than there, a negative priority never delays a request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import define, evolve, fields

from ..field_rules import I32, I64, U32, U32_MAX, U64, InvalidRecord
from ..output import PromptLogprobs
from ..routing import RouterParams, RoutingConstraints
from ..timing import RouterDecision, TimingInfo, WorkerIdInfo

QUERY_INSTANCE_ID = "query_instance_id"
"""Annotation `query_instance_id:<kind>`: choose the workers and return their ids; generate nothing."""

BYPASS_REMOTE_PREFILL = "x-bypass-remote-prefill"
"""Annotation by a router if the decode worker must prefill as well; also the name of the event of it."""


@define(slots=True)
class AgentHints:
    """What an agent knows about its request; `osl` is the output length in tokens it expects. Reads no other key."""

    wire_closed: ClassVar[bool] = True

    priority: I32 | None = None
    strict_priority: U32 | None = None
    osl: U32 | None = None
    speculative_prefill: bool | None = None
    latency_sensitivity: float | None = None

    def priority_jump(self) -> float | None:
        """Seconds off the arrival time: the priority, not below zero, else the latency sensitivity."""
        return self.latency_sensitivity if self.priority is None else float(max(self.priority, 0))


@define(slots=True)
class MetadataUpload:
    """Where metadata of the request goes. Raises InvalidRecord for a blank URL. Reads no other key."""

    wire_closed: ClassVar[bool] = True

    url: str

    def __attrs_post_init__(self) -> None:
        self.url = self.url.strip()
        if not self.url:
            raise InvalidRecord("must not be empty", "url")


@define(slots=True)
class NvExt:
    """The extension object of a chat or completion request. Reads no other key."""

    wire_closed: ClassVar[bool] = True

    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    annotations: list[str] | None = None
    backend_instance_id: U64 | None = None
    token_data: list[U32] | None = None
    max_thinking_tokens: U32 | None = None
    cache_salt: str | None = None
    extra_fields: list[str] | None = None
    metadata_upload: MetadataUpload | None = None
    prefill_worker_id: U64 | None = None
    decode_worker_id: U64 | None = None
    dp_rank: U32 | None = None
    prefill_dp_rank: U32 | None = None
    agent_hints: AgentHints | None = None
    request_timestamp_ms: float | None = None
    routing_constraints: RoutingConstraints | None = None
    router: RouterParams | None = None

    def wanted_response_fields(self) -> frozenset[str]:
        """Return the response fields that this request names, or implies by querying its workers."""
        wanted = set(self.extra_fields or ())
        if any(text.startswith(f"{QUERY_INSTANCE_ID}:") for text in self.annotations or ()):
            wanted |= {"worker_id", "token_ids"}
        return frozenset(wanted) if wanted else _NO_FIELDS  # an empty set takes 216 bytes as well


@define(slots=True)
class NvExtResponse:
    """The extension object of a response. A field is set only if the request names it."""

    worker_id: WorkerIdInfo | None = None
    timing: TimingInfo | None = None
    token_ids: list[U32] | None = None
    routed_experts: Any = None
    engine_data: Any = None
    stop_reason: I64 | str | None = None
    completion_token_ids: list[U32] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    router_decision: RouterDecision | None = None

    def select(self, wanted: frozenset[str], *, finished: bool, choices: int = 1) -> NvExtResponse | None:
        """Return the requested fields that may be sent now; None if there are none.

        Timing and prompt log probabilities go out with the finish reason, completion token ids only for one choice.
        """
        held_back = set() if finished else {"timing", "prompt_logprobs"}
        if choices != 1:
            held_back.add("completion_token_ids")
        chosen = self._set_fields(wanted - held_back)
        return NvExtResponse(**chosen) if chosen else None

    def merge(self, later: NvExtResponse) -> NvExtResponse:
        """This and a later chunk's together: completion token ids are joined, of all else the later value holds."""
        merged = later._set_fields(frozenset(_RESPONSE_FIELDS))
        if self.completion_token_ids is not None and later.completion_token_ids is not None:
            merged["completion_token_ids"] = self.completion_token_ids + later.completion_token_ids
        return evolve(self, **merged)

    def _set_fields(self, names: frozenset[str]) -> dict[str, Any]:
        """Return those of the named fields that are set, in declared order."""
        values = {name: getattr(self, name) for name in _RESPONSE_FIELDS if name in names}
        return {name: value for name, value in values.items() if value is not None}


_RESPONSE_FIELDS = tuple(field.name for field in fields(NvExtResponse))

_NO_FIELDS: frozenset[str] = frozenset()
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_U64_MAX = 2**64 - 1
_WORKER = ("x-dynamo-worker-instance-id", "x-worker-instance-id")
_PREFILL_WORKER = ("x-dynamo-prefill-instance-id", "x-prefill-instance-id")
_DP_RANK = ("x-dynamo-dp-rank", "x-dp-rank", "x-data-parallel-rank")
_PREFILL_DP_RANK = ("x-dynamo-prefill-dp-rank", "x-prefill-dp-rank")
_PRIORITY = ("x-dynamo-request-priority",)
_STRICT_PRIORITY = ("x-dynamo-request-strict-priority",)
_TENANT = "x-tenant-id"

HEADERS_OF: Mapping[str, tuple[str, ...]] = {
    "backend_instance_id": _WORKER,
    "decode_worker_id": _WORKER,
    "prefill_worker_id": _PREFILL_WORKER,
    "dp_rank": _DP_RANK,
    "prefill_dp_rank": _PREFILL_DP_RANK,
    "cache_salt": (_TENANT,),
    "priority": _PRIORITY,
    "strict_priority": _STRICT_PRIORITY,
}
"""The headers that set a field of the extension or of its hints."""

HEADERS: Mapping[str, str] = {
    **dict.fromkeys(_WORKER, "The worker that decodes."),
    **dict.fromkeys(_PREFILL_WORKER, "The worker that prefills."),
    **dict.fromkeys(_DP_RANK, "The data-parallel rank."),
    **dict.fromkeys(_PREFILL_DP_RANK, "The data-parallel rank of the prefill."),
    **dict.fromkeys(_PRIORITY, "The priority of the request."),
    **dict.fromkeys(_STRICT_PRIORITY, "The class of the request in the queue."),
    _TENANT: "Whose cache the request shares.",
}
"""The headers that `apply_headers` reads, and what each is about; one that cannot be read counts as not sent."""


def apply_headers(nvext: NvExt | None, headers: Mapping[str, str]) -> NvExt | None:
    """Return the extension with the values of the headers in place of those of the body.

    The first readable one of a header and its older names counts; without a readable header `nvext` itself comes back.
    """
    if HEADERS.keys().isdisjoint(map(str.lower, headers)):
        return nvext
    texts = {name.lower(): value.strip() for name, value in headers.items()}
    worker = _integer(texts, _WORKER, 0, _U64_MAX)
    prefill_rank = _integer(texts, _PREFILL_DP_RANK, 0, U32_MAX)
    found = {
        "backend_instance_id": worker,
        "decode_worker_id": worker,
        "prefill_worker_id": _integer(texts, _PREFILL_WORKER, 0, _U64_MAX),
        "dp_rank": _integer(texts, _DP_RANK, 0, U32_MAX),
        # A gateway sends the largest u32 if no rank was chosen.
        "prefill_dp_rank": None if prefill_rank == U32_MAX else prefill_rank,
        "cache_salt": texts.get(_TENANT) or None,
    }
    hints = {
        "priority": _integer(texts, _PRIORITY, -(2**31), 2**31 - 1),
        "strict_priority": _integer(texts, _STRICT_PRIORITY, 0, U32_MAX),
    }
    changes: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    hint_changes: dict[str, Any] = {name: value for name, value in hints.items() if value is not None}
    body = nvext or NvExt()
    if hint_changes:
        changes["agent_hints"] = evolve(body.agent_hints or AgentHints(), **hint_changes)
    return evolve(body, **changes) if changes else nvext


def _integer(texts: Mapping[str, str], names: tuple[str, ...], low: int, high: int) -> int | None:
    """Return the first of these headers that holds an integer in range."""
    for name in names:
        text = texts.get(name, "")
        if _INTEGER.fullmatch(text) and low <= int(text) <= high:
            return int(text)
    return None


def effective_cache_salt(nvext: NvExt | None, top_level: str | None) -> str | None:
    """Return the salt that separates this request's cache: the extension's, else the request's own; empty is none."""
    return (nvext.cache_salt if nvext is not None else None) or top_level or None
