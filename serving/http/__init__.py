"""An OpenAI-compatible ASGI app over any engine, and what a program that runs one needs.

What is imported under its own name again is for sibling packages; users take the names of `__all__`.
"""

from pipeline.extras import brought_by

with brought_by("serve", by=__name__):
    from .application import admin_app, app
    from .generation import ON_GONE as ON_GONE
    from .guard import Access
    from .metrics import Telemetry
    from .open_requests import Availability
    from .options import HttpOptions
    from .service import served as served
    from .status import HEALTH_PATH as HEALTH_PATH
    from .status import LIVE_PATH as LIVE_PATH
    from .status import STATUS_PORT as STATUS_PORT
    from .status import group_app as group_app
    from .status import status_app

__all__ = ["Access", "Availability", "HttpOptions", "Telemetry", "admin_app", "app", "status_app"]
