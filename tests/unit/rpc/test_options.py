"""Every option of gRPC that the tree names is one that the installed gRPC knows: it takes a misspelt one in silence.

Reads the sources and the library's own binary; opens no channel.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("libs", "services", "tests", "load")
# Begin as an option does, and are none: services, and what a text says of the library.
NO_OPTION = re.compile(r"grpc\.(health|reflection)\.v1(alpha)?\.[A-Z]\w+|grpc\.aio\b.*")


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and re.match(r"grpc\.[a-z]", text) and not NO_OPTION.fullmatch(text):
            yield text


def _named() -> dict[str, str]:
    """Option, and a file that names it."""
    found = {}
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            text = "" if path.name.endswith(("_pb2.py", "_pb2_grpc.py")) else path.read_text(encoding="utf-8")
            if '"grpc.' in text:
                found.update({name: str(path.relative_to(ROOT)) for name in _names(ast.parse(text))})
    return found


def _known(name: str, binary: bytes) -> bool:
    return name.encode() + b"\0" in binary


@pytest.fixture(scope="module")
def binary() -> bytes:
    """The library, which has the name of every option as a text of its own."""
    return Path(str(importlib.import_module("grpc._cython.cygrpc").__file__)).read_bytes()


def test_every_option_is_one_that_grpc_knows(binary: bytes) -> None:
    named = _named()
    assert {"grpc.keepalive_time_ms", "grpc.max_receive_message_length"} <= set(named)
    assert {name: path for name, path in named.items() if not _known(name, binary)} == {}
