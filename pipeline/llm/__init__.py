"""What knows tokens and is no record: block hashes, model folders, request tracking."""

from .block_hash import (
    SEED,
    HashedTokens,
    LocalHashes,
    block_hash_array,
    block_hashes,
    hash_seed,
    media_hashes,
    sequence_hashes,
)
from .model_folder import (
    architectural_context_length,
    card_from_folder,
    checked_file,
    read_object,
    wrong_file,
)
from .tracking import TRACKER, track_request, tracker_of

__all__ = [
    "SEED",
    "TRACKER",
    "HashedTokens",
    "LocalHashes",
    "architectural_context_length",
    "block_hash_array",
    "block_hashes",
    "card_from_folder",
    "checked_file",
    "hash_seed",
    "media_hashes",
    "read_object",
    "sequence_hashes",
    "track_request",
    "tracker_of",
    "wrong_file",
]
