"""Whether there is somebody to prefill: from the news of the workers to the pool that may be asked.

    workers ──► activated with the first, deactivated without any, reactivated with the next ──► pool
    configs ──► the workers' own settings

Source: dynamo lib/llm/src/kv_router/prefill_router/activation.rs. Other than there a pool that could not be made is
tried again with the next news, and the end of the news deactivates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from attrs import evolve, frozen

from pipeline.network import Ids
from pipeline.protocols.runtime_config import ModelRuntimeConfig
from pipeline.rx import CompositeDisposable, Observable

from .pool import PrefillPool

_log = logging.getLogger(__name__)

Configs = Mapping[int, ModelRuntimeConfig]


@frozen
class Activation:
    """How far a prefill router has come: it is activated once and for all, and deactivated and reactivated since."""

    is_activated: bool = False
    is_deactivated: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether a request may go to a prefill worker."""
        return self.is_activated and not self.is_deactivated

    def can_serve(self, enforce_disagg: bool) -> bool:
        """Whether a request can be served at all, be it without prefill."""
        return not enforce_disagg or self.is_usable

    def deactivated(self) -> Activation:
        return evolve(self, is_deactivated=True)

    def reactivated(self) -> Activation:
        return evolve(self, is_deactivated=False)


class PrefillSide:
    """Follows the workers until it is closed; a side without workers is never activated.

    `pool` is asked for, if it is a function, with the first workers. It is kept when they leave: it finds those that
    come back by itself.
    """

    def __init__(
        self,
        pool: PrefillPool | Callable[[], PrefillPool] | None,
        workers: Observable[Ids] | None,
        configs: Observable[Configs] | None,
    ) -> None:
        self.activation = Activation()
        self.configs: Configs = {}
        self.pool: PrefillPool | None = None
        self._make: Callable[[], PrefillPool] | None = None
        if callable(pool):
            self._make = pool
        else:
            self.pool = pool
        self._following = CompositeDisposable()
        if configs is not None:  # before the workers: who is there is known with its settings
            self._following.add(configs.subscribe(self._learn, _failed))
        if workers is not None:
            self._following.add(workers.subscribe(self._hear, self._lose, self.deactivate))

    @property
    def usable(self) -> PrefillPool | None:
        """The pool, while a request may go there."""
        return self.pool if self.activation.is_usable else None

    def deactivate(self) -> None:
        self.activation = self.activation.deactivated()

    def reactivate(self) -> None:
        self.activation = self.activation.reactivated()

    def close(self) -> None:
        """Follows nothing more; nobody is asked any more."""
        self._following.dispose()
        self.deactivate()

    def _hear(self, ids: Ids) -> None:
        if self.activation.is_activated:
            self.activation = self.activation.reactivated() if ids else self.activation.deactivated()
        elif ids and self._has_pool():
            self.activation = Activation(is_activated=True)

    def _has_pool(self) -> bool:
        if self.pool is None and self._make is not None:
            try:
                self.pool = self._make()
            except Exception:
                _log.exception("the prefill pool could not be made; requests go without until the next news")
        return self.pool is not None

    def _learn(self, configs: Configs) -> None:
        self.configs = configs

    def _lose(self, error: Exception) -> None:
        _failed(error)
        self.deactivate()


def _failed(error: Exception) -> None:
    _log.error("news of the prefill workers ended", exc_info=error)
