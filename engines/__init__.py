"""What ends a graph: engines that answer requests in tokens."""

from .echo import EchoEngine

__all__ = ["EchoEngine"]
