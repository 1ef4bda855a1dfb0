"""Torch engines of a deployment: their arguments, and the weights that they share.

--engine torch --model-path DIR --engine-arg dtype=bfloat16
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from attrs import define, field, fields, frozen

from engines import DisaggregationMode
from engines.torch import (
    LoadedModel,
    ModelFiles,
    PeerHandover,
    ReportProgress,
    TorchEngine,
    TorchSettings,
    check_dtype,
    load_model,
)
from pipeline import InvalidArgument
from pipeline.settings import setting


@frozen(kw_only=True)
class TorchArgs(TorchSettings):
    """The arguments of a torch engine: its settings, and how its model is loaded."""

    device: str = setting("auto", "Device as torch calls it; auto is the first CUDA device, else the CPU.")
    dtype: str = setting("auto", "Type of the weights: float32, bfloat16, float16; auto is float32 on a CPU.")

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_dtype(self.dtype)

    @property
    def settings(self) -> TorchSettings:
        """The settings of the engine itself."""
        own: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(TorchSettings)}
        return TorchSettings(**own)


@define
class SharedModel:
    """The weights that the engines of a deployment share: loaded by the first that starts, the others wait for it.

    A model that changes as it computes, because its positions are scaled by the length at hand, is not shared.
    """

    files: ModelFiles
    device: str
    dtype: Any
    _loaded: LoadedModel | None = None
    _lock: Lock = field(factory=Lock, init=False)

    def load(self, report: ReportProgress) -> LoadedModel:
        """Return the model, loaded once. Raise as `load_model`; the next call then tries again."""
        with self._lock:
            if self._loaded is not None:
                return self._loaded
            loaded = load_model(self.files, device=self.device, dtype=self.dtype, report=report)
            if not _changes(loaded.model.config.get_text_config()):
                self._loaded = loaded
            return loaded


def _changes(config: Any) -> bool:
    """Whether computing changes the model: several threads must not compute with one then."""
    scaling = getattr(config, "rope_parameters", None) or {}
    return "dynamic" in (kind := str(scaling.get("rope_type", ""))) or kind == "longrope"


def shared_model(path: Path | None, args: TorchArgs) -> SharedModel:
    """Return the weights at a path, not loaded. Raise InvalidArgument if there is no path."""
    if path is None:
        raise InvalidArgument("a torch engine needs a model: --model-path, or --model smollm2")
    return SharedModel(ModelFiles(path), args.device, args.dtype)


def torch_args(arguments: dict[str, Any], mode: DisaggregationMode) -> TorchArgs:
    """Return the checked arguments of a worker of this mode. Raise InvalidArgument."""
    if mode is DisaggregationMode.ENCODE:
        raise InvalidArgument("a torch engine cannot be an encode worker")
    given: dict[str, Any] = {"role": mode.value} | arguments
    args = TorchArgs(**given)
    if args.role != mode.value:
        raise InvalidArgument(f"must be {mode}, the mode of its worker", field="role")
    return args


def torch_engine(args: TorchArgs, model: SharedModel, report: ReportProgress, lora: Mapping[str, Path]) -> TorchEngine:
    """Return a torch engine, not started. Prefill and decode workers hand prompts over by the request plane.

    `lora` are folders of adapters by name.
    """
    handover = None if args.role == "aggregated" else PeerHandover(prefills=args.role == "prefill")
    return TorchEngine(model.load, args.settings, handover=handover, adapters=lora, on_progress=report)
