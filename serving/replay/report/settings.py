"""The settings in a report: replays with equal settings give the same bytes.

They contain nothing of the machine or the date. Defaults are left out, but for the most important settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from attrs import asdict, fields, frozen

from operators.kv import KvRouterConfig

from ...deployment import GraphConfig
from ...secrets import shown_engine_args, shown_environment
from ..faults import parse_faults
from ..samples import INTERVAL_MS
from ..traces import Session, Trace, Turn
from .summary import Limits

GPUS: tuple[int, int | None] = (1, None)
"""GPUs of a worker, and of a prefill worker; None: the same."""
_LEFT_OUT_BY_DEFAULT = ("enforce_disagg", "migration_limit", "migration_max_seq_len_tokens")


@frozen
class LoadFacts:
    """The settings of a load."""

    requests: int
    format: str
    digest: str
    """Equal for equal requests and different for others, wherever they were read from."""

    @classmethod
    def of(cls, load: Trace) -> LoadFacts:
        return cls(load.requests, load.format.value, _digest(load))


def settings_of(
    config: GraphConfig,
    load: LoadFacts,
    *,
    trace: str | None = None,
    faults: Sequence[str] = (),
    speed_up: float = 1.0,
    concurrency: int | None = None,
    limits: Limits | None = None,
    interval_ms: float = INTERVAL_MS,
    gpus: tuple[int, int | None] = GPUS,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the settings of a replay; `trace` is the name of its file, None for synthetic load."""
    shown = {
        "trace": trace,
        "format": load.format,
        "router": config.router,
        "workers": config.workers,
        "prefill_workers": config.prefill_workers,
        "engine": config.engine,
        "engine_args": shown_engine_args(config.engine, config.engine_args),
        "seed": config.seed,
        "speed_up": speed_up,
        "concurrency": concurrency,
        "faults": list(faults),
        "load_digest": load.digest,
    }
    figures: dict[str, Any] = {} if interval_ms == INTERVAL_MS else {"interval_ms": interval_ms}
    if gpus != GPUS:
        figures["gpus"] = list(gpus)
    if environment:
        figures["environment"] = shown_environment(environment)
    return shown | _others(config, faults, limits or Limits()) | figures


def _others(config: GraphConfig, faults: Sequence[str], limits: Limits) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    plain = GraphConfig()
    changed = {
        name: getattr(config, name) for name in _LEFT_OUT_BY_DEFAULT if getattr(config, name) != getattr(plain, name)
    }
    if config.router == "kv" and (router := _changed(config.kv_router, KvRouterConfig())):
        changed["router_config"] = router
    if busy := _changed(config.busy, plain.busy):
        changed["busy"] = busy
    if wanted := _changed(limits, Limits()):
        changed["limits"] = wanted
    if any(text.startswith("@") for text in faults):  # the content of the file may change
        changed["fault_script"] = [
            asdict(one, filter=lambda field, _: field.name != "place") for one in parse_faults(faults)
        ]
    return changed


def _changed(record: Any, plain: Any) -> dict[str, Any]:
    named = {field.name: getattr(record, field.name) for field in fields(type(record))}
    return {name: value for name, value in named.items() if value != getattr(plain, name)}


def _digest(load: Trace) -> str:
    digest = blake2b(digest_size=8)
    for session in load.sessions:
        for part in _parts(session):
            digest.update(part)
    return digest.hexdigest()


def _parts(session: Session) -> Iterable[bytes]:
    yield repr((session.session_id, session.arrival_ms, session.is_named, len(session.turns))).encode()
    for turn in session.turns:
        yield repr(_plain(turn)).encode()
        yield turn.prompt.hash_ids.tobytes()
        if turn.recorded is not None:
            yield turn.recorded.tobytes()


def _plain(turn: Turn) -> tuple[Any, ...]:
    """Return the fields that identify a turn: without its line, and with the lengths of its arrays."""
    prompt, recorded = turn.prompt, None if turn.recorded is None else len(turn.recorded)
    return (
        *(turn.name, len(prompt.hash_ids), prompt.tokens, prompt.block_size_tokens, prompt.vocabulary, recorded),
        *(turn.output_tokens, turn.delay_ms, turn.priority, turn.strict_priority, turn.policy_class, turn.wait_for),
    )
