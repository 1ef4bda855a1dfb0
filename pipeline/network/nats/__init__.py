"""NATS as discovery, event plane and object store of a deployment. asyncio only; needs nats-server 2.11 with JetStream.

One `NatsConnection` serves `NatsStore`, `NatsEventPlane` and `NatsObjects`. Tokens never pass through it.
"""

from pipeline.extras import brought_by

with brought_by("nats", by=__name__):
    from .broker_connection import NatsConnection
    from .events import NatsEventPlane
    from .kv_store import NatsStore
    from .object_bucket import NatsObjects

from .options import NatsOptions, parse_addresses, parse_replicas
from .server_process import NatsServer, NatsServerOptions, nats_server_program

__all__ = [
    "NatsConnection",
    "NatsEventPlane",
    "NatsObjects",
    "NatsOptions",
    "NatsServer",
    "NatsServerOptions",
    "NatsStore",
    "nats_server_program",
    "parse_addresses",
    "parse_replicas",
]
