"""Every attack. `python -m tests.edge.all_attacks [WORD ...]` carries out those with a word in their name."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from attrs import define, field

from .abuse import abuse
from .attack import Attack, attempt
from .bodies import bodies
from .heads import heads
from .limits import variables
from .model_folder import write_model_folder
from .peers import peers
from .server import ECHO, MOCK, EdgeServer, edge_server
from .sizes import sizes


def attacks() -> list[Attack]:
    """All of them, each name once."""
    return [*sizes(), *bodies(), *heads(), *peers(), *abuse()]


@define
class Servers:
    """One server for each set of limits; one that an attack has brought down is replaced."""

    folder: Path
    _running: dict[str, tuple[EdgeServer, ExitStack]] = field(factory=dict)

    def of(self, attack: Attack) -> EdgeServer:
        """The server of this attack, running and at rest."""
        key = repr((sorted(attack.limits.items()), attack.engine))
        if (found := self._running.get(key)) is not None:
            if _is_well(found[0]):
                return found[0]
            found[1].close()
        stack = ExitStack()
        self._running[key] = (stack.enter_context(edge_server(variables(attack.limits), *self._options(attack))), stack)
        return self._running[key][0]

    def _options(self, attack: Attack) -> tuple[str, ...]:
        if attack.engine != "tokens":
            return MOCK if attack.engine == "mock" else ECHO
        if not (self.folder / "tokenizer.json").exists():
            write_model_folder(self.folder)
        return (*ECHO, "--model-path", str(self.folder), "--model-name", "echo")

    def close(self) -> None:
        for _, stack in self._running.values():
            stack.close()


def _is_well(server: EdgeServer) -> bool:
    try:
        return server.is_running and server.open_requests(2) == 0 and server.chat(2)[0] == 200
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.edge.all_attacks", description="Attacks a server.")
    parser.add_argument("words", nargs="*", help="only attacks with one of these in their names")
    parser.add_argument("--slow", action="store_true", help="also those of full size")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        servers = Servers(Path(folder))
        try:
            for line in _lines(servers, [a for a in attacks() if _is_meant(a, given.words, given.slow)]):
                print(line, flush=True)  # noqa: T201
        finally:
            servers.close()


def _is_meant(attack: Attack, words: list[str], slow: bool) -> bool:
    return (slow or not attack.is_slow) and (not words or any(word in attack.name for word in words))


def _lines(servers: Servers, chosen: list[Attack]) -> Iterator[str]:
    """The rows of a table in Markdown."""
    yield "| attack | answers | took | undisturbed | stall | memory | kept | held |"
    yield "|---|---|---|---|---|---|---|---|"
    for attack in chosen:
        try:
            outcome, found = attempt(attack, servers.of(attack))
        except Exception as error:
            yield f"| {attack.name} | - | - | - | - | - | - | NO: {error!r} |"
            continue
        verdict = "yes" if not found else "NO: " + "; ".join(found)
        yield (
            f"| {attack.name} | {outcome.statuses} | {outcome.took_s:.1f} s | {outcome.quiet_s * 1000:.0f} ms "
            f"| {outcome.stall_s * 1000:.0f} ms | {outcome.grown_mb:.0f} MB | {outcome.kept_mb:.0f} MB | {verdict} |"
        )


if __name__ == "__main__":
    main()
