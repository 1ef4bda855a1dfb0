"""The two generation APIs: a request through its graph, and its answer to the client, streamed or whole."""

from .endpoint import CHAT, COMPLETIONS, NOT_IMPLEMENTED, Api, GenerationEndpoint

__all__ = ["CHAT", "COMPLETIONS", "NOT_IMPLEMENTED", "Api", "GenerationEndpoint"]
