"""Supervisor: keeps a worker in service for something that may be down, such as a server of its own.

    try ──► fails ──► wait, twice as long each time ──┐
     ▲ └──► a worker serves until its engine ends ────┤
     └────────────────────────────────────────────────┘

Each worker is a new instance with a new id, so that routers believe nothing that they knew of the one before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import anyio

from engines import Worker
from pipeline import InvalidArgument, PenstockError, to_error

from ..retry import Retry as Retry

_log = logging.getLogger(__name__)


class Supervisor:
    """Opens a worker, and another one when it has ended, until cancelled; `name` is for messages.

    `open` gives a worker in service, and ends it with its block. What it raises is logged, once for each cause, and
    tried again: a server that is down comes back, and one with the wrong model may be started anew.
    """

    def __init__(
        self, name: str, open: Callable[[], AbstractAsyncContextManager[Worker]], retry: Retry | None = None
    ) -> None:
        self.name = name
        self.worker: Worker | None = None
        """The worker in service; None while there is none."""
        self.problem: PenstockError | None = None
        """Why there is none; None before the first try, and while there is one."""
        self.was_tried = anyio.Event()
        """Set once the first try has ended: a worker serves, or `problem` is set."""
        self._open, self._retry = open, retry or Retry()
        self._shown = ""

    async def run(self) -> None:
        """Supervise until cancelled; a worker in service is ended then."""
        waited_s = 0.0
        while True:
            served_s = 0.0
            try:
                async with self._open() as worker:
                    self.worker, self.problem = worker, None
                    self._show(logging.INFO, f"{self.name} is in service as {worker}")
                    self.was_tried.set()
                    began_s = anyio.current_time()
                    try:
                        await worker.wait()
                    finally:
                        self.worker, served_s = None, anyio.current_time() - began_s
                self.problem = worker.failure
            except PenstockError as error:
                self.problem = error
            except Exception as error:  # a fault of ours at one server does not end the others
                _log.exception(f"{self.name} met an error that is no server's")
                self.problem = to_error(error)
            self.was_tried.set()
            waited_s = self._retry.after(waited_s, served_s)
            self._show(_level(self.problem), f"{self.name} is left out: {_text(self.problem)}")
            await anyio.sleep(waited_s)

    def _show(self, level: int, text: str) -> None:
        if text != self._shown:
            self._shown = text
            _log.log(level, text)


def _level(problem: PenstockError | None) -> int:
    """Return the level of a message: what only a change of the configuration mends is an error."""
    return logging.ERROR if isinstance(problem, InvalidArgument) else logging.WARNING


def _text(problem: PenstockError | None) -> str:
    """Return the reason, with the name of the setting if it is one's."""
    if problem is None:
        return "its worker was shut down"
    field = f" ({problem.field})" if isinstance(problem, InvalidArgument) and problem.field else ""
    return f"{type(problem).__name__}{field}: {problem}"
