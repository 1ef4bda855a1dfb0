"""Listening without harm: what a listener raises must not reach the request that caused the news."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from pipeline.rx import DisposableBase, Observable, ObserverBase

T = TypeVar("T")

_log = logging.getLogger(__name__)


def isolated(source: Observable[T]) -> Observable[T]:
    """The same news; what a listener raises is logged, and everybody goes on listening."""

    def subscribe(observer: ObserverBase[T], _: Any = None) -> DisposableBase:
        def tell(item: T) -> None:
            try:
                observer.on_next(item)
            except Exception:
                _log.exception("a listener failed")

        return source.subscribe(tell, observer.on_error, observer.on_completed)

    return Observable(subscribe)
