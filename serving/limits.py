"""HttpLimits: what one request, one connection and one client may take of the server."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipeline.settings import at_least, setting


@frozen
class HttpLimits:
    """Bounds that the HTTP side holds; 0 turns a bound off."""

    group: ClassVar[str] = "Limits"

    max_metadata_entries: int = setting(64, "Headers `x-dynamo-meta-*` of a request; more are refused with 431.")
    max_metadata_bytes: int = setting(65_536, "Bytes in the names and values of these headers.")
    max_json_values: int = setting(1_310_720, "Values in the JSON of a body, token ids above all.")
    max_json_parts: int = setting(
        131_072, "Strings, lists and objects in the JSON of a body; the names of fields are strings too."
    )
    max_json_depth: int = setting(100, "Levels of lists and objects in the JSON of a body.")
    max_repaired_bytes: int = setting(1_048_576, "Bytes of a body of broken JSON up to which its repair is attempted.")
    parser_threads: int = setting(2, "Threads that parse long bodies.", at_least(1))
    tls_handshake_timeout_s: float = setting(
        10.0, "Seconds that a client has for its TLS handshake; its connection is cut then.", at_least(0.1)
    )
    max_connections: int = setting(10_000, "Connections open at a time; the next ones get 503.")
    max_connections_per_client: int = setting(
        2_000, "The same of one address, or of one network of 64 bits with IPv6; the next ones get 429."
    )
    max_requests_per_connection: int = setting(10_000, "Requests of a connection; the last answer closes it.")
    max_header_bytes: int = setting(
        131_072, "Bytes of the request line and all headers, and of what stands between the data of chunks; else 431."
    )
    max_headers: int = setting(256, "Headers of a request; else 431.")
    max_url_bytes: int = setting(8_192, "Bytes of a request's URL; else 414.")
    head_timeout_s: float = setting(
        20.0,
        "Seconds until the headers of a request are complete, from its first byte or the connection's start; else 408.",
    )
    body_timeout_s: float = setting(
        30.0, "Seconds in which a body must end, or bring what `min_body_bytes_per_s` wants; else 408."
    )
    min_body_bytes_per_s: int = setting(1_000, "Bytes a second that a body must bring, as a mean of that time.")
    keep_alive_timeout_s: float = setting(75.0, "Seconds that a connection may be idle between requests.")
    write_timeout_s: float = setting(
        120.0, "Seconds in which a client must take something of the answer that waits for it; else it is cut."
    )
    max_body_bytes_in_flight: int = setting(
        1_073_741_824, "Bytes of the bodies of all open requests; the next ones get 503."
    )
    max_open_requests: int = setting(
        10_000, "Requests open at a time, bodies that are still read included; more are refused as overload."
    )
    max_open_requests_per_client: int = setting(5_000, "Of these, requests of one client; more are refused with 429.")
    silence_timeout_s: float = setting(
        1800.0, "Seconds without an item of its engine after which a request fails, at most a quarter later."
    )
    request_timeout_s: float = setting(
        86_400.0, "Seconds that a request may take as a whole; then it fails, with 504 before its first item."
    )
    max_whole_answer_bytes: int = setting(
        268_435_456, "Bytes that an answer which is not streamed may take in memory; a longer one fails with 400."
    )
