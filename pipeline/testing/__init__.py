"""For tests of stages and graphs: scripted engines, probes, faults, virtual time, the contracts as checks.

Usable with any test runner; with pytest the fixtures of the plugin `penstock_pytest` come by themselves.
"""

from ..virtual_time import run_in_virtual_time, virtual_time
from .bundles import Bundles, bundled
from .check import check_engine, check_operator
from .engine_rules import ENGINE_RULES
from .open_streams import OpenStreams, watch_streams
from .operator_rules import OPERATOR_RULES
from .stages import Ending, Fail, Fault, Faults, Malformed, Probe, ScriptedEngine, Stall, Wait

__all__ = [
    "ENGINE_RULES",
    "OPERATOR_RULES",
    "Bundles",
    "Ending",
    "Fail",
    "Fault",
    "Faults",
    "Malformed",
    "OpenStreams",
    "Probe",
    "ScriptedEngine",
    "Stall",
    "Wait",
    "bundled",
    "check_engine",
    "check_operator",
    "run_in_virtual_time",
    "virtual_time",
    "watch_streams",
]
