"""Engines whose work is done by a server over HTTP: discovery, requests in tokens, KV events, load, hand-over.

What is imported under its own name again is for sibling packages; users take the names of `__all__`.
"""

from pipeline.extras import brought_by

with brought_by("upstream", by=__name__):
    from .client import Address as Address
    from .client import Client as Client
    from .client import Transport as Transport
    from .client import network as network
    from .connectors import (
        CONNECTORS,
        KvConnector,
        LmCache,
        MooncakePush,
        NixlPull,
        PrefillServer,
        Taken,
        kv_connector,
    )
    from .errors import of_frame as of_frame
    from .errors import of_status as of_status
    from .facts import EventSource, ServerFacts
    from .http_exchange import Exchange as Exchange
    from .http_exchange import fetched as fetched
    from .kv_events import KvEventFeeds, KvEventFollower
    from .leases import Lease, Leases
    from .openai import IdForm, OpenAIUpstream
    from .sglang import SglangUpstream
    from .text_answer import UNKNOWN_TOKEN as UNKNOWN_TOKEN
    from .token_answer import TokenAnswer as TokenAnswer
    from .upstream import Upstream
    from .upstream import authorization as authorization
    from .vllm import VllmUpstream
    from .vllm_disaggregated import VllmDecode, VllmPrefill
    from .vllm_logprobs import of_completion as of_completion
    from .vllm_logprobs import of_generate as of_generate
    from .vllm_text import VllmText

__all__ = [
    "CONNECTORS",
    "EventSource",
    "IdForm",
    "KvConnector",
    "KvEventFeeds",
    "KvEventFollower",
    "Lease",
    "Leases",
    "LmCache",
    "MooncakePush",
    "NixlPull",
    "OpenAIUpstream",
    "PrefillServer",
    "ServerFacts",
    "SglangUpstream",
    "Taken",
    "Upstream",
    "VllmDecode",
    "VllmPrefill",
    "VllmText",
    "VllmUpstream",
    "kv_connector",
]
