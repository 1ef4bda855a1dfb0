"""ShutdownTimes: how long each part of a worker's end may take, as the environment says.

Source: dynamo lib/backend-common/src/worker.rs, grace_period_secs, graceful_shutdown_timeout and shutdown_deadline. The
timeout is that of its release builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from attrs import frozen

from .environment import seconds, whole_seconds

GRACE_ENV = "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"
TIMEOUT_ENV = "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT"


@frozen
class ShutdownTimes:
    """`grace_s`: served on after the worker is invisible. `timeout_s`: for draining and cleaning up after that."""

    grace_s: float = 5.0
    timeout_s: float = 30.0

    @property
    def deadline_s(self) -> float:
        """For all of it. The grace is added: with timeout 5 and grace 5.1 nothing would be left to clean up in."""
        return self.timeout_s + max(self.grace_s, 0.0)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """A grace below zero is none; what is empty or no number is the default, as is a timeout not in digits."""
        defaults = cls()
        grace_s, timeout_s = seconds(environment.get(GRACE_ENV)), whole_seconds(environment.get(TIMEOUT_ENV))
        return cls(
            defaults.grace_s if grace_s is None else max(grace_s, 0.0),
            defaults.timeout_s if timeout_s is None else float(timeout_s),
        )
