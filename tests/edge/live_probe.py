"""Requests `/live` from a server every 20 ms and records how long each answer takes.

    python -I -S live_probe.py HOST PORT PID

A program of its own, so that no work of the test delays it. It ends with its input, and prints a JSON list of triples:
when a request was sent, the seconds until its answer was complete, both by CLOCK_MONOTONIC, and the CPU time that the
server, process PID, used meanwhile. A request that was not answered counts until the end.
"""

import json
import select
import socket
import sys
import time

EVERY_S = 0.02
REQUEST = b"GET /live HTTP/1.1\r\nhost: probe\r\n\r\n"


def connect(host: str, port: int) -> socket.socket:
    while True:
        try:
            made = socket.create_connection((host, port), timeout=60)
        except OSError:
            time.sleep(EVERY_S)
            continue
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made


def is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return len(body) >= int(length.partition(b":")[2])


def cpu_clock_of(pid: int) -> int:
    """Return the clock of the CPU time of a process, all its threads together: clock_getcpuclockid(3) of Linux."""
    return ~pid << 3 | 2


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    cpu_clock = cpu_clock_of(int(sys.argv[3]))
    samples: list[tuple[float, float, float]] = []
    connection = connect(host, port)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    ended = False
    while not ended:
        cpu_s, sent = time.clock_gettime(cpu_clock), time.monotonic()
        answer = b""
        try:
            connection.sendall(REQUEST)
            while not is_whole(answer):
                readable, _, _ = select.select([connection, sys.stdin], [], [])
                if connection in readable:
                    part = connection.recv(65536)
                    if not part:
                        raise ConnectionResetError
                    answer += part
                elif sys.stdin in readable:
                    ended = True
                    break
        except OSError:  # the server may close a connection between two requests
            connection.close()
            connection = connect(host, port)
            continue
        took = time.monotonic() - sent
        samples.append((sent, took, time.clock_gettime(cpu_clock) - cpu_s))
        if b"connection: close" in answer.lower():
            connection.close()
            connection = connect(host, port)
        readable, _, _ = select.select([sys.stdin], [], [], max(0.0, EVERY_S - took))
        ended = ended or bool(readable)
    sys.stdout.write(json.dumps(samples))


if __name__ == "__main__":
    main()
