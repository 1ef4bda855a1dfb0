"""Drawing a line of stages with its side branches: mermaid, dot or plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from attrs import define, field

from ..stage import Stage


@define
class _Node:
    """A stage to draw: its label, the instances behind it, and its edges."""

    text: str
    members: Sequence[str] = ()
    next: _Node | None = None
    branches: list[tuple[str, _Node]] = field(factory=list)


def render(stages: Sequence[Stage], form: Literal["mermaid", "dot", "text"]) -> str:
    """Return the graph in that form. Raise ValueError for any other."""
    forms: dict[str, Callable[[_Node], str]] = {"mermaid": _mermaid, "dot": _dot, "text": _text}
    if form not in forms:
        raise ValueError(f"form is one of {', '.join(forms)}, not {form!r}")
    return forms[form](_nodes(stages))


def _nodes(stages: Sequence[Stage]) -> _Node:
    """Return the first node of the line; each leads to the next and to the first node of each branch."""
    node: _Node | None = None
    for stage in reversed(stages):
        branches = [(label, _nodes(side.parts())) for label, side in stage.branches().items()]
        node = _Node(str(stage), stage.members(), node, branches)
    assert node is not None
    return node


def _edges(first: _Node) -> tuple[list[_Node], list[tuple[_Node, _Node, str]]]:
    """Return all nodes in drawing order, and (from, to, label) with an empty label on the main line."""
    nodes: list[_Node] = []
    edges: list[tuple[_Node, _Node, str]] = []
    node: _Node | None = first
    while node is not None:
        nodes.append(node)
        for label, side in node.branches:
            edges.append((node, side, label))
            more_nodes, more_edges = _edges(side)
            nodes += more_nodes
            edges += more_edges
        if node.next is not None:
            edges.append((node, node.next, ""))
        node = node.next
    return nodes, edges


def _mermaid(first: _Node) -> str:
    nodes, edges = _edges(first)
    names = {id(node): f"n{i}" for i, node in enumerate(nodes)}
    lines = ["flowchart TD"]
    for node in nodes:
        name = names[id(node)]
        lines.append(f'    {name}["{_escaped(node.text)}"]')
        for i, member in enumerate(node.members):
            lines.append(f'    {name} --- {name}_{i}(["{_escaped(member)}"])')
    for start, end, label in edges:
        arrow = f'-. "{_escaped(label)}" .->' if label else "-->"
        lines.append(f"    {names[id(start)]} {arrow} {names[id(end)]}")
    return "\n".join(lines)


_MERMAID = str.maketrans({"#": "#35;", "&": "#amp;", '"': "#quot;", "<": "#lt;", ">": "#gt;"})


def _escaped(text: str) -> str:
    """Text inside a quoted mermaid label."""
    return text.translate(_MERMAID)


def _dot(first: _Node) -> str:
    nodes, edges = _edges(first)
    names = {id(node): f"n{i}" for i, node in enumerate(nodes)}
    lines = ["digraph {", "    node [shape=box]"]
    for node in nodes:
        name = names[id(node)]
        lines.append(f"    {name} [label={_quoted(node.text)}]")
        for i, member in enumerate(node.members):
            lines.append(f"    {name}_{i} [label={_quoted(member)}, shape=oval]")
            lines.append(f"    {name} -> {name}_{i} [dir=none]")
    for start, end, label in edges:
        style = f" [label={_quoted(label)}, style=dashed]" if label else ""
        lines.append(f"    {names[id(start)]} -> {names[id(end)]}{style}")
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _text(first: _Node) -> str:
    lines: list[str] = []
    node: _Node | None = first
    while node is not None:
        lines.append(node.text)
        bar = "│" if node.next is not None else " "
        lines += [f"{bar}   ○ {member}" for member in node.members]
        for label, side in node.branches:
            head, *rest = _text(side).splitlines()
            lines.append(f"{bar}└─ {label} ─► {head}" if node.next is None else f"├─ {label} ─► {head}")
            lines += [f"{bar}{' ' * (len(label) + 7)}{line}" for line in rest]
        if node.next is not None:
            lines.append("▼")
        node = node.next
    return "\n".join(lines)
