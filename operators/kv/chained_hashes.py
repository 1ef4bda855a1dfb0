"""ChainedHashes: the sequence hashes of a prompt that is only asked about, chained no further than they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload

from pipeline.block_hash import sequence_hashes

_PIECE_BLOCKS = 16


class ChainedHashes(Sequence[int]):
    """Reads like `sequence_hashes(local_hashes)`, in pieces, each time anew.

    Whoever compares prefixes stops at the first block nobody has; chaining the rest costs as much as hashing the
    tokens. Who needs all of them, or needs them twice, takes `PromptBlocks.sequence_hashes`.
    """

    __slots__ = ("_local_hashes",)

    def __init__(self, local_hashes: Sequence[int]) -> None:
        self._local_hashes = local_hashes

    def __len__(self) -> int:
        return len(self._local_hashes)

    def __iter__(self) -> Iterator[int]:
        parent = None
        for start in range(0, len(self._local_hashes), _PIECE_BLOCKS):
            piece = sequence_hashes(self._local_hashes[start : start + _PIECE_BLOCKS], parent)
            yield from piece
            parent = piece[-1]

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            return sequence_hashes(self._local_hashes)[at]
        return next(islice(self, range(len(self))[at], None))
