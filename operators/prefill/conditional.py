"""Conditional disaggregation: a prompt that is short, or mostly cached where it will decode, is prefilled there.

    decode router: best worker, not booked ──► policy: worth no transfer? ──► gate: has it room? ──► bypass

Source: dynamo lib/llm/src/kv_router/prefill_router/conditional.rs. A worker is busy, for decode as for prefill, with
more prompt tokens in flight than the threshold times its `max_num_batched_tokens`; where it does not say that number
it is not known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from attrs import evolve, frozen

from pipeline import Context
from pipeline.protocols import PreprocessedRequest, RequestPhase
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.protocols.openai import BYPASS_REMOTE_PREFILL

from ..kv import ConditionalPolicy, KvRouter, KvRouterConfig, WorkerRank, with_shared_hashes
from .pool import PrefillPool
from .resolve import Configs

_log = logging.getLogger(__name__)


@frozen
class BypassRules:
    """When a request goes without remote prefill. `decode_gate`: only to a decode worker known to have room."""

    policy: ConditionalPolicy = "isl_bounding"
    isl_threshold_tokens: int = 2048
    isl_ratio_threshold: float = 0.7
    decode_gate: bool = False

    @classmethod
    def of(cls, config: KvRouterConfig) -> BypassRules:
        """Those of a configuration in which it is enabled."""
        return cls(
            config.conditional_disagg_policy,
            config.conditional_disagg_eff_isl_threshold,
            config.conditional_disagg_eff_isl_ratio_threshold,
            config.conditional_disagg_decode_busy_threshold is not None,
        )

    @property
    def goes_by_load(self) -> bool:
        return self.policy != "isl_bounding"


def should_bypass(
    rules: BypassRules | None,
    *,
    isl_tokens: int,
    cached_tokens: int,
    prefill_busy: bool | None = None,
    decode_busy: bool | None = None,
) -> bool:
    """Whether remote prefill is not worth it; never without rules. A None means that it is not known."""
    if rules is None:
        return False
    net_tokens = isl_tokens - min(cached_tokens, isl_tokens)
    is_short = net_tokens < rules.isl_threshold_tokens and net_tokens / max(1, isl_tokens) < rules.isl_ratio_threshold
    wanted = (rules.policy != "prefill_load" and is_short) or (rules.goes_by_load and prefill_busy is True)
    return wanted and (not rules.decode_gate or decode_busy is False)


def is_busy(active_prefill_tokens: int, threshold: float | None, config: ModelRuntimeConfig | None) -> bool | None:
    """Whether that worker is busy; None where it does not say how much it can take, or there is no threshold."""
    if threshold is None or config is None or config.max_num_batched_tokens is None:
        return None
    return active_prefill_tokens > threshold * config.max_num_batched_tokens


class ConditionalDisaggregation:
    """Decides by a configuration and the router of the decode pool; never, unless `conditional_disagg_enabled`.

    `configs` gives what the decode workers say of themselves, which only the gate asks for.
    """

    def __init__(self, config: KvRouterConfig, decode: KvRouter, configs: Callable[[], Configs] = dict) -> None:
        self.config = config
        self._decode, self._configs = decode, configs
        self.rules = BypassRules.of(config) if config.conditional_disagg_enabled else None

    def bypass(
        self, request: Context[PreprocessedRequest], prefill: PrefillPool, configs: Configs
    ) -> WorkerRank | None:
        """Where the request goes without remote prefill; None if it goes the usual way, as after any error."""
        payload = request.payload
        if self.rules is None or (payload.routing is not None and payload.routing.prefill_worker_id is not None):
            return None
        if not payload.block_mm_routing_info()[0]:
            return None
        try:
            return self._bypass(self.rules, request, prefill, configs)
        except Exception as error:
            _log.warning("request %r is prefilled remotely: %s", request.id, error)
            return None

    def _bypass(
        self,
        rules: BypassRules,
        request: Context[PreprocessedRequest],
        prefill: PrefillPool,
        configs: Configs,
    ) -> WorkerRank | None:
        route = self._decode.route_request(request.payload, RequestPhase.DECODE, request.metadata)
        decision = self._decode.advise(with_shared_hashes(route, request))
        decode_busy = is_busy(
            decision.chosen.active_prefill_tokens,
            self.config.conditional_disagg_decode_busy_threshold,
            self._configs().get(decision.rank.worker_id),
        )
        bypasses = should_bypass(
            rules,
            isl_tokens=decision.prompt.isl_tokens,
            cached_tokens=decision.cached_tokens,
            prefill_busy=self._prefill_busy(request, prefill, configs) if rules.goes_by_load else None,
            decode_busy=decode_busy,
        )
        return decision.rank if bypasses else None

    def _prefill_busy(
        self, request: Context[PreprocessedRequest], prefill: PrefillPool, configs: Configs
    ) -> bool | None:
        if (known := prefill.prompt_tokens_of(request)) is None:
            return None
        worker, tokens = known
        return is_busy(tokens, self.config.conditional_prefill_busy_threshold, configs.get(worker.worker_id))


def without_claim(payload: PreprocessedRequest) -> PreprocessedRequest:
    """The request without a client's own word that it was decided so; the very same if it says nothing."""
    if not any(_is_claim(text) for text in payload.annotations):
        return payload
    return evolve(payload, annotations=[text for text in payload.annotations if not _is_claim(text)])


def _is_claim(text: str) -> bool:
    return text.partition(":")[0] == BYPASS_REMOTE_PREFILL
