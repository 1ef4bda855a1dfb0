"""ModelGauges: what the workers of each model have published of themselves, looked at when metrics are read.

Source: dynamo lib/llm/src/http/service/metrics.rs, update_runtime_config_metrics and update_mdc_metrics. Other than
there, of workers that differ the largest figure counts, not the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from pipeline.protocols.card import ModelDeploymentCard
from pipeline.telemetry import Instrument, Metrics

Cards = Callable[[], Iterable[ModelDeploymentCard | None]]
"""Gives the cards of the workers there are now; None for one that has not published any."""

_ABOUT: Mapping[str, tuple[str, Callable[[ModelDeploymentCard], int | None]]] = {
    "model_total_kv_blocks": ("KV blocks of a worker", lambda card: card.runtime_config.total_kv_blocks),
    "model_max_num_seqs": ("Sequences that a worker runs at a time", lambda card: card.runtime_config.max_num_seqs),
    "model_max_num_batched_tokens": (
        "Tokens that a worker computes in a pass",
        lambda card: card.runtime_config.max_num_batched_tokens,
    ),
    "model_context_length": ("Tokens of a prompt and its answer", lambda card: card.effective_context_length or None),
    "model_kv_cache_block_size": ("Tokens of a KV block", lambda card: card.kv_cache_block_size or None),
}
_MIGRATION_LIMIT = "model_migration_limit"

MODEL_GAUGES = (
    *(Instrument(name, "observed", "", text, ("model",)) for name, (text, _) in _ABOUT.items()),
    Instrument(_MIGRATION_LIMIT, "observed", "", "Other workers a request may go on with", ("model",)),
)


class ModelGauges:
    """Shows the models of a program. The metrics may be read in any thread; what a worker has not said is left out."""

    def __init__(self, metrics: Metrics, prefix: str | None = None) -> None:
        """With the meter of those metrics; `prefix` as there."""
        gauges = Metrics(metrics.meter, prefix=prefix, rows=MODEL_GAUGES)
        self._shown: list[tuple[Cards, int]] = []
        for name, (_, figure) in _ABOUT.items():
            gauges.observe(name, partial(self._largest, figure))
        gauges.observe(_MIGRATION_LIMIT, self._limits)

    def add(self, cards: Cards, migration_limit: int) -> None:
        """Show these workers too; their requests may go on with so many others."""
        self._shown.append((cards, migration_limit))

    def _largest(
        self, figure: Callable[[ModelDeploymentCard], int | None]
    ) -> Iterable[tuple[Mapping[str, str], float]]:
        found: dict[str, int] = {}
        for card, _ in self._cards():
            if (value := figure(card)) is not None:
                found[card.display_name] = max(value, found.get(card.display_name, value))
        return [({"model": model}, value) for model, value in found.items()]

    def _limits(self) -> Iterable[tuple[Mapping[str, str], float]]:
        limits = {card.display_name: limit for card, limit in self._cards()}
        return [({"model": model}, limit) for model, limit in limits.items()]

    def _cards(self) -> list[tuple[ModelDeploymentCard, int]]:
        return [(card, limit) for cards, limit in self._shown for card in list(cards()) if card is not None]
