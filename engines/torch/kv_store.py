"""KvStore: the tensors of the KV cache, in blocks; read and written as bytes for a hand-over.

It belongs to the compute thread. Which block is whose is the batcher's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from pipeline import InvalidArgument

from .library import torch
from .planning import blocks_for


@frozen
class KvLayout:
    """The form of the KV of one token: in bytes `[layers, 2, tokens, kv_heads, head_dim]`, keys before values."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    """As torch names it, such as float32."""
    item_bytes: int

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.item_bytes

    @classmethod
    def of(cls, model: Any) -> KvLayout:
        """Return the layout of a model's cache, found by computing one token.

        Raise InvalidArgument for a model whose layers have different caches, or none: state spaces, latent attention.
        """
        device = next(model.parameters()).device
        with torch.inference_mode():
            made = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=True)
        layers: Any = getattr(getattr(made, "past_key_values", None), "layers", None) or ()
        shapes = {_shape(layer) for layer in layers}
        if len(shapes) != 1 or None in shapes:
            raise InvalidArgument(f"{type(model).__name__} keeps no keys and values of one form", field="model_path")
        keys: Any = layers[0].keys
        return cls(len(layers), keys.shape[1], keys.shape[3], str(keys.dtype).removeprefix("torch."), keys.itemsize)


def _shape(layer: Any) -> tuple[int, ...] | None:
    """The heads and their size of a layer's cache; None if it has no keys and values, or of different forms."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None or keys.shape != values.shape or len(keys.shape) != 4:
        return None
    return keys.shape[1], keys.shape[3]


class KvStore:
    """The blocks of a cache on a device, and one more, which nothing is written to: it fills up tables."""

    def __init__(self, layout: KvLayout, blocks: int, block_size_tokens: int, device: Any) -> None:
        self.layout = layout
        self.blocks = blocks
        self.block_size_tokens = block_size_tokens
        shape = layout.layers, 2, (blocks + 1) * block_size_tokens, layout.kv_heads * layout.head_dim
        self.cells = torch.zeros(shape, dtype=getattr(torch, layout.dtype), device=device)
        """By layer, keys or values, and place of a token: block times block size, and the place in it."""
        self.rows = self.cells.view(layout.layers, 2, blocks + 1, -1)
        """The same by block."""

    @property
    def padding_block(self) -> int:
        """The block that fills up tables."""
        return self.blocks

    def places(self, block_ids: Sequence[int], start: int, end: int) -> list[int]:
        """Return the places of the tokens from `start` to before `end` of a sequence with these blocks."""
        size = self.block_size_tokens
        return [block_ids[token // size] * size + token % size for token in range(start, end)]

    def read(self, block_ids: Sequence[int], tokens: int) -> bytes:
        """Return the KV of the first tokens of a sequence with these blocks."""
        cells = self.cells.index_select(2, self._tensor(self.places(block_ids, 0, tokens)))
        return bytes(cells.cpu().contiguous().view(torch.uint8).numpy().data)

    def write(self, block_ids: Sequence[int], tokens: int, data: bytes, *, start: int = 0) -> None:
        """Write the KV of a sequence's first tokens, those from `start` on, into its blocks.

        Raise InvalidArgument, and write nothing, unless `data` is exactly the KV of so many tokens.
        """
        layout = self.layout
        if len(data) != tokens * layout.bytes_per_token or blocks_for(tokens, self.block_size_tokens) > len(block_ids):
            raise InvalidArgument(f"{len(data)} bytes are not the KV of {tokens} tokens in {len(block_ids)} blocks")
        shape = layout.layers, 2, tokens, layout.kv_heads * layout.head_dim
        found = torch.frombuffer(bytearray(data), dtype=self.cells.dtype).view(shape)[:, :, start:]
        where = self._tensor(self.places(block_ids, start, tokens))
        self.cells.index_copy_(2, where, found.to(self.cells.device))

    def _tensor(self, numbers: list[int]) -> Any:
        return torch.tensor(numbers, dtype=torch.long, device=self.cells.device)
