"""What a worker may not be told."""

from __future__ import annotations

import pytest

from bottega.worker.config import EngineConfig, PeerConfig


def test_a_pair_with_fixed_rows_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="a pair gains nothing"):
        EngineConfig(fixed_rows=4, peer=PeerConfig(address="127.0.0.1:1"))
