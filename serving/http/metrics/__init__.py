"""The metrics of an app: of each request, of its refusals, of its workers and models, and all of them as text."""

from .refusals import Refusals
from .request_meter import RequestMeter
from .telemetry import Telemetry

__all__ = ["Refusals", "RequestMeter", "Telemetry"]
