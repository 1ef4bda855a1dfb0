"""The model of the text stages, from a folder or from one GGUF file."""

from __future__ import annotations

from pathlib import Path

from engines.torch import ModelFiles, load_text
from operators import Model
from operators.text import ChatTemplate, HuggingFaceTokenizer
from pipeline import InvalidArgument
from pipeline.errors import CodecError


def is_gguf(path: Path | None) -> bool:
    """Whether the model is one file, which takes seconds to read."""
    return path is not None and ModelFiles(path).is_gguf


def model_at(path: Path, name: str | None = None) -> Model:
    """Return the model at a path, named as the folder or the file unless `name` is given.

    Reading a GGUF file blocks for seconds, and needs the extra torch. Raise InvalidArgument that names the file for
    what is no model.
    """
    if not is_gguf(path):
        return Model.from_folder(path, name)
    files = ModelFiles(path)
    text = load_text(files)
    template = text.chat_template
    try:
        chat = None if template is None else ChatTemplate(template, tokens=text.special_tokens)
    except CodecError as error:
        raise InvalidArgument(f"{path}: {error}", field="model_path") from error
    return Model(
        name=name or files.name,
        tokenizer=HuggingFaceTokenizer(text.tokenizer),
        chat_template=chat,
        eos_token_ids=text.eos_token_ids,
        context_length=text.context_length,
    )
