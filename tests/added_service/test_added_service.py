"""A service that is no part of Bottega; tests/service/client/test_up.py runs it with the suite."""

from __future__ import annotations

from pathlib import Path

from tests.added_service.service_spec import KIND

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MANIFEST = HERE / "services.txt"


def test_nothing_but_its_package_and_a_manifest_knows_it() -> None:
    known = [
        path
        for top in ("deploy", "libs", "protos", "services")
        for path in (ROOT / top).rglob("*")
        if path.suffix in {".py", ".proto", ".txt", ".yaml", ".service", ".template"} and "egg-info" not in str(path)
        if "added_service" in (text := path.read_text(encoding="utf-8")) or f'"{KIND}"' in text
    ]
    assert known == []
    assert MANIFEST.read_text() == "tests.added_service.service_spec\n", "one line"
