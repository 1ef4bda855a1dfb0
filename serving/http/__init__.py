"""An OpenAI-compatible ASGI app over any engine, and what a program that runs one needs."""

from pipeline.extras import brought_by

with brought_by("serve", by=__name__):
    from .application import admin_app, app
    from .generation import ON_GONE
    from .guard import Access
    from .metrics import Telemetry
    from .open_requests import Availability
    from .options import HttpOptions
    from .server_span import SCHEMA_URL
    from .service import served
    from .status import HEALTH_PATH, LIVE_PATH, STATUS_PORT, status_app

__all__ = [
    "HEALTH_PATH",
    "LIVE_PATH",
    "ON_GONE",
    "SCHEMA_URL",
    "STATUS_PORT",
    "Access",
    "Availability",
    "HttpOptions",
    "Telemetry",
    "admin_app",
    "app",
    "served",
    "status_app",
]
