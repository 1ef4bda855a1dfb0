"""Machine: a loaded model and its cache, which computes one step after the other. In the compute thread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from pipeline import InvalidArgument

from .adapters import Adapters
from .drawing import draw
from .forward import Forward
from .kv_store import KvStore
from .library import torch
from .loading import LoadedModel
from .order import ModelFacts
from .planning import StepPlan, groups
from .self_check import checked_layout
from .settings import TorchSettings
from .slots import Drawn


class Machine:
    """What computes: the model, its forward passes, the store of its KV.

    Raise InvalidArgument for a model that cannot be served, and for a cache that is too small for one block.
    """

    def __init__(
        self, loaded: LoadedModel, settings: TorchSettings, adapters: Mapping[str, Path] | None = None
    ) -> None:
        model = loaded.model
        layout = checked_layout(model)
        blocks = settings.kv_cache_blocks
        if blocks is None:
            blocks = settings.kv_cache_bytes // (layout.bytes_per_token * settings.block_size_tokens)
        if blocks < 1:
            raise InvalidArgument("there is no room for one block", field="kv_cache_bytes")
        self.name = loaded.name
        self.store = KvStore(layout, blocks, settings.block_size_tokens, next(model.parameters()).device)
        self._forward = Forward(model, self.store)
        self._adapters = Adapters(model, adapters or {})
        facts = _facts(loaded, settings, blocks * settings.block_size_tokens)
        self.facts = evolve(facts, adapters=tuple(adapters or ()))

    def run(self, plan: StepPlan) -> list[Drawn | None]:
        """Compute a step; return for each chunk what was drawn behind it."""
        drawn: dict[int, Drawn] = {}
        with torch.inference_mode():
            for load in plan.loads:
                self.store.write(load.block_ids, load.kv.tokens, load.kv.data, start=load.start)
            for group in groups(plan.chunks):
                with self._adapters.active(group[0].choice.order.adapter):
                    logits = self._forward.logits(group)
                rows = [row for row, chunk in enumerate(group) if chunk.draws]
                if not rows:
                    continue
                choices = [group[row].choice for row in rows]
                found = draw(logits if len(rows) == len(group) else logits[rows], choices)
                drawn |= {id(choice): one for choice, one in zip(choices, found, strict=True)}
        return [drawn.get(id(chunk.choice)) for chunk in plan.chunks]


def _facts(loaded: LoadedModel, settings: TorchSettings, cache_tokens: int) -> ModelFacts:
    config: Any = loaded.model.config.get_text_config()
    limits = (getattr(config, "max_position_embeddings", None), settings.context_length_tokens, cache_tokens)
    return ModelFacts(
        vocab_size=config.vocab_size,
        capacity_tokens=min(limit for limit in limits if limit is not None),
        eos_token_ids=loaded.eos_token_ids,
        default_temperature=settings.default_temperature,
    )
