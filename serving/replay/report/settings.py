"""The settings in a report: replays with equal settings give the same bytes.

They contain nothing of the machine or the date. Defaults are left out, but for the most important settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import asdict

from operators.kv import KvRouterConfig

from ...deployment import GraphConfig
from ...secrets import shown_engine_args, shown_environment
from ..faults import parse_faults
from ..samples import INTERVAL_MS
from ..traces import Trace
from .summary import Limits

_LEFT_OUT_BY_DEFAULT = ("enforce_disagg", "migration_limit", "migration_max_seq_len_tokens")


def replay_settings(
    config: GraphConfig,
    load: Trace,
    *,
    trace: str | None = None,
    faults: Sequence[str] = (),
    speed_up: float = 1.0,
    concurrency: int | None = None,
    limits: Limits | None = None,
    interval_ms: float = INTERVAL_MS,
    gpus_per_worker: int = 1,
    gpus_per_prefill_worker: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the settings of a replay; `trace` is the name of its file, None for synthetic load."""
    shown = {
        "trace": trace,
        "format": load.format.value,
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
    if (gpus_per_worker, gpus_per_prefill_worker) != (1, None):
        figures["gpus"] = [gpus_per_worker, gpus_per_prefill_worker]
    if environment:
        figures["environment"] = shown_environment(environment)
    return shown | _others(config, faults, limits or Limits()) | figures


def _others(config: GraphConfig, faults: Sequence[str], limits: Limits) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    plain = GraphConfig()
    changed = {name: one for name, one in _changed(config, plain).items() if name in _LEFT_OUT_BY_DEFAULT}
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
    return {name: one for name, one in asdict(record, recurse=False).items() if one != getattr(plain, name)}
