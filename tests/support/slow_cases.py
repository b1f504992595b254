"""Of the cases of a test that go one way, some that run every time; the others run before a release."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_every_run(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return parameters for all cases, of which those that are not among `quick` are slow.

    Args:
        cases: The arguments of each case: a tuple, or a single one.
        quick: Cases of every run.
    """
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else pytest.mark.slow)
        for case in cases
    ]
