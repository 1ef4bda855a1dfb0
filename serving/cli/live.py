"""`penstock replay --live`: what of its options goes with a server, and the replay against one."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from pipeline import InvalidArgument
from pipeline.settings import settings_of

from .loads import load_of
from .options import ReplayGraph
from .replay_options import LiveOptions, LoadOptions, ReportOptions, RunOptions
from .sources import parts_of

if TYPE_CHECKING:
    from ..replay import Report, RequestReport, Role, Trace

OF_THE_GRAPH = {name for record in (*parts_of(ReplayGraph), RunOptions) for name in settings_of(record)} - {"seed"} | {
    "real_time",
    "wall_time",
}
"""Settings of a graph, or of its time, that a server decides for itself."""
OF_A_SERVER = {"model", "live_ids", "live_timeout"}
"""Settings that need a server."""

_IDS = re.compile(r"(\d{1,10})-(\d{1,10})")
_REQUESTS_SUFFIX = ".requests.jsonl"


def check_options(given: set[str], live: str | None, report: ReportOptions) -> None:
    """Raise InvalidArgument for an option that has no meaning with a server, without one, or without a file."""
    if wrong := sorted(given & (OF_A_SERVER if live is None else OF_THE_GRAPH)):
        what = "is for --live only" if live is None else "cannot go with --live: that server is there, as it is"
        raise InvalidArgument(what, field=wrong[0])
    if report.per_request and report.json is None:
        which = "FILE, which has them" if live is None else "FILE, beside which it writes"
        raise InvalidArgument(f"{'' if live is None else 'with --live '}needs --json {which}", field="per_request")


def ids_of(text: str) -> range:
    """Return the token ids of a text `FIRST-LAST`. Raise InvalidArgument for any other text."""
    found = _IDS.fullmatch(text)
    if found is None or int(found[1]) >= int(found[2]):
        raise InvalidArgument(f"expected FIRST-LAST, such as 1000-31999, got {text!r}", field="live_ids")
    return range(int(found[1]), int(found[2]) + 1)


def replayed_live(server: LiveOptions, options: LoadOptions, seed: int, report: ReportOptions, **how: Any) -> Report:
    """Return the report of the load sent to the server, with a progress bar meanwhile.

    With single requests each is written to a file beside that of the report when it ends, as a line. An interrupt ends
    the load; the report covers the requests until then. Raise as `find_server` before anything is sent.
    """
    import anyio

    from .progress import progress

    load, vocabulary = load_of(options, seed), ids_of(server.live_ids)
    settings = {
        "live_ids": f"{vocabulary[0]}-{vocabulary[-1]}",
        "trace": options.trace_name,
        "format": load.format.value,
        "seed": seed,
        "speed_up": options.speed_up,
        "concurrency": options.concurrency,
        "load_digest": load.digest,
    }
    _raise_limit_of_files()
    lines = report.json if report.per_request else None
    with progress(load.requests, sys.stderr) as on_progress:
        sent = load.with_vocabulary(vocabulary)
        main = partial(_replay, server, sent, lines, settings, on_progress=on_progress, **how)
        return anyio.run(main, backend_options=_fastest_loop())


async def _replay(
    options: LiveOptions, trace: Trace, json: Path | None, settings: Mapping[str, Any], **how: Any
) -> Report:
    from ..live import find_server, live_graph
    from ..replay import run

    key = os.environ.get("OPENAI_API_KEY") or None
    server = await find_server(options.live or "", model=options.model, api_key=key)
    graph = live_graph(server, api_key=key, silence_s=options.live_timeout)
    ids: dict[Role, list[int]] = {"decode": [], "prefill": []}

    def number_of(worker_id: int, role: Role) -> int:
        """Return the place of a worker in the order of their first appearance."""
        if worker_id not in ids[role]:
            ids[role].append(worker_id)
        return ids[role].index(worker_id)

    settings = {"live": str(server.address), "model": server.model, **settings, "worker_ids": ids}
    with _lines(json) as on_request:
        return await run(
            graph, trace, settings=settings, stop_when=interrupted, number_of=number_of, on_request=on_request, **how
        )


async def interrupted() -> None:
    """Wait for an interrupt of the program. A second one has its usual effect."""
    import anyio

    with anyio.open_signal_receiver(signal.SIGINT) as signals:
        await anext(aiter(signals))


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
