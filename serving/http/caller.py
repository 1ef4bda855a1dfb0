"""Caller: the client of a request, its key, and what that key allows.

    identify(scope, held)      called by the key guard
    caller_of(scope)           the caller: a key's name, or an address
    apply_key(caller, ...)     check the models and fields of a request, set the key's priority and tenant

A field that needs a privilege is refused, not dropped: without it the answer would not be the requested one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import evolve, frozen
from starlette.types import Scope

from pipeline.protocols.openai import HEADERS_OF, QUERY_INSTANCE_ID, AgentHints, NvExt, effective_cache_salt

from ..access import ALL_PRIVILEGES, ApiKey, HeldKey, Privilege
from ..openai import OpenAIRequest
from ..problems import Refusal

_SCOPE_KEY = "penstock.caller"
_PINS = ("backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank")
_POLICY_CLASS = "x-dynamo-meta-policy-class"
"""Header that chooses the queue a request waits in."""


@frozen
class Caller:
    """The client of one request."""

    identity: str
    """Name of its key, or its address: what limits per client count by and log messages show."""
    privileges: frozenset[Privilege] = ALL_PRIVILEGES
    """Its key's; all of them where no keys are set."""
    held: HeldKey | None = None
    """Its key with the key's rates; None without a key."""

    @property
    def key(self) -> ApiKey | None:
        """Its key; None without one."""
        return None if self.held is None else self.held.key

    def may(self, privilege: Privilege) -> bool:
        """Return whether the caller has the privilege."""
        return privilege in self.privileges

    def may_use(self, model: str) -> bool:
        """Return whether the caller may use the model, and see that it exists."""
        return self.key is None or self.key.models is None or model in self.key.models


def caller_of(scope: Scope) -> Caller:
    """Return the caller of the request with this scope: its key, else the address of its peer without the port."""
    known = scope.get(_SCOPE_KEY)
    return known if isinstance(known, Caller) else Caller(_address(scope))


def identify(scope: Scope, held: HeldKey | None) -> None:
    """Put the caller into the scope, where keys are set: the holder of this key, None for a client without one."""
    if held is None:
        scope[_SCOPE_KEY] = Caller(_address(scope), frozenset())
    else:
        scope[_SCOPE_KEY] = Caller(held.key.name, frozenset(held.key.privileges), held)


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "unknown"


def apply_key(caller: Caller, request: OpenAIRequest, headers: Mapping[str, str], *, nvext: bool = True) -> None:
    """Check the request against the caller's key, then set the key's priority and tenant where it has none.

    `headers` are by lower-case name; unless `nvext` is off, the extension already has the fields that they set.
    Raise Refusal (404) for a model that the key may not use, as for one that does not exist; (403) with the field and
    the privilege that the key lacks. Do nothing for a caller without a key.
    """
    if (key := caller.key) is None:
        return
    if not caller.may_use(request.model):
        raise Refusal(404, "Model not found")
    for privilege, name in _used(request, headers, key.priority or 0):
        if not caller.may(privilege):
            raise Refusal(403, f"`{name}` needs a key with the privilege `{privilege}`")
    _set_defaults(key, request, nvext)


def _used(request: OpenAIRequest, headers: Mapping[str, str], priority: int) -> Iterator[tuple[Privilege, str]]:
    """Yield each privilege that the request uses, with the field or header that uses it."""
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
    """Return the header that set the field, else its place in the body."""
    return next((header for header in HEADERS_OF[field] if headers.get(header, "").strip()), place)


def _set_defaults(key: ApiKey, request: OpenAIRequest, nvext: bool) -> None:
    if key.tenant is not None and effective_cache_salt(request.nvext, request.cache_salt) is None:
        request.cache_salt = key.tenant
    if key.priority is None or not nvext:
        return
    extension = request.nvext or NvExt()
    hints = extension.agent_hints or AgentHints()
    if hints.priority is None:
        request.nvext = evolve(extension, agent_hints=evolve(hints, priority=key.priority))
