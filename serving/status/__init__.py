"""The state of a deployment: what its processes answer about themselves, gathered and shown as a table."""

from .gathering import Gatherer
from .overview import FrontendRow, Overview, WorkerRow
from .process_status import FRONTENDS_AT, ProcessStatus, serving_status, status_endpoint
from .showing import show_status

__all__ = [
    "FRONTENDS_AT",
    "FrontendRow",
    "Gatherer",
    "Overview",
    "ProcessStatus",
    "WorkerRow",
    "serving_status",
    "show_status",
    "status_endpoint",
]
