"""A program of ours whose engines are announced at another address than the one it listens on: that of a proxy.

`python -m tests.processes.announced_elsewhere HOST PORT ARGUMENTS...` listens on 127.0.0.1 and the port, and announces
the host and the port, without a unix socket.
"""

from __future__ import annotations

import sys
from typing import Any

from attrs import evolve

from pipeline.network.tcp import TcpOptions, TcpRequestPlane
from serving.__main__ import main

_, host, port, *arguments = sys.argv
_init = TcpRequestPlane.__init__


def _announced_elsewhere(
    self: TcpRequestPlane, scheduler: Any, options: TcpOptions | None = None, *others: Any, **named: Any
) -> None:
    changed = evolve(
        options or TcpOptions(), host="127.0.0.1", port=int(port), announced_host=host, has_unix_socket=False
    )
    _init(self, scheduler, changed, *others, **named)


if __name__ == "__main__":
    TcpRequestPlane.__init__ = _announced_elsewhere  # type: ignore[method-assign]
    sys.argv = ["penstock", *arguments]
    main()
