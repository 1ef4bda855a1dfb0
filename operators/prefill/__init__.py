"""Prefilling elsewhere: a prefill worker computes the prompt, a decode worker goes on with its blocks.

What is imported under its own name again is offered by `operators`.
"""

from __future__ import annotations

from .conditional import ConditionalDisaggregation
from .errors import NoDisaggregatedParams, PrefillNotActivated, TopologyError
from .errors import PrefillError as PrefillError
from .pool import KvPrefill as KvPrefill
from .pool import PrefillPool
from .pool import PushPrefill as PushPrefill
from .router import PrefillRouter as PrefillRouter
from .router import PrefillSettings as PrefillSettings

__all__ = [
    "ConditionalDisaggregation",
    "NoDisaggregatedParams",
    "PrefillNotActivated",
    "PrefillPool",
    "TopologyError",
]
