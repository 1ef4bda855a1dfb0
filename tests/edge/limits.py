"""The limits of the server that the attacks need small: one table, from the names used here to the variables.

A name of the first column stands in the attacks; the second column is the only place that knows the server's own.
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES: Mapping[str, str] = {
    "head_timeout_s": "PENSTOCK_HEAD_TIMEOUT_S",
    "body_timeout_s": "PENSTOCK_BODY_TIMEOUT_S",
    "idle_timeout_s": "PENSTOCK_KEEP_ALIVE_TIMEOUT_S",
    "write_timeout_s": "PENSTOCK_WRITE_TIMEOUT_S",
}

QUICK: Mapping[str, float] = {
    "head_timeout_s": 1,
    "body_timeout_s": 1,
    "idle_timeout_s": 1,
    "write_timeout_s": 1,
}
"""A server that gives up on a slow peer within a second, so that a test of it is over soon."""


def variables(limits: Mapping[str, float]) -> dict[str, str]:
    """The environment of a server with these limits."""
    return {VARIABLES[name]: f"{value:g}" for name, value in limits.items()}
