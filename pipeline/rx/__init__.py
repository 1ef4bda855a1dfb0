"""ResponseStream to and from reactivex Observable, and a reactivex scheduler on anyio."""

from .bridge import (
    AnyIOScheduler,
    BehaviorSubject,
    CatchScheduler,
    CompositeDisposable,
    Disposable,
    DisposableBase,
    Observable,
    ObserverBase,
    OverflowPolicy,
    RefCountDisposable,
    Subject,
    apply,
    from_observable,
    ops,
    to_observable,
)

__all__ = [
    "AnyIOScheduler",
    "BehaviorSubject",
    "CatchScheduler",
    "CompositeDisposable",
    "Disposable",
    "DisposableBase",
    "Observable",
    "ObserverBase",
    "OverflowPolicy",
    "RefCountDisposable",
    "Subject",
    "apply",
    "from_observable",
    "ops",
    "to_observable",
]
