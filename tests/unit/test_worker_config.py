"""What a worker may be told, and what follows from it."""

from __future__ import annotations

from bottega.worker.config import EngineConfig


def test_a_group_has_the_fixed_rows_where_they_are_fixed() -> None:
    assert EngineConfig(max_rows=16).group_rows == 16
    assert EngineConfig(max_rows=16, fixed_rows=8).group_rows == 8
