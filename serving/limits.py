"""HttpLimits: what one request, one connection and one client may take of the server."""

from __future__ import annotations

from attrs import frozen

from pipeline.protocols.settings import setting


@frozen
class HttpLimits:
    """Bounds that the HTTP side holds; 0 turns a bound off."""

    max_metadata_entries: int = setting(64, "Headers `x-dynamo-meta-*` of a request; more are refused with 431.")
    max_metadata_bytes: int = setting(65_536, "Bytes in the names and values of these headers.")
    max_json_values: int = setting(1_310_720, "Values in the JSON of a body, token ids above all.")
    max_json_parts: int = setting(
        131_072, "Strings, lists and objects in the JSON of a body; the names of fields are strings too."
    )
    max_json_depth: int = setting(100, "Levels of lists and objects in the JSON of a body.")
    max_repaired_bytes: int = setting(1_048_576, "Bytes of a body of broken JSON up to which its repair is attempted.")
    parser_threads: int = setting(2, "Threads that parse long bodies.", minimum=1)
    tls_handshake_timeout_s: float = setting(
        10.0, "Seconds that a client has for its TLS handshake; its connection is cut then.", minimum=0.1
    )
