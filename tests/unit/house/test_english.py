"""Docstrings, comments and messages of the product are plain English, as far as a program can tell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(
    path
    for root in ("libs", "services", "kernels", "deploy")
    for path in (ROOT / root).rglob("*.py")
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    and ".egg-info" not in str(path)
    and "build" not in path.parts
)
# A docstring starts with a noun (classes) or a verb (functions), not with one of these.
NO_OPENING = frozenset(
    {
        "of",
        "that",
        "which",
        "what",
        "who",
        "whom",
        "whose",
        "where",
        "with",
        "without",
        "under",
        "as",
        "to",
        "in",
        "by",
        "for",
        "from",
        "on",
        "at",
        "between",
        "those",
        "these",
        "it",
        "they",
        "one",
        "both",
        "all",
        "each",
        "some",
        "there",
        "so",
        "such",
        "among",
        "beside",
        "beneath",
        "until",
        "while",
        "lest",
    }
)
# Old-fashioned words, and "said" where it stands for "named" or "given".
BANNED = re.compile(
    r"\b(lest|whoever|whomever|thereof|hourglass|nobody's|for want of)\b|\bsaid\b(?! to)", re.IGNORECASE
)
PARAMETER = re.compile(r"[a-z_][a-z0-9_]*(, [a-z_][a-z0-9_]*)*: ")


@pytest.mark.parametrize(
    "docstring",
    ["Of a request.", "What a worker holds.", "One of its ends.", "name: of the service.", "first, last: rows."],
)
def test_odd_openings_are_found(docstring: str) -> None:
    assert is_odd(docstring)


@pytest.mark.parametrize("docstring", ["Return the share.", "A queue of jobs.", "Jobs by id: the newest first."])
def test_plain_openings_are_not(docstring: str) -> None:
    assert not is_odd(docstring)


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    odd = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {docstring[:60]!r}"
        for path in FILES
        for node, docstring in docstrings(path)
        if is_odd(docstring)
    ]
    assert not odd, f"{len(odd)} docstrings:\n" + "\n".join(odd[:40])


def test_banned_words_do_not_occur() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if BANNED.search(line)
    ]
    assert not found, f"{len(found)} lines:\n" + "\n".join(found[:40])


def docstrings(path: Path) -> Iterator[tuple[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Yield every class and function of a file that has a docstring."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            yield node, text


def is_odd(docstring: str) -> bool:
    """Return whether a docstring opens with a preposition, a pronoun, a conjunction or a parameter."""
    first = docstring.split(maxsplit=1)[0].strip(",.;:").lower()
    return first in NO_OPENING or bool(PARAMETER.match(docstring))
