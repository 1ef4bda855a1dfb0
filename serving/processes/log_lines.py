"""LogLines: what child processes print, as lines that show whose they are.

worker-1   | loaded in 3.1 s
frontend-1 | Serving llama at http://127.0.0.1:8000
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TextIO

from anyio import CapacityLimiter, to_thread

from ..terminal import printable

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""Codes of the terminal for the names, in turn."""


class LogLines:
    """Writes lines to a stream, each with the name of its process in front.

    `names` are those to come; `is_coloured` gives each a colour of its own. With `is_json` lines are JSON objects: an
    object gets the name as its first entry, `process`, and a line of text becomes the `message` of one.
    """

    def __init__(
        self, stream: TextIO, names: Sequence[str], *, is_coloured: bool = False, is_json: bool = False
    ) -> None:
        self._stream, self._is_json = stream, is_json
        width = max(map(len, names), default=0)
        self._prefixes = {name: f"{name:{width}} | " for name in names}
        if is_coloured:
            for number, name in enumerate(names):
                self._prefixes[name] = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{self._prefixes[name]}\x1b[0m"
        self._limiter = CapacityLimiter(1)

    def formed(self, name: str, line: str) -> str:
        """Return the line as it is written, without its end."""
        if not self._is_json:
            return f"{self._prefixes.get(name, f'{name} | ')}{printable(line)}"
        try:
            if isinstance(entry := json.loads(line), dict):
                return json.dumps({"process": name} | entry, allow_nan=False)
        except (ValueError, RecursionError):  # no JSON, or nested too deeply to be read
            pass
        return json.dumps({"process": name, "message": line})

    async def write(self, name: str, lines: Sequence[str]) -> None:
        """Write the lines together, not among those of other calls; in a thread, for a reader may be slow."""
        text = "".join(f"{self.formed(name, line)}\n" for line in lines)
        await to_thread.run_sync(self._write, text, limiter=self._limiter, abandon_on_cancel=True)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # nothing reads the stream any more, or it is closed
            pass
