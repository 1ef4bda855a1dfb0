"""What a key lets a request do: which models, which of the fields that are for the privileged, what is set for it.

A field that needs a privilege is refused, not dropped: the answer would not be the one that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import evolve

from pipeline.protocols.openai import HEADERS_OF, QUERY_INSTANCE_ID, AgentHints, NvExt, effective_cache_salt

from ..access import ApiKey, Privilege
from .caller import Caller
from .problems import Refusal
from .prompts import OpenAIRequest

_PINS = ("backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank")
_POLICY_CLASS = "x-dynamo-meta-policy-class"
"""Header that chooses the queue a request waits in."""


def apply_key(caller: Caller, request: OpenAIRequest, headers: Mapping[str, str], *, nvext: bool = True) -> None:
    """Check the request against the caller's key, then set the key's priority and tenant where it names none.

    `headers` by lower-case name; those that set fields of the extension are in it already, unless `nvext` is off.
    Raise Refusal (404) for a model that the key may not use, as if there were none; (403) that names the field and the
    privilege the key lacks. A caller without a key is left alone.
    """
    if (key := caller.key) is None:
        return
    if not caller.may_use(request.model):
        raise Refusal(404, "Model not found")
    for privilege, name in _used(request, headers, key.priority or 0):
        if not caller.may(privilege):
            raise Refusal(403, f"`{name}` needs a key with the privilege `{privilege}`")
    _set(key, request, nvext)


def _used(request: OpenAIRequest, headers: Mapping[str, str], priority: int) -> Iterator[tuple[Privilege, str]]:
    """Each privilege that the request uses, with the field or header that does."""
    extension = request.nvext or NvExt()
    yield from _pins(extension, headers)
    yield from _urgency(extension.agent_hints or AgentHints(), headers, priority)
    if extension.cache_salt:
        yield "tenant", _name("cache_salt", "nvext.cache_salt", headers)
    if request.cache_salt:
        yield "tenant", "cache_salt"


def _pins(extension: NvExt, headers: Mapping[str, str]) -> Iterator[tuple[Privilege, str]]:
    for field in _PINS:
        if getattr(extension, field) is not None:
            yield "pin", _name(field, f"nvext.{field}", headers)
    if extension.routing_constraints is not None and not extension.routing_constraints.is_empty:
        yield "pin", "nvext.routing_constraints"
    if any(text.startswith(f"{QUERY_INSTANCE_ID}:") for text in extension.annotations or ()):
        yield "pin", f"nvext.annotations: {QUERY_INSTANCE_ID}"


def _urgency(hints: AgentHints, headers: Mapping[str, str], priority: int) -> Iterator[tuple[Privilege, str]]:
    if hints.priority is not None and hints.priority > priority:
        yield "priority", _name("priority", "nvext.agent_hints.priority", headers)
    if hints.strict_priority:
        yield "priority", _name("strict_priority", "nvext.agent_hints.strict_priority", headers)
    if hints.latency_sensitivity:
        yield "priority", "nvext.agent_hints.latency_sensitivity"
    if _POLICY_CLASS in headers:
        yield "priority", _POLICY_CLASS


def _name(field: str, place: str, headers: Mapping[str, str]) -> str:
    """The header that set the field, else its place in the body."""
    return next((header for header in HEADERS_OF[field] if headers.get(header, "").strip()), place)


def _set(key: ApiKey, request: OpenAIRequest, nvext: bool) -> None:
    if key.tenant is not None and effective_cache_salt(request.nvext, request.cache_salt) is None:
        request.cache_salt = key.tenant
    if key.priority is None or not nvext:
        return
    extension = request.nvext or NvExt()
    hints = extension.agent_hints or AgentHints()
    if hints.priority is None:
        request.nvext = evolve(extension, agent_hints=evolve(hints, priority=key.priority))
