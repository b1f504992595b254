"""What holds for every test: the environment of torch, which tests must be alone, and that an interrupted run still
ends what it started.
"""

from __future__ import annotations

import os

import pytest

from tests.interruption import handle_signals

# Read when torch is first imported, here and in every process that a test starts.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The last bits of a result depend on the number of threads; the tests' own should not depend on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Nothing is downloaded at run time; a test that tries fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--part`: `make test` runs one after the other, each in its way. Without it pytest runs both."""
    parser.addoption("--part", choices=["beside", "alone"], help="only tests without the mark `alone`, or with it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the other part."""
    part = config.getoption("part")
    if part is not None:
        parts: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            parts[(item.get_closest_marker("alone") is not None) == (part == "alone")].append(item)
        items[:] = parts[True]
        config.hook.pytest_deselected(items=parts[False])


def pytest_configure(config: pytest.Config) -> None:
    handle_signals(config)
