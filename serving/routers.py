"""The names of routers: in a GraphConfig, on the command line, in a settings file and in reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from operators.pool import RouterMode

RouterName = Literal["round-robin", "random", "p2c", "least-loaded", "device-aware", "direct", "kv"]

MODES: Mapping[RouterName, RouterMode] = {
    "round-robin": "round_robin",
    "random": "random",
    "p2c": "power_of_two_choices",
    "least-loaded": "least_loaded",
    "direct": "direct",
    "kv": "direct",  # the stage above names the worker
}
"""Mode of the PushRouter that ends the graph; `device-aware` has a picker of its own."""
