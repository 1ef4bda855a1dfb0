"""ByteTokenizer: one token per byte of UTF-8, built in; for echoes, tests and examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .text_cuts import PIECE_CHARACTERS
from .text_decoder import PieceDecoder, Pieces, TextDecoder
from .tokenizer import checked_unicode, first_outside, unknown_token

_BYTES = 256
_SPECIAL = ("<bos>", "<eos>")


class ByteTokenizer:
    """Ids 0 to 255 are bytes, then come `<bos>` and `<eos>`. Text never encodes to the special ones."""

    bos_token_id = _BYTES
    eos_token_id = _BYTES + 1

    def __init__(self) -> None:
        self._pieces = {skip: Pieces(self._shown_bytes if skip else self.token_bytes) for skip in (True, False)}

    def encode(self, text: str) -> list[int]:
        return list(checked_unicode(text))

    def pieces(self, text: str, unbroken_max: int = 0) -> Iterator[str]:
        """See `CutsText`. It may be cut anywhere."""
        return (text[at : at + PIECE_CHARACTERS] for at in range(0, len(text), PIECE_CHARACTERS))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = self._shown_bytes if skip_special_tokens else self.token_bytes
        return b"".join(map(shown, token_ids)).decode(errors="replace")

    def decoder(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> TextDecoder:
        return PieceDecoder(self._pieces[skip_special_tokens], prompt)

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < _BYTES:
            return bytes([token_id])
        if _BYTES <= token_id < _BYTES + len(_SPECIAL):
            return _SPECIAL[token_id - _BYTES].encode()
        raise unknown_token(token_id)

    def token_id(self, token: str) -> int | None:
        return _BYTES + _SPECIAL.index(token) if token in _SPECIAL else None

    def first_unknown(self, token_ids: Sequence[int]) -> int | None:
        return first_outside(range(_BYTES + len(_SPECIAL)), token_ids)

    def _shown_bytes(self, token_id: int) -> bytes:
        data = self.token_bytes(token_id)
        return data if token_id < _BYTES else b""
