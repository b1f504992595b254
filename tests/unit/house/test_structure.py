"""What a tool can see of the structure: names that mean one thing, small constructors, plain returns."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MODULES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
    for base in ("libs", "services")
    for path in sorted((ROOT / base / "bottega").rglob("*.py"))
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
}
_MOST_PARAMETERS = 8


def _classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path, tree in MODULES.items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree in MODULES.items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_the_code_is_where_this_test_looks() -> None:
    assert len(MODULES) > 300


def test_a_class_of_a_name_that_another_one_has_says_why() -> None:
    found: defaultdict[str, list[tuple[str, ast.ClassDef]]] = defaultdict(list)
    for path, node in _classes():
        found[node.name].append((path, node))
    unexplained = [
        f"{path}: {name}"
        for name, places in found.items()
        if len(places) > 1
        for path, node in places
        if "same name" not in (ast.get_docstring(node) or "")
    ]
    assert not unexplained, "rename one, or say in each docstring why both have the same name"


def test_no_constructor_takes_more_than_eight_parameters() -> None:
    large = {
        f"{path}: {node.name}": count
        for path, node in _classes()
        for made in node.body
        if isinstance(made, ast.FunctionDef) and made.name == "__init__"
        if (count := len(made.args.posonlyargs) + len(made.args.args) - 1 + len(made.args.kwonlyargs))
        > _MOST_PARAMETERS
    }
    assert not large, "give what belongs together a value of its own"


def test_no_function_returns_a_tuple_of_which_parts_may_be_missing() -> None:
    vague = [
        f"{path}: {node.name} -> {returned}"
        for path, node in _functions()
        if node.returns is not None
        if re.fullmatch(r"tuple\[.*\| None.*\]", returned := ast.unparse(node.returns))
    ]
    assert not vague, "return a value with names, or a union of values"


def test_docstrings_say_it_themselves() -> None:
    elsewhere = [
        f"{path}: {node.name}"
        for path, node in (*_functions(), *_classes())
        if (ast.get_docstring(node) or "").startswith("See ")
    ]
    assert not elsewhere, "what only points to another docstring needs none"
