"""SocketNetwork: links over the sockets of the operating system."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.rx import AnyIOScheduler

from ...loop import running_loop
from . import anyio_links, asyncio_links
from .asyncio_tls import listen_with_tls
from .links import Address, LinkHandler, Listener, Network
from .options import TcpOptions
from .tls import TlsContexts


class SocketNetwork(Network):
    """On asyncio transports, also those of uvloop, call connections themselves; on trio there are tasks between."""

    def __init__(self, scheduler: AnyIOScheduler, options: TcpOptions) -> None:
        self._scheduler = scheduler
        self._options = options
        self._tls = TlsContexts.of(options)

    async def dial(self, address: Address, handler: LinkHandler) -> None:
        context = None if address.path or self._tls is None else self._tls.caller
        name = None if context is None else address.host
        if _is_asyncio():
            await asyncio_links.dial(address, handler, context, name)
        else:
            await anyio_links.dial(self._scheduler, address, handler, context, name)

    async def listen(self, address: Address, accept: Callable[[], LinkHandler]) -> Listener:
        context = None if address.path or self._tls is None else self._tls.worker
        timeout_s = self._options.connect_timeout_s
        if _is_asyncio() and context is not None:
            return await listen_with_tls(self._scheduler, address, accept, context, timeout_s)
        if _is_asyncio():
            return await asyncio_links.listen(address, accept)
        return await anyio_links.listen(self._scheduler, address, accept, context, timeout_s)


def _is_asyncio() -> bool:
    return hasattr(running_loop(), "create_connection")
