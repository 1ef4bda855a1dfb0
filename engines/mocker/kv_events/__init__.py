"""KV events of the mock engine, and their publishing over ZMQ."""

from .events import EngineEvent, ReplayRing, encode_batch, published, replay_answer
from .zmq import EventFeed, ZmqPublisher

__all__ = ["EngineEvent", "EventFeed", "ReplayRing", "ZmqPublisher", "encode_batch", "published", "replay_answer"]
