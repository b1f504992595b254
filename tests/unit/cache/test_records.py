"""Rows of latents: what is damaged in them is noticed, but for uses, which begin anew."""

from __future__ import annotations

import contextlib
import math
import sqlite3

import pytest

from bottega.blobstore import StoredRow
from bottega.cache.eviction import Usage
from bottega.cache.latent import KeptLatent
from bottega.cache.records import SCHEMA, latent_row, read_latent

LATENT = KeptLatent(digest=b"d" * 32, usage=Usage(frequency=3.0, step=5, used_at=7.0, created_at=2.0))


def _read_again(damage: str = "") -> list[StoredRow]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(SCHEMA.parts.statement)
        SCHEMA.parts.add(connection, [latent_row(1, 5, LATENT)])
        if damage:
            connection.execute(f"UPDATE latents SET {damage}")
        return list(SCHEMA.parts.read(connection))


def test_a_latent_is_read_as_it_was_written() -> None:
    (row,) = _read_again()
    assert row.intact
    assert read_latent(row) == LATENT


@pytest.mark.parametrize("damage", ["number = 2", "step = 10", "digest = zeroblob(32)", "checksum = 0"])
def test_a_row_that_is_another_ones_is_damaged(damage: str) -> None:
    assert not _read_again(damage)[0].intact


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
