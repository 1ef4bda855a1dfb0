"""The request plane over TCP and unix sockets: tokens go from process to process, and through no broker.

`pipeline.network.tcp.plane` has the plane; `links` what carries its bytes, which tests replace.
"""

from .links import Address, Link, LinkHandler, Listener, Network
from .options import TcpOptions
from .plane import TcpRequestPlane

__all__ = ["Address", "Link", "LinkHandler", "Listener", "Network", "TcpOptions", "TcpRequestPlane"]
