"""The router's settings from variables of the environment.

Source: dynamo lib/kv-router/src/scheduling/config.rs, KvRouterConfig::from_env; `DYN_ROUTER_PLACEMENT` is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.settings import Variable, decimal, expected, number, whole

from ..load import EXPIRY_S
from .config import CHOICES, FIELD_TYPES, KvRouterConfig

OVERLAP_REFRESH_AFTER_S = 10.0
U64_MAX = 2**64 - 1

_PREFIX = "DYN_ROUTER_"
_RENAMED = {
    "overlap_score_credit": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
    "overlap_score_credit_decay": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
    "use_kv_events": "DYN_USE_KV_EVENTS",
}
_READ = (
    *("overlap_score_credit", "overlap_score_credit_decay", "prefill_load_scale", "decode_active_request_weight"),
    *("router_placement", "router_temperature", "use_kv_events", "router_replica_sync", "router_track_active_blocks"),
    *("router_track_output_blocks", "router_assume_kv_reuse", "router_track_prefill_tokens"),
    *("router_tracking_hash", "router_tracking_hash_key_file", "router_tracking_hash_key_id"),
    *("router_queue_threshold", "router_policy_config", "router_prefill_policy", "router_decode_policy"),
    *("router_predicted_ttl_secs", "min_initial_workers"),
    *("conditional_disagg_enabled", "conditional_disagg_policy"),
    *("conditional_disagg_eff_isl_threshold", "conditional_disagg_eff_isl_ratio_threshold"),
    *("conditional_disagg_prefill_busy_threshold", "conditional_disagg_decode_busy_threshold"),
)
_MUST_BE_KNOWN = ("router_placement", "router_tracking_hash")
_OLDER_WEIGHTS = ("DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", "DYN_OVERLAP_SCORE_WEIGHT")
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def variable_of(field: str) -> str:
    """The variable that sets a field of the configuration."""
    return _RENAMED.get(field) or _PREFIX + field.removeprefix("router_").upper()


def config_from_environment(environment: Mapping[str, str], values: Mapping[str, Any] | None = None) -> KvRouterConfig:
    """The configuration with `values` (of a file, say) under what the environment sets.

    A text that cannot be read counts as not set, except the name of an unknown placement or tracking hash. What can be
    read and is out of range raises InvalidArgument, as do the values.
    """
    own = dict(values or {})
    for field in _READ:
        text = environment.get(variable_of(field), "").strip()
        if not text:
            continue
        if (value := _read(field, text)) is not None:
            own[field] = value
    for variable in _OLDER_WEIGHTS:
        if (weight := _float(environment.get(variable, "").strip())) is not None:
            own["overlap_score_weight"] = weight
            break
    return KvRouterConfig.from_plain(own)


ACTIVE_REQUEST_EXPIRY = Variable(
    "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
    EXPIRY_S,
    "Seconds without a sign of a request after which its worker counts it no longer.",
    whole(1, unit=1.0),
)
OVERLAP_REFRESH_AFTER: Variable[float] = Variable(
    "DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS",
    OVERLAP_REFRESH_AFTER_S,
    "Seconds in the queue after which the overlap of a request is looked up again; 0: never.",
    number(),
)


def active_request_expiry_s(environment: Mapping[str, str]) -> float:
    """Return the seconds after which a booked request counts as lost."""
    return ACTIVE_REQUEST_EXPIRY.of(environment)


def overlap_refresh_after_s(environment: Mapping[str, str]) -> float | None:
    """Return the seconds in the queue after which a request's overlap is looked up again; None switches that off."""
    return OVERLAP_REFRESH_AFTER.of(environment) or None


def kv_router_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return every variable of the router, with what is wrong with its text, or with an empty text."""
    found = {}
    fields = {variable_of(field): field for field in _READ} | dict.fromkeys(_OLDER_WEIGHTS, "prefill_load_scale")
    for name, field in fields.items():
        text = environment.get(name, "").strip()
        is_wrong = text and _read(field, text) is None
        found[name] = f"must be {expected([_kind(field)])}, got {text!r}" if is_wrong else ""
    for variable in (ACTIVE_REQUEST_EXPIRY, OVERLAP_REFRESH_AFTER):
        problem = variable.problem(environment)
        found[variable.name] = "" if problem is None else problem[1]
    return found


def _kind(field: str) -> Any:
    kind = FIELD_TYPES[field].partition(" | ")[0]
    return CHOICES.get(kind) or _KINDS[kind]


def _read(field: str, text: str) -> Any:
    """The text as a value of the field; None if it is none."""
    kind = FIELD_TYPES[field].partition(" | ")[0]
    if kind in CHOICES:
        known = text in CHOICES[kind].__args__
        return text if known or field in _MUST_BE_KNOWN else None
    return _READERS[kind](text)


def _float(text: str) -> float | None:
    try:
        return decimal(text)
    except ValueError:
        return None


def _int(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(U64_MAX))):
        return None
    return value if (value := int(text)) <= U64_MAX else None


_READERS: Mapping[str, Callable[[str], Any]] = {
    "float": _float,
    "int": _int,
    "bool": lambda text: _BOOLEANS.get(text.lower()),
    "str": lambda text: text,
}

_KINDS: Mapping[str, type] = {"float": float, "int": int, "bool": bool, "str": str}
