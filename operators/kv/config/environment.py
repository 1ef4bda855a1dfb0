"""The router's settings from variables of the environment.

Source: dynamo lib/kv-router/src/scheduling/config.rs, KvRouterConfig::from_env; `DYN_ROUTER_PLACEMENT` is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.settings import Setting, Variable, decimal, expected, kinds_of, number, settings_of, switch, whole

from ..load import EXPIRY_S
from .config import KvRouterConfig

OVERLAP_REFRESH_AFTER_S = 10.0

_MUST_BE_KNOWN = ("router_placement", "router_tracking_hash")
_OLDER_WEIGHTS = ("DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", "DYN_OVERLAP_SCORE_WEIGHT")


def variable_of(field: str) -> str:
    """Return the variable that sets a field of the configuration; empty: none does."""
    return settings_of(KvRouterConfig)[field].variable


def config_from_environment(environment: Mapping[str, str], values: Mapping[str, Any] | None = None) -> KvRouterConfig:
    """The configuration with `values` (of a file, say) under what the environment sets.

    A text that cannot be read counts as not set, except the name of an unknown placement or tracking hash. What can be
    read and is out of range raises InvalidArgument, as do the values.
    """
    own = dict(values or {})
    for field, known in settings_of(KvRouterConfig).items():
        text = environment.get(known.variable, "").strip() if known.variable else ""
        if text and (value := _read(known, text)) is not None:
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
    settings = settings_of(KvRouterConfig)
    variables = {known.variable: known for known in settings.values() if known.variable}
    for name, known in (variables | dict.fromkeys(_OLDER_WEIGHTS, settings["prefill_load_scale"])).items():
        text = environment.get(name, "").strip()
        is_wrong = text and _read(known, text) is None
        found[name] = f"must be {expected(kinds_of(known.kind)[:1])}, got {text!r}" if is_wrong else ""
    for variable in (ACTIVE_REQUEST_EXPIRY, OVERLAP_REFRESH_AFTER):
        problem = variable.problem(environment)
        found[variable.name] = "" if problem is None else problem[1]
    return found


def _read(known: Setting, text: str) -> Any:
    """Return the value of a text, or None for one that cannot be read."""
    kind = kinds_of(known.kind)[0]
    if known.choices:
        return text if text in known.choices or known.name in _MUST_BE_KNOWN else None
    try:
        return _READERS[kind](text)
    except ValueError:
        return None


def _float(text: str) -> float | None:
    try:
        return decimal(text)
    except ValueError:
        return None


_READERS: Mapping[type, Callable[[str], Any]] = {float: decimal, int: whole(), bool: switch, str: str}
