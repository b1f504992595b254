"""Rows of entries and latents: what is damaged in them is seen, but for uses, which are begun anew."""

from __future__ import annotations

import math

import pytest

from bottega.cache.disk.record_rows import LATENT_COLUMNS, latent_row, read_latent
from bottega.cache.latent import KeptLatent
from bottega.planning.eviction import Usage

LATENT = KeptLatent(digest=b"d" * 32, usage=Usage(frequency=3.0, step=5, used_at=7.0, created_at=2.0))


def test_a_latent_is_read_as_it_was_written() -> None:
    assert read_latent(latent_row(1, 5, LATENT), 5) == LATENT


@pytest.mark.parametrize(("column", "value"), [("number", 2), ("step", 10), ("digest", b"e" * 32), ("checksum", 0)])
def test_a_latent_that_is_another_ones_is_none(column: str, value: object) -> None:
    row = [*latent_row(1, 5, LATENT)]
    row[LATENT_COLUMNS.index(column)] = value  # type: ignore[call-overload]  # a damaged one has any
    assert read_latent(row, 5) is None


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("frequency", -1.0),
        ("frequency", math.inf),
        ("used_at", 1.0),
        ("used_at", math.nan),
        ("used_at", math.inf),
        ("used_at", 1e308),
        ("frequency", 2.0**53),
        ("created_at", -1.0),
    ],
)
def test_uses_that_cannot_be_are_begun_anew(column: str, value: float) -> None:
    """Else a latent would stay for ever, or the policy's clock would stop."""
    row = [*latent_row(1, 5, LATENT)]
    row[LATENT_COLUMNS.index(column)] = value
    found = read_latent(row, 5)
    assert found == KeptLatent(digest=LATENT.digest, usage=Usage(step=5))
