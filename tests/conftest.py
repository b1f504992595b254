"""What holds for every test: the environment of torch, which tests must be alone, and that an interrupted run still
ends what it started.
"""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from tests.support.environment import set_defaults
from tests.support.interruption import handle_signals

set_defaults(os.environ)
# xdist sets it in its processes; what a command shows would depend on how the tests were started.
os.environ.pop("COLUMNS", None)

# How long an example takes depends on the machine and on what else runs: a hang is seen by pytest's own time limit.
hypothesis.settings.register_profile("bottega", deadline=None)
hypothesis.settings.load_profile("bottega")

_ALONE = "pytest.mark.alone"
# Folders whose files share the services of a fixture of their session, which each process of the tests would start.
_SHARING = frozenset({"tests/e2e/suite"})
# What takes longest, so that it is not the last to begin.
_LONGEST = ("tests/chaos/", "tests/e2e/", "tests/fuzz/", "tests/service/client/test_up", "tests/service/controlnet/")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--part`: `make test` runs one after the other, each in its way. Without it pytest runs both."""
    parser.addoption("--part", choices=["beside", "alone"], help="only tests without the mark `alone`, or with it")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Looks for no garbage while everything is imported, nor later in what was: that took a third of the time of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The second part imports only files that have tests for it: the others' libraries take seconds to import."""
    if config.getoption("part") == "alone" and collection_path.match("test_*.py") and not _has_mark(collection_path):
        return True
    return None  # as pytest decides


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the other part, and mixes files."""
    part = config.getoption("part")
    if part == "beside":
        items.sort(key=_place)
    if part is not None:
        parts: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            parts[(item.get_closest_marker("alone") is not None) == (part == "alone")].append(item)
        items[:] = parts[True]
        config.hook.pytest_deselected(items=parts[False])
        unseen = [path for path in {item.path for item in parts[False]} if part == "beside" and not _has_mark(path)]
        if unseen:
            raise pytest.UsageError(f"the second part would not find the tests of {unseen}: write {_ALONE} in them")


def _place(item: pytest.Item) -> tuple[bool, int]:
    """After the longest files, in any order but always the same: those of a folder all compute, or all wait."""
    file = item.nodeid.partition("::")[0]
    return not file.startswith(_LONGEST), 0 if file.startswith(_LONGEST) else zlib.crc32(file.encode())


class _FoldersTogether(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """A process takes a file at a time, and at once all files of a folder whose tests share what they started."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        folder = file.rpartition("/")[0]
        return folder if folder in _SHARING else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """See _FoldersTogether."""
    return _FoldersTogether(config, log)


def _has_mark(path: Path) -> bool:
    return _ALONE in path.read_text(encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    handle_signals(config)
