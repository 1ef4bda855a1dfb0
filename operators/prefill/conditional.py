"""Conditional disaggregation: a prompt that is short, or mostly cached where it will decode, is prefilled there.

    decode router: best worker, not booked ──► policy: worth a transfer? ──► gate: has it room? ──► prefilled there

Source: dynamo lib/llm/src/kv_router/prefill_router/conditional.rs. A worker is busy, for decode as for prefill, with
more prompt tokens in flight than the threshold times its `max_num_batched_tokens`; that is not known of a worker which
does not publish this number.
"""

from __future__ import annotations

import logging

from attrs import evolve

from pipeline import Context
from pipeline.protocols import PreprocessedRequest, RequestPhase
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.protocols.openai import BYPASS_REMOTE_PREFILL

from ..kv import KvRouter, KvRouterConfig, WorkerRank
from ..pool import Configs
from .pool import KvPrefill, PrefillPool

_log = logging.getLogger(__name__)


def skips_remote_prefill(
    config: KvRouterConfig,
    *,
    isl_tokens: int,
    cached_tokens: int,
    prefill_busy: bool | None = None,
    decode_busy: bool | None = None,
) -> bool:
    """Whether remote prefill is not worth it; never unless that is enabled. None for a load that is not known."""
    if not config.conditional_disagg_enabled:
        return False
    net_tokens = isl_tokens - min(cached_tokens, isl_tokens)
    is_short = (
        net_tokens < config.conditional_disagg_eff_isl_threshold
        and net_tokens / max(1, isl_tokens) < config.conditional_disagg_eff_isl_ratio_threshold
    )
    policy = config.conditional_disagg_policy
    wanted = (policy != "prefill_load" and is_short) or (policy != "isl_bounding" and prefill_busy is True)
    return wanted and (config.conditional_disagg_decode_busy_threshold is None or decode_busy is False)


def is_busy(active_prefill_tokens: int, threshold: float | None, config: ModelRuntimeConfig | None) -> bool | None:
    """Whether that worker is busy; None without a threshold, or if its settings lack `max_num_batched_tokens`."""
    if threshold is None or config is None or config.max_num_batched_tokens is None:
        return None
    return active_prefill_tokens > threshold * config.max_num_batched_tokens


class ConditionalDisaggregation:
    """Decides which requests are prefilled where they decode; none unless `conditional_disagg_enabled`.

    config: the rules
    decode: the router of the decode pool, which knows what is cached where and, for the gate, the settings of workers
    """

    def __init__(self, config: KvRouterConfig, decode: KvRouter) -> None:
        self.config = config
        self._decode = decode

    def select_decode_worker(
        self, request: Context[PreprocessedRequest], prefill: PrefillPool, configs: Configs
    ) -> WorkerRank | None:
        """Return the decode worker that prefills it too; None if it is prefilled remotely, as after any error."""
        payload = request.payload
        is_pinned = payload.routing is not None and payload.routing.prefill_worker_id is not None
        if not self.config.conditional_disagg_enabled or is_pinned or not payload.block_mm_routing_info()[0]:
            return None
        try:
            return self._select(request, prefill, configs)
        except Exception as error:
            _log.warning("request %r is prefilled remotely: %s", request.id, error)
            return None

    def _select(
        self, request: Context[PreprocessedRequest], prefill: PrefillPool, configs: Configs
    ) -> WorkerRank | None:
        config = self.config
        decision = self._decode.advise(self._decode.route_request(request, RequestPhase.DECODE))
        prefill_busy = None
        if config.conditional_disagg_policy != "isl_bounding" and isinstance(prefill, KvPrefill):
            there, tokens = prefill.advise(request)
            prefill_busy = is_busy(tokens, config.conditional_prefill_busy_threshold, configs.get(there.worker_id))
        is_local = skips_remote_prefill(
            config,
            isl_tokens=decision.prompt.isl_tokens,
            cached_tokens=decision.cached_tokens,
            prefill_busy=prefill_busy,
            decode_busy=is_busy(
                decision.chosen.active_prefill_tokens,
                config.conditional_disagg_decode_busy_threshold,
                self._decode.pool.current().configs.get(decision.rank.worker_id),
            ),
        )
        return decision.rank if is_local else None


def without_claim(payload: PreprocessedRequest) -> PreprocessedRequest:
    """Return the request without a client's annotation that claims this decision; the same object if it has none."""
    if not any(_is_claim(text) for text in payload.annotations):
        return payload
    return evolve(payload, annotations=[text for text in payload.annotations if not _is_claim(text)])


def _is_claim(text: str) -> bool:
    return text.partition(":")[0] == BYPASS_REMOTE_PREFILL
