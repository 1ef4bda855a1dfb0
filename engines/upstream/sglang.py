"""SglangUpstream: an SGLang server as an engine.

| what           | from                                                                    |
|----------------|-------------------------------------------------------------------------|
| model, context | `/v1/models`                                                            |
| blocks, ranks  | `/server_info`                                                          |
| KV events      | `kv_events` of `/server_info`, for each data-parallel rank              |
| load           | the load socket that is named there too                                 |
| tokens         | `POST /generate`                                                        |
| restarts       | the random seed and the times of the start, of `/server_info`           |
| its part       | `disaggregation_mode` of `/server_info`; both parts run at the same time |

Source: sglang/srt/entrypoints/http_server.py and sglang/srt/runtime_context.py, describe_kv_events_publisher.
"""

from __future__ import annotations

from collections.abc import Mapping
from secrets import token_hex
from typing import Any

from attrs import evolve

from pipeline import InvalidArgument
from pipeline.errors import InvalidMessage, StatusError
from pipeline.protocols import PreprocessedRequest
from pipeline.wire import plain_to_json

from ..llm import EngineConfig, GenerateContext
from ..roles import DisaggregationMode
from .connectors import BootstrapFields
from .errors import of_status
from .facts import EventSource, ServerFacts
from .sglang_answer import SglangAnswer
from .sglang_request import SglangServer, generate_body
from .upstream import Call, Upstream, header_value
from .vllm_request import session_of

GENERATE = "/generate"
ABORT = "/abort_request"

_INFO, _OLD_INFO = "/server_info", "/get_server_info"
_BOOTSTRAP_PORT = 8998
_MODES = {mode.value: mode for mode in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)}


class SglangUpstream(Upstream):
    """One SGLang server. Prompts are sent as token ids; see `Upstream` for the errors, and for what a stop does.

    A request with a LoRA name goes to that adapter, its cache namespace is the `extra_key`. What SGLang has no option
    for is refused by name. A server started with `--disaggregation-mode` serves its part of a request: it needs
    `bootstrap_info`, which a `PrefillRouter` makes of what the prefill server advertises, and sends both parts at the
    same time. Each part waits for the other at its server, so the end of one must end the other, as PrefillRouter does.
    If they do not come together, TransferFailed.
    """

    server = SglangServer()
    """What requests to the server depend on; found out by `discover`."""

    async def discover(self) -> ServerFacts:
        models, info = await self.page("/v1/models"), await self._info()
        self.server = _server_of(info)
        facts = _of_models(models, self.model, str(self.address))
        return _with_info(facts, info, self.address.url.host, self.server.mode)

    async def start(self, worker_id: int) -> EngineConfig:
        config = await super().start(worker_id)
        config.stops_prefills = self.server.mode is DisaggregationMode.PREFILL
        return config

    async def adapters(self) -> tuple[str, ...]:
        return _of_models(await self.page("/v1/models"), self.known.model, str(self.address)).adapters

    async def incarnation(self) -> str | None:
        return _incarnation(await self._info())

    def call(self, request: PreprocessedRequest, context: GenerateContext) -> Call:
        server = self.server
        request_id = f"{header_value(context.id)}-{token_hex(4)}"  # a client may send one id twice
        body = generate_body(request, self.known, server, request_id, session_of(request, context))
        is_prefill = server.mode is DisaggregationMode.PREFILL
        answer = SglangAnswer(
            request.sampling_options.n or 1,
            len(request.token_ids),
            is_incremental=server.is_incremental,
            handed_over=BootstrapFields.of(request).plain() if is_prefill else None,
            is_half=server.is_half,
        )
        return Call(GENERATE, plain_to_json(body), {"x-request-id": request_id}, answer, request_id)

    async def abort_at_server(self, call: Call) -> None:
        status, answer = await self.post(ABORT, plain_to_json({"rid": call.request_id}))
        if status != 200:
            raise of_status(status, answer)

    async def _info(self) -> Mapping[str, Any]:
        """Return what the server shows of itself; older servers have another name for the page."""
        try:
            info = await self.page(_INFO)
        except StatusError as error:
            if error.status != 404:
                raise
            info = await self.page(_OLD_INFO)
        if not isinstance(info, Mapping):
            raise InvalidMessage(f"{_INFO} is no object")
        return info


def _of_models(page: Any, model: str | None, address: str) -> ServerFacts:
    """Return the facts of `/v1/models`. Raise InvalidMessage for no such list, InvalidArgument for another model."""
    try:
        cards = [card for card in page["data"] if not card.get("parent")]
        adapters = tuple(str(card["id"]) for card in page["data"] if card.get("parent"))
        known = {str(card["id"]): card for card in cards}
        first = next(iter(known))
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise InvalidMessage("/v1/models is no list of models", cause=error) from error
    name = first if model is None else model
    if (card := known.get(name)) is None:
        raise InvalidArgument(f"{address} has no model {name!r}, but {', '.join(known)}", field="model")
    aliases = tuple(one for one in known if one != name)
    return ServerFacts(model=name, aliases=aliases, adapters=adapters, context_length=_positive(card, "max_model_len"))


def _with_info(facts: ServerFacts, info: Mapping[str, Any], host: str, mode: DisaggregationMode) -> ServerFacts:
    """Return the facts with those of `/server_info`."""
    events = info.get("kv_events")
    events = events if isinstance(events, Mapping) else {}
    size = _positive(events, "dp_size") or _positive(info, "dp_size") or 1
    block = _positive(events, "block_size") or _positive(info, "page_size")
    tokens = _positive(info, "max_total_num_tokens")
    prefills = mode is DisaggregationMode.PREFILL
    return evolve(
        facts,
        root=info.get("model_path"),
        version=info.get("version"),
        block_size_tokens=block,
        total_blocks=None if block is None or tokens is None else tokens // block,
        max_num_seqs=_positive(info, "max_running_requests"),
        data_parallel_size=size,
        event_sources=_event_sources(events, host, size),
        load_sources=_load_sources(events, host, size),
        bootstrap_host=host if prefills else None,
        bootstrap_port=(_positive(info, "disaggregation_bootstrap_port") or _BOOTSTRAP_PORT) if prefills else None,
        incarnation=_incarnation(info),
    )


def _event_sources(events: Mapping[str, Any], host: str, size: int) -> dict[int, EventSource]:
    """Return where the KV events of each rank come from: its port is the first one and its number."""
    base = _positive(events, "endpoint_port_base")
    if events.get("publisher") != "zmq" or base is None:
        return {}
    named, replay = events.get("endpoint_host") or "*", _positive(events, "replay_endpoint_port_base")
    return {
        rank: EventSource(
            f"tcp://{named}:{base + rank}",
            None if replay is None else f"tcp://{named}:{replay + rank}",
            str(events.get("topic") or ""),
        ).at(host)
        for rank in range(size)
    }


def _load_sources(events: Mapping[str, Any], host: str, size: int) -> dict[int, str]:
    """Return where the load of each rank comes from; always at the server's own host."""
    if (base := _positive(events, "load_endpoint_port_base")) is None:
        return {}
    return {rank: EventSource(f"tcp://*:{base + rank}").at(host).endpoint for rank in range(size)}


def _server_of(info: Mapping[str, Any]) -> SglangServer:
    sign = 0
    if info.get("enable_priority_scheduling"):
        sign = -1 if info.get("schedule_low_priority_values_first") else 1
    form = info.get("incremental_streaming_output", info.get("stream_output"))
    return SglangServer(
        mode=_MODES.get(str(info.get("disaggregation_mode")), DisaggregationMode.AGGREGATED),
        has_tokenizer=not info.get("skip_tokenizer_init"),
        priority_sign=sign,
        is_incremental=form if isinstance(form, bool) else None,
    )


def _incarnation(info: Mapping[str, Any]) -> str | None:
    """Return what differs between two starts of a server; None if it shows nothing of it."""
    known = {name: info[name] for name in ("random_seed", "startup_time") if info.get(name) is not None}
    return plain_to_json(known).decode() if known else None


def _positive(record: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number above 0; None for anything else."""
    value = record.get(name)
    return value if type(value) is int and value > 0 else None
