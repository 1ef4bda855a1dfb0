"""tracking_hashes: by what names the blocks of a prompt are counted as active.

Source: dynamo lib/kv-router/src/scheduling/config.rs, compute_seq_hashes_for_tracking. Other than there the random
numbers come from outside, and keyed hashes are not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pipeline.block_hash import sequence_hashes

from .config_settings import RequestSettings


def tracking_hashes(local_hashes: Sequence[int], settings: RequestSettings, rng: Random) -> list[int]:
    """The sequence hashes of the prompt's complete blocks, from their local ones.

    None at all where active blocks are not tracked. Where a prompt's blocks cannot be those of another request (reuse
    is not assumed) each gets a name of its own.
    """
    if not settings.track_active_blocks:
        return []
    if not settings.assume_kv_reuse:
        return [rng.getrandbits(64) for _ in local_hashes]
    return sequence_hashes(local_hashes)
