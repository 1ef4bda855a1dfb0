"""The Direction section of the house style, held by reading imports.

A rule is a function from a path and its source to the lines that break it. One test runs it over the repository,
another feeds it a file that must be caught, so no rule can pass by seeing nothing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Literal

import pytest
from attrs import define, field, frozen

ROOT = Path(__file__).parents[1]
PRODUCT = ("pipeline", "operators", "engines", "serving")
PLUGIN = "penstock_pytest.py"
USERS = ("examples", "tests", "benchmarks")

MAY_IMPORT = {
    "pipeline": {"pipeline"},
    "operators": {"pipeline", "operators"},
    "engines": {"pipeline", "engines"},
    "serving": set(PRODUCT),
    PLUGIN: {"pipeline", "engines"},
}
"""Folder of the product, or its pytest plugin -> the folders of this repository it may import."""

CORE = (
    *("errors", "settings", "loop", "pace", "written", "stage", "signatures"),
    *("control", "context", "cancellation", "foreign"),
    *("annotated", "stream", "engine", "operator", "graph"),
)
"""Modules of the core in order: each imports only what stands to its left, so a new one must take its place here."""

CALL_TIME = {("stream", "rx"), ("operator", "graph")}
"""Core modules that import a sibling inside a function: what a stream or an operator offers as a method."""

FACES = {
    "pipeline",
    *(f"pipeline.{part}" for part in ("errors", "extras", "foreign", "loop", "settings", "threads", "virtual_time")),
    *(
        f"pipeline.{folder}"
        for folder in (
            "graph",
            "llm",
            "llm.kv_events",
            "network",
            "network.files",
            "network.nats",
            "network.tcp",
            "protocols",
            "rx",
            "telemetry",
            "testing",
            "wire",
        )
    ),
    *(
        f"pipeline.protocols.{group}"
        for group in ("card", "field_rules", "kv", "limits", "openai", "runtime_config", "timing")
    ),
    *("operators", *(f"operators.{folder}" for folder in ("kv", "migration", "pool", "prefill", "text"))),
    *("engines", *(f"engines.{folder}" for folder in ("conformance", "mocker", "torch", "upstream", "worker"))),
    *(
        "serving",
        *(f"serving.{part}" for part in ("access", "cli", "deployment", "http", "live", "openai", "replay")),
        *(f"serving.{part}" for part in ("settings", "socket")),
        "serving.replay.page",
        *(f"serving.http.{part}" for part in ("generation", "metrics")),
    ),
}
"""The modules that other packages import from."""

FACE_NAMES_MAX = 40
"""The records of the OpenAI API are the longest face."""

LINES_MAX = 400
"""Lines of a file of the product: one concept, which a reader can hold."""

ROLES = {
    *("client", "config", "environment", "errors", "events", "metrics", "operator", "options", "policy", "pool"),
    *("requests", "router", "server", "settings", "tls", "validation"),
}
"""Names of files that mean the same in every folder. Every other name stands for one file of its package."""

DOORS = {
    "blake3": {"pipeline/llm/model_folder.py"},
    "cattrs": {"pipeline/wire/codec.py"},
    "json5": {"pipeline/llm/model_folder.py"},
    "cyclopts": {f"serving/cli/{name}.py" for name in ("app", "effective", "help", "commands", "replay")},
    "httpcore2": {f"engines/upstream/{name}.py" for name in ("client", "transport")},
    "httptools": {"serving/socket/__init__.py", "serving/socket/http1.py", "engines/upstream/response_parser.py"},
    "httpx2": {
        *(f"engines/upstream/{name}.py" for name in ("client", "http_exchange", "response_parser", "transport")),
        "serving/scrape.py",
    },
    "jinja2": {"operators/text/chat_template.py"},
    "msgspec": {
        "pipeline/wire/codec.py",
        "pipeline/wire/frames.py",
        "pipeline/wire/decoders.py",
        "pipeline/wire/stream_tokens.py",
        "pipeline/wire/token_items.py",
        "pipeline/wire/typed_items.py",
        "pipeline/wire/typed_records.py",
        "serving/openai/form.py",
    },
    "nats": {f"pipeline/network/nats/broker_{name}.py" for name in ("messages", "session", "streams")},
    "numpy": {"engines/mocker/timing.py", "serving/replay/arithmetic.py"},
    "opentelemetry": {
        *(
            "pipeline/telemetry/tracing.py",
            "pipeline/telemetry/propagation.py",
            "pipeline/telemetry/metrics.py",
            "serving/http/metrics/counting_meter.py",
            "serving/http/metrics/telemetry.py",
        ),
        "serving/trace_export.py",
    },
    "plotly": {f"serving/replay/page/{name}.py" for name in ("charts", "pareto", "run_charts", "worker_charts")},
    "prometheus_client": {f"serving/http/metrics/{name}.py" for name in ("counting_meter", "telemetry")},
    "pytest": {PLUGIN},
    "reactivex": {"pipeline/rx/*.py"},
    "rich": {
        f"serving/{name}.py" for name in ("cli/help", "cli/progress", "replay/report/tables", "status/overview_table")
    },
    "starlette": {
        f"serving/http/{name}.py"
        for name in ("application", "body", "caller", "edge", "generation/*", "guard", "request", "status")
    },
    "tokenizers": {"operators/text/tokenizer.py"},
    "peft": {"engines/torch/library.py"},
    "torch": {"engines/torch/library.py"},
    "transformers": {"engines/torch/library.py", "engines/torch/loading.py"},
    "uvicorn": {"serving/access/gate.py", "serving/server.py"},
    "zmq": {"engines/mocker/zmq_events.py", "pipeline/llm/kv_events/zmq_sockets.py"},
    "xxhash": {"pipeline/llm/block_hash.py", "pipeline/wire/frames.py"},
    "yaml": {"serving/settings_file.py"},
}
"""Foreign library -> the files that may import it (patterns)."""

NAMED_IN_TYPES = {("pipeline/stream.py", "reactivex")}
"""Files that name a library's types in annotations without importing it at run time."""

LOOPS_AND_CLOCKS = {"asyncio": "anyio", "trio": "anyio", "time": "anyio's clock"}
"""What pipeline, operators and engines do not import, and what they use instead."""

LOOPS_ALLOWED = {
    "pipeline/virtual_time.py": {"asyncio", "trio"},
    "pipeline/testing/*.py": {"asyncio", "trio"},
    "pipeline/cancellation.py": {"asyncio"},
    "pipeline/loop.py": {"asyncio"},
    "pipeline/network/nats/broker_connection.py": {"asyncio"},
    "pipeline/foreign.py": {"asyncio"},
    "pipeline/network/tcp/asyncio_links.py": {"asyncio"},
    "pipeline/network/tcp/asyncio_tls.py": {"asyncio"},
    "engines/worker/signals.py": {"time"},
    "engines/conformance/inspection.py": {"asyncio", "trio", "time"},
    "engines/conformance/bounded_calls.py": {"time"},
    "engines/mocker/loop_share.py": {"time"},
    "engines/torch/step_times.py": {"time"},
}
"""Files (patterns) that may import some of it: virtual time replaces the clocks of both libraries; racing by asyncio's
own means costs a tenth; nats-py runs on asyncio only; anyio knows neither whether no task runs in a loop's thread (a
signal handler) nor whether a task of asyncio's was cancelled; a protocol of asyncio's takes bytes without a task
between; a loop that an engine blocks shows on no clock of its own, nor can a thread that acts then use it; what a
thread computes is timed there; and what tasks take of the processor no loop's clock shows: uvloop's stands still for a
whole turn."""

WALL_CLOCK: set[str] = set()
"""Files that may read the time of day, to write it into a record and never to wait or to decide."""

NOT_ON_IMPORT = ("reactivex", "opentelemetry.sdk", "starlette", "httpx2", "plotly")
"""What `import pipeline`, and the program before it knows its command, leave for the parts that use it."""

When = Literal["load", "call", "typing"]


@frozen
class Imported:
    """One module that a file imports: absolute name, line, how it is written and when it happens."""

    module: str
    line: int
    relative: bool
    when: When

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def files(folders: Iterable[str]) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in [ROOT / folder] if folder.endswith(".py") else sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def module_name(path: str) -> str:
    return ".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__")


def package_name(path: str) -> str:
    return ".".join(PurePosixPath(path).parent.parts)


def within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


MODULES = {module_name(path) for path, _ in files(PRODUCT)}
PACKAGES = {package_name(path) for path, _ in files(PRODUCT)}


@define
class Imports(ast.NodeVisitor):
    """Collects every import of one file, with relative ones resolved and `from package import module` followed."""

    path: str
    found: list[Imported] = field(factory=list)
    _when: list[When] = field(factory=lambda: ["load"])

    @contextmanager
    def _during(self, when: When) -> Iterator[None]:
        self._when.append("typing" if self._when[-1] == "typing" else when)
        try:
            yield
        finally:
            self._when.pop()

    def visit_If(self, node: ast.If) -> None:
        guarded = ast.unparse(node.test).removeprefix("typing.") == "TYPE_CHECKING"
        with self._during("typing" if guarded else self._when[-1]):
            for child in node.body:
                self.visit(child)
        for child in node.orelse:
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        with self._during("call"):
            self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Import(self, node: ast.Import) -> None:
        self._add(node, [alias.name for alias in node.names])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        package = package_name(self.path).split(".")
        above = package[: len(package) - node.level + 1] if node.level else []
        module = ".".join([*above, *filter(None, [node.module])])
        full = [f"{module}.{alias.name}" for alias in node.names]
        self._add(node, [name if name in MODULES else module for name in full], relative=node.level > 0)

    def _add(self, node: ast.stmt, modules: list[str], relative: bool = False) -> None:
        self.found += [Imported(name, node.lineno, relative, self._when[-1]) for name in dict.fromkeys(modules)]


@cache
def imports(path: str, source: str) -> list[Imported]:
    """Return the imports of a file, which many rules read."""
    visitor = Imports(path)
    visitor.visit(ast.parse(source))
    return visitor.found


Rule = Callable[[str, str], list[str]]


def direction(path: str, source: str) -> list[str]:
    """Folders import in one direction, and nothing of the product imports its users."""
    forbidden = {*PRODUCT, *USERS} - MAY_IMPORT[path.partition("/")[0]]
    return [f"{path}:{i.line}: imports {i.module}" for i in imports(path, source) if i.top in forbidden]


def in_core(module: str) -> str | None:
    """Return the entry of `CORE` that a module is, or is part of."""
    name = module.removeprefix("pipeline.")
    return next((entry for entry in CORE if within(name, entry)), None)


def core_order(path: str, source: str) -> list[str]:
    """The core imports leftwards, and inside a function only what is declared."""
    own = in_core(module_name(path))
    if own is None:
        return []
    offenders = []
    for i in imports(path, source):
        other = in_core(i.module) or i.module.removeprefix("pipeline.")
        if i.top != "pipeline" or i.when == "typing" or other == own:
            continue
        if i.when == "call" and (own, other) not in CALL_TIME:
            offenders.append(f"{path}:{i.line}: imports {other} inside a function")
        elif i.when == "load" and other not in CORE[: CORE.index(own)]:
            offenders.append(f"{path}:{i.line}: imports {other}, which does not stand to its left")
    return offenders


def core_is_generic(path: str, source: str) -> list[str]:
    """Core files know neither the protocols nor the network."""
    if module_name(path).removeprefix("pipeline.") not in CORE:
        return []
    return [
        f"{path}:{i.line}: imports {i.module}"
        for i in imports(path, source)
        if i.module.startswith(("pipeline.protocols", "pipeline.network"))
    ]


def protocols_are_data(path: str, source: str) -> list[str]:
    """Protocols import the standard library, attrs, each other, and what declares settings."""
    if not path.startswith("pipeline/protocols/"):
        return []
    return [
        f"{path}:{i.line}: imports {i.module}"
        for i in imports(path, source)
        if i.top not in sys.stdlib_module_names | {"attrs"}
        and not i.module.startswith(("pipeline.protocols", "pipeline.settings"))
    ]


def one_door(path: str, source: str) -> list[str]:
    """A foreign library is imported in its own files only."""
    return [
        f"{path}:{i.line}: imports {i.module}, whose door is {' or '.join(sorted(DOORS[i.top]))}"
        for i in imports(path, source)
        if i.top in DOORS
        and not any(fnmatch(path, door) for door in DOORS[i.top])
        and not (i.when == "typing" and (path, i.top) in NAMED_IN_TYPES)
    ]


def through_faces(path: str, source: str) -> list[str]:
    """Across packages a face is imported absolutely, inside one everything relatively, each sub-folder by its face."""
    package = package_name(path)
    offenders = []
    for i in imports(path, source):
        if i.top not in PRODUCT:
            continue
        if not i.relative and package == (i.module if i.module in PACKAGES else i.module.rpartition(".")[0]):
            offenders.append(f"{path}:{i.line}: imports {i.module} of its own folder absolutely")
        elif i.module not in FACES and not i.relative:
            offenders.append(f"{path}:{i.line}: imports {i.module}, which is not a face")
        elif i.module not in FACES:
            passed = [face for face in PACKAGES - {i.module} if within(i.module, face) and not within(package, face)]
            offenders += [f"{path}:{i.line}: reaches behind {face} for {i.module}" for face in passed]
    return offenders


def outside_time(path: str, source: str) -> list[str]:
    """Neither a loop nor a clock is imported, nor the time of day read."""
    allowed = {name for pattern, names in LOOPS_ALLOWED.items() if fnmatch(path, pattern) for name in names}
    offenders = [
        f"{path}:{i.line}: imports {i.module}, use {LOOPS_AND_CLOCKS[i.top]}"
        for i in imports(path, source)
        if i.top in LOOPS_AND_CLOCKS.keys() - allowed and not (i.top == "time" and path in WALL_CLOCK)
    ]
    if path not in WALL_CLOCK:
        offenders += [
            f"{path}:{node.lineno}: asks for the time of day"
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Attribute)
            and node.attr in {"now", "utcnow", "today"}
            and ast.unparse(node).endswith(("datetime.now", "datetime.utcnow", "datetime.today", "date.today"))
        ]
    return offenders


def small_faces(path: str, source: str) -> list[str]:
    """A face offers no more than `FACE_NAMES_MAX` names."""
    if module_name(path) not in FACES:
        return []
    return [
        f"{path}:{node.lineno}: {len(node.value.elts)} names"
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "__all__"
        and isinstance(node.value, ast.List | ast.Tuple)
        and len(node.value.elts) > FACE_NAMES_MAX
    ]


def holdable(path: str, source: str) -> list[str]:
    """A file has no more than `LINES_MAX` lines."""
    lines = source.count("\n")
    return [f"{path}: {lines} lines"] if lines > LINES_MAX else []


def named_twice(paths: Iterable[str]) -> list[str]:
    """Files of one package that share a name which is none of `ROLES`."""
    by_name: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        by_name.setdefault((path.partition("/")[0], PurePosixPath(path).stem), []).append(path)
    return [
        " and ".join(same)
        for (_, name), same in by_name.items()
        if len(same) > 1 and name not in ROLES | {"__init__", "__main__"}
    ]


def circles(imported: dict[str, set[str]]) -> set[frozenset[str]]:
    """The sets of modules that import one another, directly or through others."""
    reached = {module: set(others) for module, others in imported.items()}
    for through in reached:
        for others in reached.values():
            if through in others:
                others |= reached[through]
    found = {
        frozenset(other for other in others if module in reached.get(other, ())) for module, others in reached.items()
    }
    return found - {frozenset()}


def plugin_is_light(path: str, source: str) -> list[str]:
    """The pytest plugin, which every pytest run loads, imports the standard library and pytest."""
    return [
        f"{path}:{i.line}: imports {i.module}"
        for i in imports(path, source)
        if i.when != "typing" and i.top not in sys.stdlib_module_names | {"pytest"}
    ]


def loaded_by(statement: str, names: Iterable[str] = NOT_ON_IMPORT) -> str:
    """Which of the names a fresh interpreter has loaded after the statement."""
    code = f"{statement}; import sys; print(*[name for name in {tuple(names)} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def hold(rule: Rule, folders: Iterable[str]) -> None:
    offenders = [line for path, source in files(folders) for line in rule(path, source)]
    assert not offenders, "\n".join([f"{rule.__doc__}", *offenders])


def test_every_folder_of_the_product_is_read() -> None:
    assert {path.partition("/")[0] for path, _ in files(PRODUCT)} == set(PRODUCT)


def test_folders_import_in_one_direction() -> None:
    hold(direction, [*PRODUCT, PLUGIN])


def test_in_the_core_left_does_not_import_right() -> None:
    hold(core_order, ["pipeline"])


def test_core_imports_neither_protocols_nor_network() -> None:
    hold(core_is_generic, ["pipeline"])


def test_protocols_import_only_attrs() -> None:
    hold(protocols_are_data, ["pipeline"])


def test_a_foreign_library_has_one_door() -> None:
    hold(one_door, [*PRODUCT, PLUGIN])


def test_folders_meet_at_their_faces() -> None:
    hold(through_faces, [*PRODUCT, PLUGIN, "examples"])


def test_loops_and_clocks_come_from_anyio() -> None:
    hold(outside_time, ["pipeline", "operators", "engines"])


def test_a_face_has_few_names() -> None:
    hold(small_faces, PRODUCT)


def test_a_file_has_at_most_400_lines() -> None:
    hold(holdable, PRODUCT)


def test_a_file_name_stands_for_one_thing() -> None:
    assert named_twice(path for path, _ in files(PRODUCT)) == []
    assert named_twice(["operators/kv/pool.py", "operators/prefill/pool.py", "operators/a/b.py", "engines/b.py"]) == []
    assert named_twice(["operators/a/b.py", "operators/c/b.py"]) == ["operators/a/b.py and operators/c/b.py"]


def test_modules_import_in_circles_only_where_a_stream_or_an_operator_offers_a_method() -> None:
    imported = {
        module_name(path): {i.module for i in imports(path, source) if i.module in MODULES}
        for path, source in files(PRODUCT)
    }
    assert circles(imported) == {
        frozenset({"pipeline.stream", "pipeline.rx", "pipeline.rx.bridge"}),
        frozenset({"pipeline.operator", "pipeline.graph"}),
    }
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == {frozenset("bc"), frozenset("d")}


def test_the_pytest_plugin_imports_only_pytest() -> None:
    hold(plugin_is_light, [PLUGIN])
    assert loaded_by("import penstock_pytest", [*PRODUCT, "anyio", "attrs", "trio"]) == ""


@pytest.mark.parametrize("module", ["pipeline", "serving.cli"])
def test_importing_pipeline_or_the_program_loads_no_optional_library(module: str) -> None:
    assert loaded_by(f"import {module}") == ""


def test_only_the_page_of_a_replay_loads_the_library_of_its_charts() -> None:
    assert loaded_by("import serving.replay", ["plotly"]) == ""
    assert loaded_by("import serving.replay.page", ["plotly"]) == "plotly"


def test_a_server_loads_no_http_client_unless_it_calls_servers() -> None:
    assert loaded_by("import serving.program, serving.frontend, engines.mocker", ["httpx2"]) == ""
    assert loaded_by("import serving.up", ["httpx2"]) == "httpx2"


@pytest.mark.parametrize("name", NOT_ON_IMPORT)
def test_a_loaded_library_is_noticed(name: str) -> None:
    assert name in loaded_by(f"import {name}").split()


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (direction, "operators/a.py", "from engines import Echo"),
        (direction, "engines/a.py", "def f():\n    import operators"),
        (direction, "pipeline/network/a.py", "if TYPE_CHECKING:\n    from operators import Migration"),
        (direction, "engines/mocker/a.py", "import serving.http"),
        (direction, "serving/a.py", "from tests import conftest"),
        (core_order, "pipeline/context.py", "from .stream import ResponseStream"),
        (core_order, "pipeline/errors.py", "from pipeline import context"),
        (core_order, "pipeline/engine.py", "try:\n    from . import rx\nexcept ImportError:\n    pass"),
        (core_order, "pipeline/stream.py", "async def f():\n    from .segment import link"),
        (core_order, "pipeline/stream.py", "class A:\n    def f(self):\n        from .errors import StreamClosed"),
        (core_is_generic, "pipeline/graph.py", "from .network.names import Instance"),
        (core_is_generic, "pipeline/engine.py", "def f():\n    from pipeline.protocols import LLMEngineOutput"),
        (protocols_are_data, "pipeline/protocols/a.py", "from ..errors import CodecError"),
        (protocols_are_data, "pipeline/protocols/a.py", "import msgspec"),
        (one_door, "operators/a.py", "from reactivex.subject import Subject"),
        (one_door, "operators/a.py", "if TYPE_CHECKING:\n    from reactivex import Observable"),
        (one_door, "serving/deployment/graphs.py", "def f():\n    from starlette.responses import Response"),
        (through_faces, "operators/a.py", "from pipeline.control import ReleaseOnce"),
        (through_faces, "operators/a.py", "from pipeline import control"),
        (through_faces, "serving/a.py", "import operators.migration.operator"),
        (through_faces, "examples/a.py", "from engines.echo import Echo"),
        (through_faces, "pipeline/control.py", "from pipeline.errors import CodecError"),
        (through_faces, "pipeline/wire/codec.py", "from pipeline.protocols.request import PreprocessedRequest"),
        (through_faces, "pipeline/testing/a.py", "from ..network.names import Instance"),
        (through_faces, "operators/kv/a.py", "from .index.block_run import BlockRun"),
        (one_door, "pipeline/testing/a.py", "import pytest"),
        (direction, PLUGIN, "import serving"),
        (through_faces, PLUGIN, "from pipeline.testing.open_streams import OpenStreams"),
        (plugin_is_light, PLUGIN, "def f():\n    from pipeline.testing import OpenStreams"),
        (plugin_is_light, PLUGIN, "import anyio"),
        (outside_time, "operators/a.py", "import asyncio"),
        (outside_time, "engines/a.py", "from trio.testing import MockClock"),
        (outside_time, "operators/kv/a.py", "def f():\n    from time import monotonic"),
        (outside_time, "pipeline/testing/a.py", "import time"),
        (outside_time, "operators/a.py", "import datetime\nborn = datetime.datetime.now(datetime.UTC)"),
        (small_faces, "operators/__init__.py", f"__all__ = {[f'Name{n}' for n in range(FACE_NAMES_MAX + 1)]}"),
        (holdable, "operators/a.py", "\n" * (LINES_MAX + 1)),
    ],
)
def test_a_file_that_breaks_a_rule_is_caught(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source)


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (direction, "serving/deployment/graphs.py", "from operators import Migration\nfrom engines import Echo"),
        (core_order, "pipeline/stream.py", "from .context import Context\ndef f():\n    from .rx import apply"),
        (core_order, "pipeline/context.py", "if TYPE_CHECKING:\n    from .stream import ResponseStream"),
        (core_is_generic, "pipeline/wire/codec.py", "from pipeline.protocols import PreprocessedRequest"),
        (protocols_are_data, "pipeline/protocols/a.py", "import json\nfrom attrs import frozen\nfrom .b import B"),
        (one_door, "pipeline/stream.py", "if TYPE_CHECKING:\n    from reactivex import Observable"),
        (one_door, "pipeline/rx/scheduler.py", "import reactivex"),
        (through_faces, "operators/prefill/a.py", "from ..push_router import PushRouter\nfrom .b import B"),
        (through_faces, "operators/a.py", "from .kv import KvRouter\nfrom pipeline import errors, Context"),
        (through_faces, "pipeline/wire/codec.py", "from pipeline.protocols import PreprocessedRequest"),
        (plugin_is_light, PLUGIN, "import pytest\nif TYPE_CHECKING:\n    from pipeline.testing import OpenStreams"),
        (outside_time, "pipeline/testing/a.py", "import asyncio\nimport trio"),
        (outside_time, "operators/a.py", "from datetime import timedelta"),
        (small_faces, "operators/__init__.py", f"__all__ = {[f'Name{n}' for n in range(FACE_NAMES_MAX)]}"),
        (holdable, "operators/a.py", "\n" * LINES_MAX),
    ],
)
def test_a_file_that_keeps_a_rule_is_left_alone(rule: Rule, path: str, source: str) -> None:
    assert not rule(path, source)
