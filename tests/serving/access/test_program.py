"""The program with keys, certificates and an admin address; real processes."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from serving.access import hash_of, new_key
from tests.serving.access.worlds import Certificates
from tests.serving.worlds import served_urls

pytestmark = pytest.mark.slow  # each starts a program

KEY = "penstock-0123456789abcdefghijklmnopqrstuv"
COMMAND = [sys.executable, "-m", "serving"]


def run(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    return subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, env=os.environ | variables, timeout=30, check=False
    )


BODY = json.dumps({"model": "echo", "messages": [{"role": "user", "content": "hello"}]}).encode()


def fetch(
    url: str, key: str | None = None, body: bytes | None = None, context: ssl.SSLContext | None = None
) -> tuple[int, bytes]:
    """Status and body of the answer."""
    headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def ended(process: subprocess.Popen[str]) -> str:
    """What the program wrote to standard error, after an orderly end."""
    process.terminate()
    _, errors = process.communicate(timeout=15)
    assert process.returncode == 0
    return str(errors)


def test_a_key_is_in_nothing_that_the_program_writes() -> None:
    """Not in the log of every request at the lowest level, in errors, in metrics, nor in the list of processes."""
    options = ("--access-log", "--log-level", "debug", "--admin-port", "0")
    with served_urls(*options, variables={"PENSTOCK_API_KEY": KEY}) as (process, urls):
        url, admin = urls
        for key in (KEY, KEY + "wrong", "wrong" * 10):
            fetch(f"{url}/v1/chat/completions", key, BODY)
            fetch(f"{url}/v1/chat/completions", key, b"{")
        assert fetch(f"{url}/v1/models", KEY)[0] == 200
        command_line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        metrics = fetch(f"{admin}/metrics")[1]
        written = ended(process)
    assert "401" in written
    assert not any(KEY in text for text in (written, command_line.decode(), metrics.decode()))


def test_the_admin_address_shows_what_the_public_one_does_not() -> None:
    with served_urls("--admin-port", "0") as (process, (url, admin)):
        assert fetch(f"{url}/v1/chat/completions", body=BODY)[0] == 200
        assert (fetch(f"{url}/metrics")[0], json.loads(fetch(f"{url}/health")[1])) == (404, {"status": "healthy"})
        assert b"dynamo_frontend_requests_total" in fetch(f"{admin}/metrics")[1]
        assert len(json.loads(fetch(f"{admin}/health")[1])["instances"]) == 1
        assert fetch(f"{admin}/live")[0] == 200
        assert fetch(f"{admin}/v1/models")[0] == 404
        with closing(http.client.HTTPConnection(admin.removeprefix("http://"), timeout=10)) as scraper:
            scraper.request("GET", "/metrics")
            scraper.getresponse().read()  # its connection stays open
            assert ended(process) == ""


def test_a_worker_has_an_admin_address_too() -> None:
    command = ("worker", "echo")
    variables = {"DYN_SYSTEM_PORT": "0"}
    with served_urls("--admin-port", "0", command=command, variables=variables) as (process, (url, status, admin)):
        assert fetch(f"{url}/metrics")[0] == 404
        assert b"dynamo_" in fetch(f"{admin}/metrics")[1]
        assert json.loads(fetch(f"{status}/health")[1])["status"] == "ready"
        process.kill()


def test_a_public_address_without_keys_is_warned_of_and_shows_no_metrics() -> None:
    with served_urls("--host", "0.0.0.0") as (process, (url,)):
        assert fetch(f"{url}/metrics")[0] == 404
        assert fetch(f"{url}/v1/models")[0] == 200
        assert "no API keys are set" in ended(process)


def test_keys_and_certificate_change_while_it_serves(tmp_path: Path, certificates: Certificates) -> None:
    """On the event loop of the program, by the clock that looks at the files."""
    keys, other = tmp_path / "keys.toml", new_key()
    keys.write_text(f'[[key]]\nname = "a"\nhash = "{hash_of(KEY)}"\n', encoding="utf-8")
    context = ssl.create_default_context(cafile=certificates.ca_file)
    options = ("--api-keys", str(keys), "--tls-cert-path", str(certificates.cert))
    with served_urls(*options, "--tls-key-path", str(certificates.key)) as (process, (url,)):
        assert url.startswith("https://")
        assert fetch(f"{url}/v1/chat/completions", KEY, BODY, context)[0] == 200
        assert fetch(f"{url}/v1/models", other, None, context)[0] == 401
        certificates.issue()
        certificates.write(keys, f'[[key]]\nname = "b"\nhash = "{hash_of(other)}"\n'.encode())
        while fetch(f"{url}/v1/models", other, None, context)[0] == 401:
            pass
        assert fetch(f"{url}/v1/models", KEY, None, context)[0] == 401
        errors = ended(process)
    assert "API keys: loaded again" in errors
    assert "TLS certificate: loaded again" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        (("--tls-cert-path", "cert.pem"), {}, "--tls-key-path: is needed with --tls-cert-path"),
        (("--tls-key-path", "key.pem"), {}, "--tls-cert-path: is needed with --tls-key-path"),
        (("--api-keys", "nowhere.toml"), {}, "--api-keys: nowhere.toml: cannot be read"),
        (
            ("--trusted-proxy", "10.0.0.0/8", "--trusted-proxy", "all"),
            {},
            "--trusted-proxy: is no address or network",
        ),
        (("--cors-origin", "https://a.example,b"), {}, "--cors-origin: 'b' is no origin"),
        (("--admin-port", "70000"), {}, "--admin-port: must be between 0 and 65535"),
        (("--admin-port", "0", "--admin-host", "203.0.113.1"), {}, "--admin-host: 203.0.113.1 is no address"),
        ((), {"PENSTOCK_API_KEY": "hunter2"}, "PENSTOCK_API_KEY: a key must be 32"),
        ((), {"PENSTOCK_API_KEYS": KEY}, "PENSTOCK_API_KEYS is not read"),
    ],
)
def test_a_wrong_option_ends_the_program_with_its_name(
    options: tuple[str, ...], variables: dict[str, str], words: str
) -> None:
    done = run("serve", "--port", "0", *options, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert not any(value in done.stderr for value in variables.values())


def test_help_names_the_options_and_shows_no_value_of_the_environment() -> None:
    shown = run("serve", "--help", PENSTOCK_API_KEY=KEY, PENSTOCK_API_KEYS_FILE="/secret/place")
    assert "--api-keys" in shown.stdout
    assert not any(text in shown.stdout for text in (KEY, "/secret/place"))
