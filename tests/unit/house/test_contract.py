"""The contract's files: options of other languages in each, and a page that names those that a client needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PROTOS = Path(__file__).resolve().parents[3] / "protos"
FILES = sorted(PROTOS.glob("bottega/v1/*.proto"))
_OPTIONS = {
    "csharp_namespace": '"Bottega.V1"',
    "go_package": '"bottega/v1;bottegav1"',
    "java_multiple_files": "true",
    "java_package": '"bottega.v1"',
    "php_namespace": r'"Bottega\\V1"',
    "ruby_package": '"Bottega::V1"',
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.name))
def test_every_file_has_the_options_of_other_languages(file: Path) -> None:
    assert dict(re.findall(r"^option (\w+) = (.*);$", file.read_text(), re.MULTILINE)) == _OPTIONS


def test_the_page_names_the_files_that_a_client_needs() -> None:
    page = (PROTOS / "README.md").read_text()
    listed = set(re.findall(r"^\| `(\w+\.proto)` \|", page, re.MULTILINE))
    assert listed == set(_imported("image.proto"))
    named = set(re.findall(r"`(\w+\.proto)`", page))
    services = {file.name for file in FILES if re.search(r"^service ", file.read_text(), re.MULTILINE)}
    assert services <= named <= {file.name for file in FILES}


def _imported(name: str) -> Iterator[str]:
    """Give a file and those of ours that it imports."""
    yield name
    text = (PROTOS / "bottega/v1" / name).read_text()
    for imported in re.findall(r'^import "bottega/v1/(.*)";$', text, re.MULTILINE):
        yield from _imported(imported)
