"""replay_live: the requests of a trace, sent to a running server in real time, and their report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import anyio

from ..replay import Report, RequestReport, Role, Trace, run
from .engine import SILENCE_S, find_server, live_graph


def replay_live(
    url: str,
    trace: Trace,
    vocabulary: range,
    *,
    model: str | None = None,
    api_key: str | None = None,
    silence_s: float = SILENCE_S,
    settings: Mapping[str, Any] | None = None,
    requests_file: Path | None = None,
    **how: Any,
) -> Report:
    """Return the report of a trace that is sent to the server at this URL, with token ids of the vocabulary.

    `settings` are those of the report beside the server, its model and the ids of its workers, which are numbered in
    the order of their first appearance. `requests_file` gets a line of JSON for each request when it ends. `model`,
    `api_key` and `silence_s` are those of `find_server` and `live_graph`, the rest those of `serving.replay.run`. The
    call blocks; it raises the process's limit of open files, and runs on uvloop if that is installed.

    Raise InvalidArgument for a vocabulary that is too small, and as `find_server` before anything is sent.
    """
    _raise_limit_of_files()
    sent = trace.with_vocabulary(vocabulary)
    ids: dict[Role, list[int]] = {"decode": [], "prefill": []}

    def number_of(worker_id: int, role: Role) -> int:
        """Return the place of a worker in the order of their first appearance."""
        if worker_id not in ids[role]:
            ids[role].append(worker_id)
        return ids[role].index(worker_id)

    async def replay() -> Report:
        server = await find_server(url, model=model, api_key=api_key)
        graph = live_graph(server, api_key=api_key, silence_s=silence_s)
        shown = {
            "live": str(server.address),
            "model": server.model,
            "live_ids": f"{vocabulary[0]}-{vocabulary[-1]}",
            **(settings or {}),
            "load_digest": trace.digest,
            "worker_ids": ids,
        }
        with _lines(requests_file) as on_request:
            return await run(graph, sent, settings=shown, number_of=number_of, on_request=on_request, **how)

    return anyio.run(replay, backend_options=_fastest_loop())


@contextmanager
def _lines(path: Path | None) -> Iterator[Callable[[RequestReport], object] | None]:
    """Give a function that writes a line for a request, or None without a file."""
    if path is None:
        yield None
        return
    with path.open("wb", buffering=0) as file:
        yield lambda request: file.write(request.to_json() + b"\n")


def _fastest_loop() -> dict[str, Any]:
    """Return the backend options of uvloop if it is installed: a client then costs a third less.

    Its own clock counts whole milliseconds, which is too coarse here.
    """
    try:
        from uvloop import Loop
    except ModuleNotFoundError:
        return {}

    class ExactLoop(Loop):
        def time(self) -> float:
            return monotonic()

    return {"loop_factory": ExactLoop}


def _raise_limit_of_files() -> None:
    """Allow as many open connections as the system permits this process."""
    try:
        import resource
    except ModuleNotFoundError:  # there is no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):  # some systems refuse an unlimited one
        return
