"""Reports in a folder, each written whole or not at all, and found again if it is of the same settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from pipeline import InvalidArgument, codec

from ..secrets import NOT_SHOWN
from .report import Report


@frozen
class ReportsFolder:
    """A folder of JSON reports by their file names; it is made when the first one comes."""

    path: Path

    def find(self, name: str, settings: Mapping[str, Any], per_request: bool = False) -> Report | None:
        """The report of that name, if it is one of these settings, and has every request where that is asked.

        Where an argument of the engine is not shown, none is: what it stands for may have changed.
        """
        if NOT_SHOWN in settings.get("engine_args", {}).values():
            return None
        try:
            report = Report.from_json((self.path / name).read_bytes())
        except (OSError, InvalidArgument):
            return None
        is_whole = report.per_request is not None or not per_request
        return report if is_whole and report.settings == _as_read(settings) else None

    def put(self, name: str, report: bytes) -> None:
        """Writes it in the place of what is there. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        unfinished = self.path / f"{name}.unfinished"
        unfinished.write_bytes(report)
        os.replace(unfinished, self.path / name)


def _as_read(settings: Mapping[str, Any]) -> dict[str, Any]:
    return codec.from_json(codec.to_json(dict(settings)), dict[str, Any])
