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

from attrs import frozen

from pipeline import InvalidArgument

from .loads import told_to_end

if TYPE_CHECKING:
    from ..live import LiveServer
    from ..replay import Report, RequestReport, Role, Trace

OF_THE_GRAPH = (
    *("router", "workers", "prefill_workers", "enforce_disagg", "engine", "engine_arg", "router_config", "kv_events"),
    *("migration_limit", "migration_max_seq_len_tokens", "active_decode_blocks_threshold"),
    *("active_prefill_tokens_threshold", "active_prefill_tokens_threshold_frac", "fault", "real_time"),
    *("gpus_per_worker", "gpus_per_prefill_worker", "wall_time"),
)
"""Options that say what the graph is, or how its time goes: a server has its own."""

OF_A_SERVER = ("model", "live_ids", "live_timeout")
"""Options that mean nothing without one."""

_IDS = re.compile(r"(\d{1,10})-(\d{1,10})")
_REQUESTS_SUFFIX = ".requests.jsonl"


@frozen
class Live:
    """The options of a replay against a server. `vocabulary` are the token ids that prompts are made of.

    Raises InvalidArgument for a time limit that is none.
    """

    url: str
    model: str | None
    vocabulary: range
    timeout_s: float

    def __attrs_post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise InvalidArgument(f"must be above 0, got {self.timeout_s:g}", field="live_timeout")

    def settings(self, server: LiveServer, of_load: Mapping[str, Any]) -> dict[str, Any]:
        """What the report says of itself."""
        ids = f"{self.vocabulary[0]}-{self.vocabulary[-1]}"
        return {"live": str(server.address), "model": server.model, "live_ids": ids, **of_load}


def check_options(given: set[str], live: str | None, *, per_request: bool, has_json: bool) -> None:
    """Raises InvalidArgument for an option that was given and means nothing with a server, or without one or a file."""
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
    """The token ids from the first to the last that a text `FIRST-LAST` names."""
    found = _IDS.fullmatch(text)
    if found is None or int(found[1]) >= int(found[2]):
        raise InvalidArgument(f"expected FIRST-LAST, such as 1000-31999, got {text!r}", field="live_ids")
    return range(int(found[1]), int(found[2]) + 1)


def replayed_live(live: Live, trace: Trace, json: Path | None, settings: Mapping[str, Any], **how: Any) -> Report:
    """The report, with a bar while it is made; `json` set, a line for each request goes beside it as it ends.

    An interrupt ends the load, and the report is of what was done. Raises as `find_server` before anything is sent.
    """
    import anyio

    from .progress import progress

    _raise_limit_of_files()
    load = trace.with_vocabulary(live.vocabulary)
    with progress(trace.requests, sys.stderr) as on_progress:
        main = partial(_replay, live, load, json, settings, on_progress=on_progress, **how)
        return anyio.run(main, backend_options=_fastest_loop())


async def _replay(live: Live, trace: Trace, json: Path | None, settings: Mapping[str, Any], **how: Any) -> Report:
    from ..live import find_server, live_graph
    from ..replay import run

    key = os.environ.get("OPENAI_API_KEY") or None
    server = await find_server(live.url, model=live.model, api_key=key)
    graph = live_graph(server, api_key=key, silence_s=live.timeout_s)
    numbers = Numbers()
    said = live.settings(server, settings) | {"worker_ids": numbers.ids}
    with _lines(json) as on_request:
        return await run(
            graph,
            trace,
            settings=said,
            stop_when=told_to_end,
            number_of=numbers.number_of,
            on_request=on_request,
            **how,
        )


class Numbers:
    """Numbers of the workers of each role, in the order of their first appearance; `ids` are the server's own."""

    def __init__(self) -> None:
        self.ids: dict[Role, list[int]] = {"decode": [], "prefill": []}

    def number_of(self, worker_id: int, role: Role) -> int:
        known = self.ids[role]
        if worker_id not in known:
            known.append(worker_id)
        return known.index(worker_id)


def _fastest_loop() -> dict[str, Any]:
    """uvloop where it is, which costs a client a third less; but by a clock of more than whole milliseconds."""
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
    """What writes a line for a request; nothing does without a file."""
    if json is None:
        yield None
        return
    with json.with_suffix(_REQUESTS_SUFFIX).open("wb", buffering=0) as file:

        def write(request: RequestReport) -> None:
            file.write(request.to_json() + b"\n")

        yield write


def _raise_limit_of_files() -> None:
    """As many connections as the system lets this process have, not as many as it gives unasked."""
    try:
        import resource
    except ModuleNotFoundError:  # there is no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):  # some systems refuse an unlimited one
        return
