"""Figures a launcher derives for its workers: the size of a token's cache, and when each one starts."""

from __future__ import annotations

from pipeline import InvalidArgument

DTYPE_BYTES = {
    **dict.fromkeys(("auto", "float16", "fp16", "half", "bfloat16", "bf16"), 2),
    **dict.fromkeys(("float8", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"), 1),
    **dict.fromkeys(("float32", "fp32", "float"), 4),
}
"""Bytes of one number by the name of its type; `auto` is the usual one of models."""

STAGGER_FROM_WORKERS, STAGGER_S = 32, 0.1
STAGGER_MORE_ABOVE_WORKERS, STAGGER_MORE_S = 128, 0.2


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: str = "auto") -> int:
    """Bytes the keys and values of one token take. Raises InvalidArgument for a type it does not know."""
    size = DTYPE_BYTES.get(dtype.lower())
    if size is None:
        raise InvalidArgument(f"must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}", field="kv_cache_dtype")
    return layers * 2 * kv_heads * head_dim * size


def stagger_delay_s(workers: int, configured_s: float = -1.0) -> float:
    """How long to wait between the starts of two workers; a negative setting leaves it to their number."""
    if configured_s >= 0:
        return configured_s
    if workers < STAGGER_FROM_WORKERS:
        return 0.0
    return STAGGER_S if workers <= STAGGER_MORE_ABOVE_WORKERS else STAGGER_MORE_S
