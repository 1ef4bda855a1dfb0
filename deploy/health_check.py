"""Exit with 0 while the program in this container is healthy, else with 1: the health check of the image.

A worker shows its state on the port of DYN_SYSTEM_PORT, a front end on that of PENSTOCK_PORT.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request

TIMEOUT_S = 3.0


def main() -> int:
    """Return the exit code, with the reason on standard error."""
    status_port = os.environ.get("DYN_SYSTEM_PORT", "").strip()
    if status_port and not status_port.startswith("-"):
        url = f"http://127.0.0.1:{status_port}/health"
    else:
        scheme = "https" if os.environ.get("DYN_TLS_CERT_PATH", "").strip() else "http"
        url = f"{scheme}://127.0.0.1:{os.environ.get('PENSTOCK_PORT', '').strip() or 8000}/health"
    own = ssl.create_default_context()
    own.check_hostname, own.verify_mode = False, ssl.CERT_NONE  # the certificate names the address of clients
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=own):
            return 0
    except OSError as error:
        sys.stderr.write(f"{url}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
