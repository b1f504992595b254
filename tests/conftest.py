"""What holds for every test: the environment of torch, which tests must be alone, and that an interrupted run still
ends what it started.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import zlib
from collections.abc import Generator

import hypothesis
import pytest

from tests.support import shared_folders
from tests.support.environment import set_defaults
from tests.support.forked_runs import ForkedRun
from tests.support.init_keys import remember_init_keys
from tests.support.interruption import handle_signals

set_defaults(os.environ)
# What a command shows would depend on how the tests were started.
os.environ.pop("COLUMNS", None)

# How long an example takes depends on the machine and on what else runs: a hang is seen by pytest's own time limit.
hypothesis.settings.register_profile("bottega", deadline=None)
hypothesis.settings.load_profile("bottega")

# Python's own look for garbage so often, among the modules of a model, that it takes a twelfth of the tests' time.
_GC_THRESHOLDS = (10_000, 20, 20)
# Folders whose files share the services of a fixture of their session, which each process of the tests would start.
_SHARING = frozenset({"tests/e2e/suite", "tests/service/gateway/jobs/store"})
# What takes longest, so that it is not the last to begin.
_LONGEST = (
    *("tests/added_service/", "tests/chaos/", "tests/e2e/", "tests/fuzz/"),
    *("tests/service/controlnet/", "tests/service/deploy/"),
    *("tests/service/client/test_published_model", "tests/service/client/test_up", "tests/service/gateway/test_memory"),
    *("tests/unit/engine/test_families", "tests/unit/model/", "tests/unit/model_files/", "tests/unit/worker/"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--processes`, which `make test` uses. Without it pytest runs all tests in its own process."""
    text = "run so many files at a time, up to four more if cores are idle, then those with the mark `alone` one by one"
    parser.addoption("--processes", type=int, metavar="N", help=text)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Looks for no garbage while everything is imported, nor later in what was: that took a third of the time of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run what may run beside other tests in processes, a file at a time, and then the others."""
    processes, options = session.config.getoption("processes"), session.config.option
    if not processes or options.collectonly or (session.testsfailed and not options.continue_on_collection_errors):
        return None  # pytest's own loop runs them, or says why not
    if "diffusers" in sys.modules:
        remember_init_keys()
    parts: dict[bool, list[pytest.Item]] = {False: [], True: []}
    for item in session.items:
        parts[item.get_closest_marker("alone") is not None].append(item)
    shared_folders.root()  # before they are forked, so that all have the same
    forked = ForkedRun(session)
    groups = [list(tests) for _, tests in itertools.groupby(sorted(parts[False], key=_place), key=_group)]
    forked.run(groups, at_once=processes, fill_cores=True)
    forked.run([parts[True]] if parts[True] else [], at_once=1)
    return True


def _place(item: pytest.Item) -> tuple[bool, int, str]:
    """After the longest files, in any order but always the same: those of a folder all compute, or all wait."""
    group = _group(item)
    return not group.startswith(_LONGEST), 0 if group.startswith(_LONGEST) else zlib.crc32(group.encode()), group


def _group(item: pytest.Item) -> str:
    """Return what a process takes at once: a file, or a folder whose tests share what they started."""
    file = item.nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    return folder if folder in _SHARING else file


def pytest_configure(config: pytest.Config) -> None:
    handle_signals()
