"""The one door of torch, and of transformers for what computes. Importing it loads both.

They are Any to the type checkers: neither is there in most environments, and torch's own types take minutes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pipeline.extras import brought_by

with brought_by("torch", by="TorchEngine"):
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")


def peft() -> Any:
    """Import peft and return it."""
    return import_module("peft")
