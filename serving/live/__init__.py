"""A server that is there already, as an engine: requests in tokens to an OpenAI-compatible API over HTTP.

    report = await run(live_graph("http://10.0.0.5:8000"), read_trace(path).with_vocabulary(range(1000, 32_000)))

`LiveEngine` asks `POST /v1/completions`, `find_server` which model there is to ask; `live_graph` is both, as something
that `serving.replay.run` opens.
"""

from pipeline.extras import brought_by

with brought_by("serve", by=__name__):
    from .client import Address
    from .engine import UNKNOWN_TOKEN, LiveEngine
    from .server import LiveServer, find_server, live_graph

__all__ = ["UNKNOWN_TOKEN", "Address", "LiveEngine", "LiveServer", "find_server", "live_graph"]
