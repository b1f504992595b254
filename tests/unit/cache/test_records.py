"""Rows of latents: what is damaged in them is noticed, but for uses, which begin anew."""

from __future__ import annotations

import math

import pytest

from bottega.blobstore.records import StoredRow
from bottega.cache.eviction import Usage
from bottega.cache.latent import KeptLatent
from bottega.cache.records import latent_row, read_latent

LATENT = KeptLatent(digest=b"d" * 32, usage=Usage(frequency=3.0, step=5, used_at=7.0, created_at=2.0))


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
    fixed, use = latent_row(1, 5, LATENT)
    changed = dict(zip(("frequency", "used_at", "created_at"), use, strict=True)) | {column: value}
    row = StoredRow(key=fixed[:2], values=fixed, use=tuple(changed.values()), intact=True)
    assert read_latent(row) == KeptLatent(digest=LATENT.digest, usage=Usage(step=5))
