"""ResponseStream to and from reactivex Observable, and a reactivex scheduler on anyio."""

from reactivex import Observable
from reactivex import operators as ops
from reactivex.abc import DisposableBase, ObserverBase
from reactivex.disposable import CompositeDisposable, Disposable, RefCountDisposable
from reactivex.scheduler import CatchScheduler
from reactivex.subject import BehaviorSubject, Subject

from .bridge import OverflowPolicy, apply, from_observable, to_observable
from .scheduler import AnyIOScheduler

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
