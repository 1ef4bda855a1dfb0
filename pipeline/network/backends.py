"""The planes of a deployment, from its URL.

    memory              this process alone: no server, no socket
    file:FOLDER         a folder that all processes see: no server; events go from process to process
    nats://HOST:PORT    NATS servers, more after commas: `nats://one:4222,two:4222`; tls:// encrypts; asyncio only;
                        ?replicas=3 behind them: so many servers of a cluster keep what is stored

Requests and tokens go from process to process in each of the last two, over `pipeline.network.tcp`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.rx import AnyIOScheduler

from .discovery import Store
from .events import EventPlane
from .inprocess import InProcessEventPlane, InProcessRequestPlane, InProcessStore
from .objects import InProcessObjects, Objects
from .requests import RequestPlane

if TYPE_CHECKING:
    from pipeline.telemetry import Metrics

    from .tcp import TcpOptions

_FILE = "file:"
_NATS = ("nats://", "tls://")


@frozen
class Planes:
    """What a `Runtime` is made of."""

    store: Store
    """What the processes of the deployment know of each other."""
    requests: RequestPlane
    """Carries requests and items."""
    events: EventPlane
    """Carries events."""
    objects: Objects
    """Carries files."""


@frozen
class Site:
    """What all planes of one process have in common."""

    scheduler: AnyIOScheduler
    """Runs their background work."""
    rng: Random
    """Draws ids and pauses."""
    lease_ttl_s: float
    """Time after which the records of a process that is gone lapse."""
    wall_ms: Callable[[], int]
    """Dates events."""
    metrics: Metrics | None
    """Of the component family, count requests; None: nothing counts them."""
    may_make: bool = True
    """Whether a folder that is not there is made."""


def planes_at(url: str, site: Site, tcp: TcpOptions | None) -> Planes:
    """Return the planes at a URL, not open. `tcp`: where to listen, and with whom to speak.

    Raise InvalidArgument for a URL of no known kind, and ModuleNotFoundError without the extra `nats` for one of NATS.
    """
    if url == "memory":
        return in_process_planes(site)
    if url.startswith(_FILE):
        return _file_planes(url.removeprefix(_FILE), site, tcp)
    if url.startswith(_NATS):
        return _nats_planes(url, site, tcp)
    # Not the text: it may hold a password.
    raise InvalidArgument("a runtime is at memory, file:FOLDER or nats://HOST:PORT", field="url")


def in_process_planes(site: Site) -> Planes:
    """Return the planes of a deployment inside this process."""
    return Planes(
        InProcessStore(site.scheduler, site.lease_ttl_s),
        InProcessRequestPlane(site.metrics),
        InProcessEventPlane(site.wall_ms, site.rng),
        InProcessObjects(),
    )


def _file_planes(folder: str, site: Site, tcp: TcpOptions | None) -> Planes:
    from .direct_events import DirectEventPlane
    from .files import FileObjects, FileStore
    from .tcp import TcpRequestPlane

    if not (path := folder.removeprefix("//")).strip():
        raise InvalidArgument("file: needs a folder, as in file:/run/penstock", field="url")
    root = Path(path).expanduser()
    store = FileStore(root, site.scheduler, site.lease_ttl_s, rng=site.rng, may_make=site.may_make)
    requests = TcpRequestPlane(site.scheduler, tcp, site.metrics)
    events = DirectEventPlane(store, requests, site.scheduler, site.wall_ms, site.rng)
    return Planes(store, requests, events, FileObjects(root, site.scheduler, may_make=site.may_make))


def _nats_planes(url: str, site: Site, tcp: TcpOptions | None) -> Planes:
    from .nats import NatsConnection, NatsEventPlane, NatsObjects, NatsOptions, NatsStore, parse_replicas
    from .tcp import TcpRequestPlane

    # The deployment's token is the broker's too, unless the URL has a login of its own.
    token = None if tcp is None or "@" in url else tcp.token or None
    options = NatsOptions(token=token, heartbeat_s=min(1.0, site.lease_ttl_s / 4))
    addresses, replicas = parse_replicas(url)
    connection = NatsConnection(addresses, site.scheduler, options, rng=site.rng)
    return Planes(
        NatsStore(connection, site.lease_ttl_s, replicas=replicas),
        TcpRequestPlane(site.scheduler, tcp, site.metrics),
        NatsEventPlane(connection, site.wall_ms, site.rng),
        NatsObjects(connection, replicas=replicas),
    )
