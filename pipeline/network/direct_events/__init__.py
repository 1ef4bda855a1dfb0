"""Events between processes without a broker: each process serves the events of its publishers over the request plane.

    publish ──► subscribers of this process
           └──► a bounded queue for each process that reads the channel ──► stream of the request plane
    subscribe ──► the store: which processes publish there ──► one stream to each, opened again when it breaks

A channel is one scope and topic. Nothing here has a socket of its own.
"""

from .channels import DirectEventLimits as DirectEventLimits
from .direct_plane import DirectEventPlane

__all__ = ["DirectEventPlane"]
