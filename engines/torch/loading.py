"""Load a causal language model and its text files, from a folder or a GGUF file. The one door of transformers.

    ModelFiles(path) ──► load_text     tokenizer, chat template, end tokens: seconds
                     └─► load_model    the model in evaluation mode on its device: seconds to minutes

Both block, and belong in a thread. Nothing is downloaded and no code of a model folder is run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import RLock
from typing import Any, Literal, Self, get_args

from attrs import field, frozen

from pipeline import InvalidArgument, PenstockError
from pipeline.errors import BackendUnknown
from pipeline.extras import brought_by

_log = logging.getLogger(__name__)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Type of the weights and of the cache; auto is float32 on a CPU and the model's own elsewhere."""

_NEEDED_BY = "TorchEngine"


@frozen
class LoadingProgress:
    """How far a model is loaded."""

    step: str
    """What is done now: reading, converting or loading weights."""
    done: int = 0
    """Tensors that this step has done."""
    total: int = 0
    """Tensors of this step; 0 while it is not known."""


ReportProgress = Callable[[LoadingProgress], object]
"""Called in the loading thread, at least once for each tensor. A PenstockError that it raises ends the loading."""


def no_report(progress: LoadingProgress) -> None:
    """Report nothing."""


@frozen
class ModelFiles:
    """Where a model lies: a folder as Hugging Face lays it out, or one GGUF file."""

    path: Path = field(converter=Path)

    @property
    def is_gguf(self) -> bool:
        """Whether it is one GGUF file, with weights, tokenizer and chat template in it."""
        return self.path.suffix == ".gguf"

    @property
    def name(self) -> str:
        """Name of the model unless it is given another: that of the folder, or of the file without its ending."""
        path = self.path.resolve()
        return path.stem if self.is_gguf else path.name

    def check(self) -> None:
        """Raise InvalidArgument unless there is such a file or folder. Reads nothing."""
        if self.is_gguf and not self.path.is_file():
            raise InvalidArgument(f"{self.path}: there is no such file", field="model_path")
        if not self.is_gguf and not self.path.is_dir():
            text = f"{self.path} is neither a model folder nor a .gguf file"
            raise InvalidArgument(text, field="model_path")

    @property
    def place(self) -> tuple[str, dict[str, Any]]:
        """The arguments of `from_pretrained`; they keep it off every network."""
        offline = {"local_files_only": True, "trust_remote_code": False}
        if self.is_gguf:
            return str(self.path.parent), {"gguf_file": self.path.name, **offline}
        return str(self.path), offline


@frozen
class LoadedModel:
    """A model that is ready to compute."""

    model: Any = field(repr=False)
    """A `PreTrainedModel` of transformers in evaluation mode, on its device and in its dtype."""
    name: str
    eos_token_ids: tuple[int, ...] = ()
    """Token ids that end an answer, by the model's generation configuration."""


@frozen
class LoadedText:
    """The text side of a model in a GGUF file."""

    tokenizer: Any = field(repr=False)
    """A `tokenizers.Tokenizer`."""
    chat_template: str | None = field(repr=False)
    """Jinja source; None for a model without one."""
    special_tokens: Mapping[str, str]
    """Texts of special tokens by name, `bos_token` and `eos_token`, for the template."""
    eos_token_ids: tuple[int, ...]
    """Token ids that end an answer."""
    context_length: int | None
    """Tokens that a prompt and its answer may have together; None where the file names no length."""


def load_text(files: ModelFiles) -> LoadedText:
    """Return the tokenizer and chat template of a GGUF file.

    Raise InvalidArgument that names `model_path` if they cannot be read, and ModuleNotFoundError without the extra.
    """
    files.check()
    where, arguments = files.place
    with _loading(files, no_report):
        tokenizer = _transformers(files).AutoTokenizer.from_pretrained(where, use_fast=True, **arguments)
        config = _config(files)
        texts = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token")}
        ends = [*_ids(config.eos_token_id), *_ids(tokenizer.eos_token_id)]
        return LoadedText(
            tokenizer=tokenizer.backend_tokenizer,
            chat_template=tokenizer.chat_template,
            special_tokens={name: text for name, text in texts.items() if text is not None},
            eos_token_ids=tuple(dict.fromkeys(ends)),
            context_length=getattr(config.get_text_config(), "max_position_embeddings", None),
        )


def load_model(
    files: ModelFiles,
    *,
    device: str = "auto",
    dtype: Dtype = "auto",
    report: ReportProgress = no_report,
) -> LoadedModel:
    """Return the model on its device. Blocks for seconds to minutes, with calls of `report` in between.

    `device` is what torch calls it; auto is the first CUDA device, else the CPU. One load runs at a time in a process,
    and shows no progress bars of transformers, nor do other threads that use transformers meanwhile.

    Raise InvalidArgument that names `model_path`, `device` or `dtype` for what cannot be loaded, BackendUnknown if
    memory runs out, ModuleNotFoundError without the extra, and what `report` raises of this project's errors.
    """
    files.check()
    check_dtype(dtype)
    with _loading(files, report):
        transformers, where = _transformers(files), _device(device)
        report(LoadingProgress("reading"))
        config = _config(files)
        place, arguments = files.place
        wanted = "float32" if dtype == "auto" and where == "cpu" else dtype
        found = transformers.AutoModelForCausalLM.from_pretrained(
            place, config=config, dtype=wanted, attn_implementation="sdpa", **arguments
        )
        generation = getattr(found, "generation_config", None)
        ends = _ids(getattr(generation, "eos_token_id", None)) or _ids(getattr(config, "eos_token_id", None))
        return LoadedModel(found.to(where).eval(), files.name, ends)


def check_dtype(dtype: str) -> None:
    """Raise InvalidArgument unless it is one of `Dtype`."""
    if dtype not in get_args(Dtype):
        raise InvalidArgument(f"must be one of {', '.join(get_args(Dtype))}, got {dtype!r}", field="dtype")


def _ids(found: Any) -> tuple[int, ...]:
    """Return the token ids of a setting that is None, one id or a list."""
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


def _transformers(files: ModelFiles) -> Any:
    """Import transformers, and make sure of what it reads GGUF files with."""
    with brought_by("torch", by=_NEEDED_BY):
        for name in ("gguf", "accelerate") if files.is_gguf else ():
            if find_spec(name) is None:
                raise ModuleNotFoundError(name=name)
        import_module("torch")
        return import_module("transformers")


def _device(device: str) -> str:
    """Return the device to compute on. Raise InvalidArgument for one that torch does not have here."""
    torch = import_module("torch")
    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except Exception as error:  # an AssertionError where torch is built without CUDA
        raise InvalidArgument(f"{device!r} cannot be used: {_first_line(error)}", field="device") from error
    return device


def _config(files: ModelFiles) -> Any:
    """Return the configuration. A GGUF file takes seconds to read, so that of the last ones is kept."""
    stat = files.path.stat()
    return _config_of(files, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=2)
def _config_of(files: ModelFiles, _mtime_ns: int, _size: int) -> Any:
    where, arguments = files.place
    return import_module("transformers").AutoConfig.from_pretrained(where, **arguments)


_LOADING = RLock()
"""Held while the progress bars of transformers, which are of the whole process, are replaced."""


@contextmanager
def _loading(files: ModelFiles, report: ReportProgress) -> Iterator[None]:
    """Report instead of drawing bars, and raise the errors of the files as those of this project."""
    try:
        _transformers(files)
        with _LOADING, _reporting(report):
            yield
    except (PenstockError, ModuleNotFoundError):
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            raise BackendUnknown(f"there is not enough memory for {files.path}: {_first_line(error)}") from error
        text = f"{files.path} cannot be loaded: {type(error).__name__}: {_first_line(error)}"
        raise InvalidArgument(text, field="model_path") from error


@contextmanager
def _reporting(report: ReportProgress) -> Iterator[None]:
    """Replace the progress bars of transformers by reports, and keep its advice out of the terminal."""
    logs: Any = import_module("transformers.utils.logging")
    gguf: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    bar, verbosity = getattr(gguf, "tqdm", None), logs.get_verbosity()
    before = logs.set_tqdm_hook(lambda _, given, named: _Steps(report, *given, **named))
    if bar is not None:  # imported by name, out of the hook's reach
        gguf.tqdm = lambda *given, **named: _Steps(report, *given, **named)
    logs.set_verbosity_error()
    try:
        yield
    finally:
        logs.set_verbosity(verbosity)
        logs.set_tqdm_hook(before)
        if bar is not None:
            gguf.tqdm = bar


class _Steps:
    """Stands in for a tqdm bar: it reports each step, and draws nothing."""

    def __init__(self, report: ReportProgress, steps: Any = (), *, desc: str = "", total: Any = None, **_: Any) -> None:
        self._report, self._items, self._done = report, steps, 0
        self._step = "converting" if desc.startswith("Converting") else "loading weights"
        self._total = int(total if total is not None else len(steps) if hasattr(steps, "__len__") else 0)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()

    def update(self, n: float | None = 1) -> None:
        self._done += int(n or 0)
        self._report(LoadingProgress(self._step, self._done, self._total))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to close."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a function that does nothing, for what else a bar can be given: a text, a postfix."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
