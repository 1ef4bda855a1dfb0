"""ResponseStream to and from reactivex Observable, and a reactivex scheduler on anyio.

What is imported under its own name again is for sibling packages; users take the names of `__all__`.
"""

from reactivex import Observable
from reactivex import operators as ops
from reactivex.abc import DisposableBase as DisposableBase
from reactivex.abc import ObserverBase as ObserverBase
from reactivex.disposable import CompositeDisposable as CompositeDisposable
from reactivex.disposable import Disposable as Disposable
from reactivex.disposable import RefCountDisposable as RefCountDisposable
from reactivex.scheduler import CatchScheduler
from reactivex.subject import BehaviorSubject, Subject

from .bridge import OverflowPolicy, apply, from_observable, to_observable
from .scheduler import AnyIOScheduler

__all__ = [
    "AnyIOScheduler",
    "BehaviorSubject",
    "CatchScheduler",
    "Observable",
    "OverflowPolicy",
    "Subject",
    "apply",
    "from_observable",
    "ops",
    "to_observable",
]
