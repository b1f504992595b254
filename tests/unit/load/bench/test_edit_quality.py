"""The bench of edits' quality: when its figures say something."""

from __future__ import annotations

import pytest

from load.bench.edit_quality import require_reuse


def test_edits_that_have_reused_less_than_half_of_their_blocks_are_not_reported() -> None:
    require_reuse(0.5)
    with pytest.raises(SystemExit, match=r"it says nothing: the edits reused 0\.499 of their blocks"):
        require_reuse(0.499)
