"""Language models in this process, by torch and transformers. Importing this loads neither of them."""

from .loading import (
    Dtype,
    LoadedModel,
    LoadedText,
    LoadingProgress,
    ModelFiles,
    ReportProgress,
    load_model,
    load_text,
)

__all__ = [
    "Dtype",
    "LoadedModel",
    "LoadedText",
    "LoadingProgress",
    "ModelFiles",
    "ReportProgress",
    "load_model",
    "load_text",
]
