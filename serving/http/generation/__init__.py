"""The two generation APIs: a request through its graph, and its answer to the client, streamed or whole.

GenerationEndpoint: read the request, refuse or admit it, explain what failed
  └─► Generation: read the graph; end early for a client that left and a limit of time
        └─► StreamedReply or WholeReply: items as frames, or as one body, on their way to the client
"""

from .endpoint import CHAT, COMPLETIONS, NOT_IMPLEMENTED, Api, GenerationEndpoint
from .generation import ON_GONE

__all__ = ["CHAT", "COMPLETIONS", "NOT_IMPLEMENTED", "ON_GONE", "Api", "GenerationEndpoint"]
