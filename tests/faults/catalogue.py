"""The list of faults, and where in the tree each of them and its tests are now."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("faults.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """file: that has the fault's text, from the root. tests: pytest's names of the tests that see it."""

    file: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A mistake that somebody could make.

    breaks: what goes wrong then. text: of libs or services, where it stands once. becomes: what stands there instead.
    tests: names of test functions that fail.
    """

    breaks: str
    text: str
    becomes: str
    tests: tuple[str, ...]

    def place(self) -> Place | str:
        """Where it is now; else what cannot be found."""
        having = [path for path, source in _sources().items() if self.text in source]
        if len(having) != 1 or _sources()[having[0]].count(self.text) != 1:
            return f"its text stands {'nowhere' if not having else f'several times, as in {having[0]}'}: {self.text!r}"
        known = _tests()
        if missing := [name for name in self.tests if name not in known]:
            return f"there is no test {', '.join(missing)}"
        return Place(file=having[0], tests=tuple(known[name] for name in self.tests))


def read_faults() -> list[Fault]:
    """All of them, in their order."""
    with LIST.open("rb") as file:
        listed = tomllib.load(file)["fault"]
    return [
        Fault(breaks=each["breaks"], text=each["text"], becomes=each["becomes"], tests=tuple(each["tests"]))
        for each in listed
    ]


@cache
def _sources() -> Mapping[str, str]:
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for top in ("libs", "services", "kernels")
        for path in sorted((ROOT / top).rglob("*.py"))
    }


@cache
def _tests() -> Mapping[str, str]:
    """Test functions of the whole tree, by name: wherever one moves, it is found."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            found[name] = f"{path.relative_to(ROOT)}::{name}"
    return found
