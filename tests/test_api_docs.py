"""docs/api.md lists the public names as they are, each with a line; docs and examples import from its doors."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.api_docs import DOORS, PAGE, doors, page

ROOT = Path(__file__).parents[1]
SIDE_DOORS = {"pipeline.errors", "serving.replay.page"}
"""Modules with what few programs need: every error of the tree, and pages of plots."""
PACKAGES = ("pipeline", "operators", "engines", "serving")


def imported(source: str) -> set[str]:
    """The modules of the product that a program imports from."""
    nodes = ast.walk(ast.parse(source))
    modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {module for module in modules if module.partition(".")[0] in PACKAGES}


def programs() -> dict[str, str]:
    """The examples, and the Python code of the docs, by the file it is in."""
    found = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        # The imports alone: some blocks have an await on their first level.
        lines = "\n".join(
            line for block in blocks for line in re.findall(r"^from [\w.]+ import .*", block, re.MULTILINE)
        )
        found[str(path.relative_to(ROOT))] = re.sub(r"import \($", "import x", lines, flags=re.MULTILINE)
    return found


def test_the_page_is_what_the_docstrings_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.api_docs"


@pytest.mark.parametrize("door", DOORS)
def test_every_public_name_has_a_line(door: str) -> None:
    assert [name.name for name in doors()[door] if not name.line] == []


def test_docs_and_examples_import_from_the_doors_of_the_page() -> None:
    used = {file: imported(source) for file, source in programs().items()}
    assert sum(map(len, used.values())) > 30
    assert {file: sorted(modules - {*DOORS, *SIDE_DOORS}) for file, modules in used.items() if modules} == {
        file: [] for file, modules in used.items() if modules
    }
