"""Whether a model computes the same with its KV in blocks as alone: checked once, when its engine starts.

Each model of transformers takes positions, masks and caches in a way of its own. One whose way is not that of `Forward`
would fail with every request, or answer with wrong tokens. So two short sequences are computed in parts and side by
side, and compared with one pass over each. What shows only in long sequences is not found.
"""

from __future__ import annotations

import logging
from typing import Any

from pipeline import InvalidArgument

from .forward import Forward
from .kv_store import KvLayout, KvStore
from .library import torch
from .order import Order
from .planning import Chunk
from .sampling import Limits, Sampling
from .slots import Choice

_log = logging.getLogger(__name__)

_LONG, _SHORT, _PART = 7, 4, 3
"""Tokens of the two sequences, and of the parts that are computed before their last token."""
_EXACT, _ROUGH = 0.01, 0.5
"""Most that a logit may differ by, as a share of the logits' standard deviation: in float32, and in other types."""


def checked_layout(model: Any) -> KvLayout:
    """Return the layout of the model's KV. Raise InvalidArgument that names `model_path` for one that cannot be served.

    In types less precise than float32 a difference is a warning only: where two values are nearly equal, a mixture of
    experts may choose others.
    """
    try:
        layout = KvLayout.of(model)
        with torch.inference_mode():
            differs = _difference(model, layout)
    except (InvalidArgument, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        text = f"{type(model).__name__} cannot be computed in parts: {type(error).__name__}: {error}"
        raise InvalidArgument(text, field="model_path") from error
    text = f"in parts {type(model).__name__} computes other logits, by {differs:.3g} of their standard deviation"
    if differs > _EXACT and layout.dtype == "float32":
        raise InvalidArgument(text, field="model_path")
    if differs > _ROUGH:
        _log.warning("%s: its answers may be wrong", text)
    return layout


def _difference(model: Any, layout: KvLayout) -> float:
    """Return the largest difference of a logit, as a share of the standard deviation of those of its sequence."""
    device, vocabulary = next(model.parameters()).device, model.config.get_text_config().vocab_size
    long, short = (_choice([(place * 97 + count) % vocabulary for place in range(count)]) for count in (_LONG, _SHORT))
    inputs = [torch.tensor([choice.tokens], dtype=torch.long, device=device) for choice in (long, short)]
    alone = torch.stack([model(input_ids=ids, use_cache=False).logits[0, -1].float() for ids in inputs])
    forward = Forward(model, KvStore(layout, 3, _SHORT, device))
    forward.logits([Chunk(long, 0, _PART, (0, 1)), Chunk(short, 0, _PART, (2,))])
    forward.logits([Chunk(long, _PART, _PART, (0, 1))])
    made = forward.logits([Chunk(long, _LONG - 1, 1, (0, 1)), Chunk(short, _SHORT - 1, 1, (2,))]).float()
    return float(((made - alone).abs().amax(-1) / alone.std(-1)).max())


def _choice(tokens: list[int]) -> Choice:
    order = Order(prompt=tokens, choices=1, sampling=Sampling(), limits=Limits(max_tokens=1), hash_seed=0)
    return Choice(order=order, index=0, receive=lambda _: None)
