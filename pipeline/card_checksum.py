"""Checksums of model cards and of the files they name. The one door of blake3.

Source: dynamo lib/llm/src/model_card.rs (mdcsum) and common/checked_file.rs.
"""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from .protocols.card import CheckedFile, ModelDeploymentCard


def card_checksum(card: ModelDeploymentCard) -> str:
    """64 hex digits that two cards share exactly if they are equal; kept in the card once computed."""
    if (known := card.mdc_sum) is not None:
        return known
    card.mdc_sum = checksum = blake3(card.checksum_content()).hexdigest()
    return checksum


def file_checksum(path: Path) -> str:
    """The file's content as `blake3:<64 hex digits>`. Reads the whole file; OSError as reading raises it."""
    hasher = blake3()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            hasher.update(piece)
    return f"blake3:{hasher.hexdigest()}"


def checked_file(path: Path) -> CheckedFile:
    """The file with its checksum and size."""
    return CheckedFile(str(path), file_checksum(path), path.stat().st_size)
