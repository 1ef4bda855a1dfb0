"""An OpenAI-compatible ASGI app over any engine, and what a program that runs one needs."""

from .application import app
from .availability import Availability, Phase
from .options import HttpOptions
from .service import served
from .telemetry import Telemetry

__all__ = ["Availability", "HttpOptions", "Phase", "Telemetry", "app", "served"]
