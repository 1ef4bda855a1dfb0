"""Connectors: how the KV blocks of a prompt get from the server that computed it to the server that answers it.

    prefill   prefill_params ──► its request ──► its answer ──► offer ──► opaque parameters, and a lease
    decode    take ──► its request ──► renew, as soon as its server has the request ──► done, at the first token

The servers move the bytes; here are the parameters of their requests. Nothing here waits.

| connector  | prefill's request               | decode's request                       | who ends a lease early   |
|------------|---------------------------------|----------------------------------------|--------------------------|
| `nixl`     | `do_remote_decode`              | what prefill's answer has, unchanged   | decode, by its reading   |
| `mooncake` | `do_remote_decode`, a transfer  | the transfer, and where prefill is     | decode, by its reading   |
| `lmcache`  | nothing: both share a cache     | nothing                                | there is none            |

SGLang's servers meet each other instead: both get the same `bootstrap_fields` at the same time.

Source: vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py and mooncake/mooncake_connector.py; dynamo
components/src/dynamo/vllm/kv_connector_protocols.py. Other than there, leases are counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Any, ClassVar
from uuid import uuid4

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.errors import InvalidMessage
from pipeline.protocols import BootstrapInfo, PreprocessedRequest

from ..llm import GenerateContext
from .leases import Lease, Leases

_PARAMS = "kv_transfer_params"
LEASE = "lease"
"""Name of the lease in the parameters of an offer."""
_FIELD = "prefill_result.disaggregated_params"


@frozen
class Taken:
    """What decode's request is sent with, and how long that makes sense."""

    params: dict[str, Any] | None
    """Its `kv_transfer_params`; None: it has none."""
    lease: Lease


@frozen
class PrefillServer:
    """What decode has to know of a prefill server beforehand. Only Mooncake needs it."""

    bootstrap_url: str
    """Where its bootstrap server is, such as http://10.0.0.1:8998."""
    engine_ids: Mapping[int, str]
    """The id of its engine, by data-parallel rank."""

    @classmethod
    def parse(cls, bootstrap_url: str, answer: Any) -> PrefillServer:
        """Return the server with this answer to `GET /query` of its bootstrap server, decoded from JSON.

        Raise InvalidMessage for an answer without an engine.
        """
        try:
            engine_ids = {int(rank): str(entry["engine_id"]) for rank, entry in answer.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidMessage(f"{bootstrap_url}/query has no list of engines", cause=error) from error
        if not engine_ids:
            raise InvalidMessage(f"{bootstrap_url}/query has no engine: the prefill server has not registered")
        return cls(bootstrap_url.rstrip("/"), engine_ids)


Fetch = Callable[[PreprocessedRequest, GenerateContext], object]
"""Has a decode server fetch the blocks that the request's `prefill_result` offers."""


class KvConnector(ABC):
    """One for all servers of a deployment, shared by its prefill and decode workers: it counts their leases.

    Workers in another process need one of the same class; the prefill workers know how much of their leases is left.
    Without peers, as in `as_engine`, a lease begins when decode takes it, and the time before is not counted.

    `lease_s` is how long the prefill servers keep the blocks, by default as long as theirs do. Raise InvalidArgument
    unless it is above 0.
    """

    name: ClassVar[str]
    default_lease_s: ClassVar[float]
    """How long a server keeps the blocks unless it is configured otherwise; infinity: there is no lease."""
    server_renews: ClassVar[bool] = False
    """Whether decode's server renews the lease from when it has the request, also while that waits there."""

    def __init__(self, lease_s: float | None = None) -> None:
        if lease_s is not None and not lease_s > 0:
            raise InvalidArgument(f"must be above 0, got {lease_s:g}", field="lease_s")
        self.leases = Leases(self.default_lease_s if lease_s is None else lease_s)
        self._fetchers: list[tuple[str, Fetch]] = []
        """The decode servers that fetch what no answer needs, with their models."""

    def transfer_id(self) -> str:
        """Return the id of a new transfer, for `prefill_params` and `offer`."""
        return str(uuid4())

    @abstractmethod
    def prefill_params(self, transfer_id: str) -> dict[str, Any] | None:
        """Return the `kv_transfer_params` of prefill's request; None: it has none."""

    def offer(
        self,
        transfer_id: str,
        answered: Any,
        *,
        server: PrefillServer | None = None,
        dp_rank: int = 0,
        address: str = "",
    ) -> dict[str, Any]:
        """Return the `disaggregated_params` of a prefill that has ended, as plain values. Its lease begins.

        `answered`: the `kv_transfer_params` of the server's answer. `address`: where decode workers of other processes
        reach the prefill worker, to learn how much of the lease is left. Raise InvalidMessage if they have nothing that
        decode could use: the server moves no blocks, or not by this connector.
        """
        params = self._decode_params(transfer_id, answered, server, dp_rank)
        return {_PARAMS: params, LEASE: self.leases.begin(transfer_id, address)}

    def take(self, offered: Any) -> Taken:
        """Return what decode's request needs of an offer, which may be of another process, or of Dynamo.

        Raise InvalidArgument for anything but an offer, and WorkerOverloaded if its lease is over.
        """
        if not isinstance(offered, Mapping) or _PARAMS not in offered:
            raise InvalidArgument(f"must be an object with {_PARAMS}", field=_FIELD)
        params = offered[_PARAMS]
        if not isinstance(params, Mapping | None):
            raise InvalidArgument(f"{_PARAMS} must be an object", field=_FIELD)
        lease = self.leases.find(offered.get(LEASE))
        lease.check()
        return Taken(None if params is None else dict(params), lease)

    @contextmanager
    def fetching(self, model: str, fetch: Fetch) -> Iterator[None]:
        """During the block, a decode server of the model fetches blocks that no answer needs: see `give_back`."""
        self._fetchers.append(fetcher := (model, fetch))
        try:
            yield
        finally:
            self._fetchers.remove(fetcher)

    def give_back(self, model: str, request: PreprocessedRequest, context: GenerateContext) -> None:
        """Have a decode server of the model fetch the blocks of a prefill that has ended for nothing, to free them.

        `request` has the offer as its `prefill_result`. Without such a server the blocks wait for the lease to end.
        """
        assert request.prefill_result is not None
        self.done(self.take(request.prefill_result.disaggregated_params))
        fetch = next((fetch for its_model, fetch in self._fetchers if its_model == model), None)
        if fetch is not None:
            fetch(request, context)

    def renew(self, taken: Taken) -> None:
        """Decode's server has the request. Where that renews the lease by itself, the lease has no end from here on.

        Raise WorkerOverloaded if the lease is over by now.
        """
        taken.lease.check()
        if self.server_renews:
            self.leases.done(taken.lease)
            taken.lease.ends_s = inf

    def done(self, taken: Taken) -> None:
        """Decode has its first token, or is over: the lease is forgotten. May be called twice."""
        self.leases.done(taken.lease)

    @abstractmethod
    def _decode_params(
        self, transfer_id: str, answered: Any, server: PrefillServer | None, dp_rank: int
    ) -> dict[str, Any] | None:
        """Return the `kv_transfer_params` of decode's request. Raise as `offer`."""


class NixlPull(KvConnector):
    """vLLM's NixlConnector: decode's server reads the blocks from prefill's.

    What prefill's answer has goes to decode with all its keys; none is read here. The server keeps the blocks for
    `kv_lease_duration` seconds of its `kv_connector_extra_config`.
    """

    name = "nixl"
    default_lease_s = 30.0
    server_renews = True

    def prefill_params(self, transfer_id: str) -> dict[str, Any]:
        nothing = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        return {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(nothing)}

    def _decode_params(
        self, transfer_id: str, answered: Any, server: PrefillServer | None, dp_rank: int
    ) -> dict[str, Any]:
        if not isinstance(answered, Mapping) or not answered.get("do_remote_prefill"):
            raise InvalidMessage(
                "the prefill server's answer offers no KV blocks: start it with --kv-transfer-config for NixlConnector"
            )
        return dict(answered)


class MooncakePush(KvConnector):
    """vLLM's MooncakeConnector: prefill's server writes the blocks, to a decode server that has requested them.

    Both know the transfer by an id of ours. Decode also gets prefill's bootstrap server and the id of its engine, from
    the `PrefillServer`. The servers keep blocks for VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT seconds, and no call renews
    that.
    """

    name = "mooncake"
    default_lease_s = 480.0

    def prefill_params(self, transfer_id: str) -> dict[str, Any]:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}

    def _decode_params(
        self, transfer_id: str, answered: Any, server: PrefillServer | None, dp_rank: int
    ) -> dict[str, Any]:
        if server is None or dp_rank not in server.engine_ids:
            raise InvalidMessage(f"the bootstrap server of the prefill server has no engine of rank {dp_rank}")
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": server.bootstrap_url,
            "remote_engine_id": server.engine_ids[dp_rank],
        }


class LmCache(KvConnector):
    """vLLM's LMCacheMPConnector: both servers use one cache outside of them, and the requests have no parameters.

    Prefill's server stores the blocks there, decode's finds them by their tokens, and computes what it does not find.
    """

    name = "lmcache"
    default_lease_s = inf

    def prefill_params(self, transfer_id: str) -> None:
        return None

    def offer(
        self,
        transfer_id: str,
        answered: Any,
        *,
        server: PrefillServer | None = None,
        dp_rank: int = 0,
        address: str = "",
    ) -> dict[str, Any]:
        return {_PARAMS: None}

    def _decode_params(self, transfer_id: str, answered: Any, server: PrefillServer | None, dp_rank: int) -> None:
        return None


CONNECTORS: Mapping[str, type[KvConnector]] = {kind.name: kind for kind in (NixlPull, MooncakePush, LmCache)}
"""What `--kv-connector` names."""

_NAMES_OF_VLLM = {
    "NixlConnector": "nixl",
    "NixlPullConnector": "nixl",
    "MooncakeConnector": "mooncake",
    "LMCacheMPConnector": "lmcache",
}


def kv_connector(name: str, lease_s: float | None = None) -> KvConnector:
    """Return a new connector, by the name here or by that of vLLM's `--kv-transfer-config`.

    Raise InvalidArgument for any other name, and for a lease that is not above 0.
    """
    kind = CONNECTORS.get(_NAMES_OF_VLLM.get(name, name))
    if kind is None:
        raise InvalidArgument(f"must be one of {', '.join(CONNECTORS)}, got {name!r}", field="kv_connector")
    return kind(lease_s)


# -- SGLang

FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""The host with which SGLang's servers serve a request of one leg only, such as a probe."""

_ROOM_MAX = 2**63 - 1
_FAKE_PORT = 8998


@frozen
class BootstrapFields:
    """What both legs of a request carry on SGLang's servers."""

    bootstrap_host: str
    """The prefill server's host, as decode servers reach it."""
    bootstrap_port: int
    bootstrap_room: int
    """Where they meet, from 0 to 2^63 - 1."""

    def __attrs_post_init__(self) -> None:
        if not 0 <= (room := self.bootstrap_room) <= _ROOM_MAX:
            raise InvalidArgument(f"must be from 0 to {_ROOM_MAX}, got {room}", field="bootstrap_info.bootstrap_room")

    @classmethod
    def of(cls, request: PreprocessedRequest) -> BootstrapFields:
        """Return the fields of a request for a prefill or a decode server.

        They are those of its `bootstrap_info`, or of a prefill that has answered with them; a probe meets no other
        server. Raise InvalidArgument for a request without, for a room that is out of range, and for more choices than
        one: the blocks of one prompt serve one answer.
        """
        if (request.sampling_options.n or 1) > 1:
            raise InvalidArgument("a prompt that another server computes has one choice", field="n")
        if request.is_probe:
            return cls(FAKE_BOOTSTRAP_HOST, _FAKE_PORT, 0)
        info = request.bootstrap_info or _bootstrap_of(request)
        if info is None:
            raise InvalidArgument("a prefill or decode server needs a place to meet", field="bootstrap_info")
        return cls(info.bootstrap_host, info.bootstrap_port, info.bootstrap_room)

    def plain(self) -> dict[str, Any]:
        """Return them as the body of a request, and the parameters of a prefill, have them."""
        names = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
        return {name: getattr(self, name) for name in names}


def _bootstrap_of(request: PreprocessedRequest) -> BootstrapInfo | None:
    """Return the meeting point in the parameters of a prefill, if they have one."""
    params = None if request.prefill_result is None else request.prefill_result.disaggregated_params
    if not isinstance(params, Mapping):
        return None
    host, port, room = (params.get(f"bootstrap_{part}") for part in ("host", "port", "room"))
    if isinstance(host, str) and type(port) is int and type(room) is int:
        return BootstrapInfo(host, port, room)
    return None
