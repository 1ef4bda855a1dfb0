"""Traces of requests: their formats, reading them, and synthetic ones."""

from .dynamo import DynamoRecords
from .hashes import KeptHashes
from .mooncake import AGENTIC_FIELDS, read_row
from .reading import first_requests, read_trace
from .synthetic import SyntheticLoad
from .trace import Prompt, Session, Trace, TraceFormat, Turn, hash_tokens

__all__ = [
    "AGENTIC_FIELDS",
    "DynamoRecords",
    "KeptHashes",
    "Prompt",
    "Session",
    "SyntheticLoad",
    "Trace",
    "TraceFormat",
    "Turn",
    "first_requests",
    "hash_tokens",
    "read_row",
    "read_trace",
]
