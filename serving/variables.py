"""All environment variables of a program, and the check of their texts at its start.

A variable is declared where it is used: as a field of a record of settings, or as a `Variable`. This module brings them
together, for the settings file, for the docs, and to find variables that nothing reads or whose text cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from engines.worker import PAYLOAD, STARTING_HEALTH, IdleProbeSettings, ShutdownTimes
from operators.kv import ACTIVE_REQUEST_EXPIRY, OVERLAP_REFRESH_AFTER, kv_router_variables
from operators.pool import COOLDOWN, DEVICE_RATIO, OVERLOAD_STATUS
from pipeline.protocols.card import STABLE_ROUTING_ID
from pipeline.settings import Problem, Variable, from_environment, settings_of

from .deployment import IGNORE_UNSUPPORTED, METRICS_PREFIX, SESSION_TTL, SILENCE
from .http import HEALTH_PATH, LIVE_PATH, STATUS_PORT, HttpOptions
from .server import GRACE, HAND_OVER
from .settings import RUNTIME_TOKEN
from .socket import PORT_SHARES

RECORDS: tuple[type[Any], ...] = (HttpOptions, ShutdownTimes, IdleProbeSettings)
"""Records of settings with variables and without options."""
VARIABLES: tuple[Variable[Any], ...] = (
    *(GRACE, HAND_OVER, SILENCE, IGNORE_UNSUPPORTED, METRICS_PREFIX, OVERLOAD_STATUS, COOLDOWN, DEVICE_RATIO),
    *(SESSION_TTL, ACTIVE_REQUEST_EXPIRY, OVERLAP_REFRESH_AFTER),
    *(STATUS_PORT, HEALTH_PATH, LIVE_PATH, STARTING_HEALTH, PAYLOAD, STABLE_ROUTING_ID),
)
"""Variables that are no field of a record."""
SECRETS = ("PENSTOCK_API_KEYS", "PENSTOCK_API_KEY", "PENSTOCK_UPSTREAM_API_KEY", RUNTIME_TOKEN, PAYLOAD.name)
"""Names of variables that may hold secrets."""
OTHERS = (
    *SECRETS,
    PORT_SHARES,
    *("DYN_TOKENIZER", "DYN_TOKENIZER_FALLBACK"),  # of the runtime config of a card, for engines that want them
)
"""Names of variables that are read elsewhere."""
_OURS = re.compile(r"(DYN|PENSTOCK)_")
_BUCKETS = re.compile(r"DYN_METRICS_[A-Z0-9_]+_(MIN|MAX|COUNT)")


def names(options: Iterable[type[Any]] = ()) -> set[str]:
    """Return the names of all variables, those of the records of options included."""
    found = {known.variable for record in (*RECORDS, *options) for known in settings_of(record).values()}
    return {*found, *(one.name for one in VARIABLES), *kv_router_variables({}), *OTHERS} - {""}


def unreadable(environment: Mapping[str, str]) -> list[Problem]:
    """Return every variable without an option whose text cannot be read, with what it must be."""
    problems: list[Problem] = []
    for record in RECORDS:
        from_environment(record, environment, problems)
    problems += [problem for one in VARIABLES if (problem := one.problem(environment)) is not None]
    problems += [(name, what) for name, what in kv_router_variables(environment).items() if what]
    return sorted(dict(problems).items())


def unread(environment: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return a line for each variable of this project or of Dynamo that nothing reads, with the nearest name."""
    known = sorted(known)
    found = []
    for name in sorted(environment):
        if _OURS.match(name) and name not in known and not _BUCKETS.fullmatch(name):
            near = get_close_matches(name, known, 1, cutoff=0.8)
            found.append(f"{name} is set and nothing reads it" + (f"; did you mean {near[0]}?" if near else ""))
    return found


def of_graphs(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may change what a graph does: those of Dynamo that are not blank."""
    return {name: text for name, text in environment.items() if name.startswith("DYN_") and text.strip()}
