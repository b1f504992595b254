"""What a worker may be told, and what follows from it."""

from __future__ import annotations

import pytest

from bottega.worker.config import EngineConfig


def test_a_group_has_the_fixed_rows_where_they_are_fixed() -> None:
    assert EngineConfig(max_rows=16).group_rows == 16
    assert EngineConfig(max_rows=16, fixed_rows=8).group_rows == 8


def test_a_pair_with_fixed_rows_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="a pair gains nothing"):
        EngineConfig(fixed_rows=4, peer="127.0.0.1:1")
