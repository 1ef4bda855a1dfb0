"""Engine arguments as JSON: strict, with no unknown names, and with the older names that still come."""

from __future__ import annotations

from typing import Any, TypeVar

from pipeline import InvalidArgument, codec
from pipeline.protocols.wire import WIRE_KEY, WireRule

T = TypeVar("T")

ALWAYS = {WIRE_KEY: WireRule("always")}
"""Marks a field that is written also while it is None."""

_CHOICES = ("engine_type", "worker_type", "preemption_mode", "kv_transfer_timing_mode", "router_queue_policy")
_NESTED_CHOICES = {"sglang": "schedule_policy", "trtllm": "capacity_scheduler_policy"}
_IGNORED = "has_perf_model"
_ROLES = {"is_prefill": "prefill", "is_decode": "decode"}
"""Flags that came before the worker type, and the type each one means."""


def from_plain(value: Any, cls: type[T]) -> T:
    """The arguments in a dict. Raises InvalidArgument, naming the place, for unknown names and wrong types."""
    if not isinstance(value, dict):
        raise InvalidArgument("engine arguments are an object")
    plain = {name: item for name, item in value.items() if name != _IGNORED}
    for name in _CHOICES:
        _lower(plain, name)
    for place, name in _NESTED_CHOICES.items():
        if isinstance(plain.get(place), dict):
            plain[place] = dict(plain[place])
            _lower(plain[place], name)
    _read_roles(plain)
    return codec.from_plain(plain, cls)


def from_json(text: str | bytes, cls: type[T]) -> T:
    """As `from_plain`, of one JSON document. Raises InvalidArgument also for text that is none or goes on behind it."""
    return from_plain(codec.from_json(text, dict), cls)


def to_plain(args: object) -> dict[str, Any]:
    """Every argument by name."""
    plain: dict[str, Any] = codec.to_plain(args)
    return plain


def _lower(plain: dict[str, Any], name: str) -> None:
    if isinstance(plain.get(name), str):
        plain[name] = plain[name].lower()


def _read_roles(plain: dict[str, Any]) -> None:
    """Replaces the flags of older files by the worker type they mean."""
    flags = {name: plain.pop(name) for name in _ROLES if name in plain}
    for name, flag in flags.items():
        if flag is not None and not isinstance(flag, bool):
            raise InvalidArgument("expected true or false", field=name)
    roles = [_ROLES[name] for name, flag in flags.items() if flag]
    if len(roles) > 1:
        raise InvalidArgument("a worker is for prefill or for decode, not for both", field="is_prefill")
    if roles and plain.setdefault("worker_type", roles[0]) != roles[0]:
        raise InvalidArgument(f"contradicts worker_type {plain['worker_type']!r}", field=f"is_{roles[0]}")
