"""`penstock replay --live`: what of its options goes with a server, and the replay against one."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from pipeline import InvalidArgument
from pipeline.protocols.limits import BusyThresholds
from pipeline.settings import settings_of

from .loads import interrupted
from .options import MockerOptions, ReplayPool, RoutingOptions
from .replay_options import LiveOptions, RunOptions

if TYPE_CHECKING:
    from ..replay import Report, RequestReport, Role, Trace

OF_THE_GRAPH = (
    *(
        name
        for record in (ReplayPool, MockerOptions, RoutingOptions, BusyThresholds, RunOptions)
        for name in settings_of(record)
        if name != "seed"
    ),
    *("real_time", "wall_time"),
)
"""Settings of a graph, or of its time, that a server decides for itself."""

OF_A_SERVER = ("model", "live_ids", "live_timeout")
"""Settings that need a server."""

_IDS = re.compile(r"(\d{1,10})-(\d{1,10})")
_REQUESTS_SUFFIX = ".requests.jsonl"


def check_options(given: set[str], live: str | None, *, per_request: bool, has_json: bool) -> None:
    """Raise InvalidArgument for an option that has no meaning with a server, without one, or without a file."""
    for name in OF_A_SERVER if live is None else OF_THE_GRAPH:
        if name in given:
            what = "is for --live only" if live is None else "cannot go with --live: that server is there, as it is"
            raise InvalidArgument(what, field=name)
    if per_request and not has_json:
        what = (
            "needs --json FILE, which has them"
            if live is None
            else "with --live needs --json FILE, beside which it writes"
        )
        raise InvalidArgument(what, field="per_request")


def ids_of(text: str) -> range:
    """Return the token ids of a text `FIRST-LAST`. Raise InvalidArgument for any other text."""
    found = _IDS.fullmatch(text)
    if found is None or int(found[1]) >= int(found[2]):
        raise InvalidArgument(f"expected FIRST-LAST, such as 1000-31999, got {text!r}", field="live_ids")
    return range(int(found[1]), int(found[2]) + 1)


def replayed_live(
    server: LiveOptions, trace: Trace, json: Path | None, settings: Mapping[str, Any], **how: Any
) -> Report:
    """Return the report of a replay to the server, with a progress bar meanwhile.

    With `json` each request is written to a file beside it when it ends, as a line. An interrupt ends the load; the
    report covers the requests until then. Raise as `find_server` before anything is sent.
    """
    import anyio

    from .progress import progress

    vocabulary = ids_of(server.live_ids)
    _raise_limit_of_files()
    load = trace.with_vocabulary(vocabulary)
    settings = {"live_ids": f"{vocabulary[0]}-{vocabulary[-1]}", **settings}
    with progress(trace.requests, sys.stderr) as on_progress:
        main = partial(_replay, server, load, json, settings, on_progress=on_progress, **how)
        return anyio.run(main, backend_options=_fastest_loop())


async def _replay(
    options: LiveOptions, trace: Trace, json: Path | None, settings: Mapping[str, Any], **how: Any
) -> Report:
    from ..live import find_server, live_graph
    from ..replay import run

    key = os.environ.get("OPENAI_API_KEY") or None
    server = await find_server(options.live or "", model=options.model, api_key=key)
    graph = live_graph(server, api_key=key, silence_s=options.live_timeout)
    numbers = Numbers()
    of_server = {"live": str(server.address), "model": server.model}
    with _lines(json) as on_request:
        return await run(
            graph,
            trace,
            settings=of_server | dict(settings) | {"worker_ids": numbers.ids},
            stop_when=interrupted,
            number_of=numbers.number_of,
            on_request=on_request,
            **how,
        )


class Numbers:
    """Numbers of the workers of each role, in the order of their first appearance; `ids` are the server's own."""

    def __init__(self) -> None:
        self.ids: dict[Role, list[int]] = {"decode": [], "prefill": []}

    def number_of(self, worker_id: int, role: Role) -> int:
        """Return the number of a worker; a new one gets the next."""
        known = self.ids[role]
        if worker_id not in known:
            known.append(worker_id)
        return known.index(worker_id)


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


@contextmanager
def _lines(json: Path | None) -> Iterator[Any]:
    """Give a function that writes a line for a request, or None without a file."""
    if json is None:
        yield None
        return
    with json.with_suffix(_REQUESTS_SUFFIX).open("wb", buffering=0) as file:

        def write(request: RequestReport) -> None:
            file.write(request.to_json() + b"\n")

        yield write


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
