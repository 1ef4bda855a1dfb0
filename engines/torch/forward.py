"""Forward: one pass of a model over chunks of one length, with their KV in blocks.

    chunks ──► token ids, positions, places, table, mask ──► model ──► logits behind the last token of each chunk
                                                               │ each layer: write new KV, gather all of each sequence

Any model works that takes a `Cache` of transformers, position ids and a mask of four dimensions.

Source: vllm/v1/worker/gpu_model_runner.py, the block table; transformers/cache_utils.py, CacheLayerMixin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define, frozen

from pipeline import InvalidArgument

from .grouped_attention import use_grouped_attention
from .kv_store import KvStore
from .library import torch, transformers
from .planning import Chunk, blocks_for

_FULL, _SLIDING = "full_attention", "sliding_attention"


@frozen
class Attention:
    """Which tokens the layers of a model see."""

    window: int | None
    """Tokens that a sliding layer sees; None: there is none."""
    is_mixed: bool
    """Whether some layers see all and others a window."""

    @classmethod
    def of(cls, model: Any) -> Attention:
        """Return the attention of a model. Raise InvalidArgument for a model with other layers."""
        config = model.config.get_text_config()
        if getattr(model.config, "is_encoder_decoder", False):
            raise InvalidArgument("an encoder-decoder model is not served", field="model_path")
        kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
        kinds |= {"local"} & set(getattr(config, "attention_layers", None) or ())  # of GPT-Neo, which masks by itself
        if unknown := kinds - {_FULL, _SLIDING}:
            raise InvalidArgument(f"layers of {', '.join(sorted(unknown))} are not served", field="model_path")
        if not kinds:
            return cls(window, False)
        return cls(window if _SLIDING in kinds else None, _SLIDING in kinds)


@define
class _Pass:
    """What the layers need to know of the pass under way."""

    places: Any
    """Where the new tokens go."""
    table: Any
    """The blocks of all sequences, one after the other; None if nothing was computed before."""
    width: int
    """Tokens of the longest sequence."""
    count: int
    """New tokens of each sequence."""


class _Layer(transformers.cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """One layer of the cache, as transformers calls it."""

    is_sliding = False

    def __init__(self, store: KvStore, layer: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._cells = store.cells[layer]
        self._rows = store.rows[layer]
        self.under_way: _Pass | None = None

    def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write the new keys and values, `[sequences, heads, new tokens, size]`; return those of all tokens."""
        now = self.under_way
        assert now is not None, "there is no pass"
        rows, heads, count, size = keys.shape
        for kind, new in enumerate((keys, values)):
            self._cells[kind].index_copy_(0, now.places, new.transpose(1, 2).reshape(rows * count, heads * size))
        if now.table is None:
            return keys, values
        found = self._rows.index_select(1, now.table).view(2, rows, -1, heads, size)[:, :, : now.width].transpose(2, 3)
        return found[0], found[1]

    def lazy_initialization(self, *_: Any) -> None:
        """The store is there already."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the tokens of the longest sequence, and where they begin."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens of the longest sequence that were computed before."""
        return 0 if self.under_way is None else self.under_way.width - self.under_way.count

    def get_max_length(self) -> int:
        """Return -1: there is no most."""
        return -1


class Forward:
    """The passes of one model over one store."""

    def __init__(self, model: Any, store: KvStore) -> None:
        self._model, self._store = model, store
        self._attention = Attention.of(model)
        use_grouped_attention(model)
        self._layers = [_Layer(store, layer) for layer in range(store.layout.layers)]
        self._cache = transformers.Cache(layers=self._layers)
        self._device = store.cells.device
        parameter = next(model.parameters())
        self._dtype = parameter.dtype if parameter.is_floating_point() else store.cells.dtype

    def logits(self, group: Sequence[Chunk]) -> Any:
        """Compute chunks of one length; return the logits behind the last token of each, `[chunks, vocabulary]`."""
        size, count = self._store.block_size_tokens, group[0].count
        width = max(chunk.end for chunk in group)
        tokens = [chunk.choice.tokens[chunk.start : chunk.end] for chunk in group]
        positions = self._tensor([range(chunk.start, chunk.end) for chunk in group])
        places = [self._store.places(chunk.block_ids, chunk.start, chunk.end) for chunk in group]
        table = None
        if width > count:
            blocks, padding = blocks_for(width, size), self._store.padding_block
            table = self._tensor([_filled(chunk.block_ids, blocks, padding) for chunk in group]).flatten()
        now = _Pass(self._tensor(places).flatten(), table, width, count)
        for layer in self._layers:
            layer.under_way = now
        try:
            made = self._model(
                input_ids=self._tensor(tokens),
                position_ids=positions,
                attention_mask=self._mask(positions, width),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        finally:
            for layer in self._layers:
                layer.under_way = None
        return made.logits[:, -1]

    def _mask(self, positions: Any, width: int) -> Any:
        """Return what is added to the weights of each token seen: 0, or as good as minus infinity."""
        behind = positions[:, None, :, None] - torch.arange(width, device=self._device)
        seen = behind >= 0
        window = self._attention.window
        sliding = seen if window is None else seen & (behind < window)
        if self._attention.is_mixed:
            return {_FULL: self._added(seen), _SLIDING: self._added(sliding)}
        return self._added(sliding)

    def _added(self, seen: Any) -> Any:
        zero = torch.zeros((), dtype=self._dtype, device=self._device)
        return torch.where(seen, zero, torch.finfo(self._dtype).min)

    def _tensor(self, rows: Sequence[Any]) -> Any:
        return torch.tensor([list(row) for row in rows], dtype=torch.long, device=self._device)


def _filled(block_ids: Sequence[int], blocks: int, padding: int) -> list[int]:
    """Return so many blocks: those of the sequence, cut or filled up."""
    found = list(block_ids[:blocks])
    return found + [padding] * (blocks - len(found))
