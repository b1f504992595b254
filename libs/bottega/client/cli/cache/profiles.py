"""`bottega cache profiles`: which similarity of prompts is enough to skip how many steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import click

from bottega.client.cli.gateway_options import address_option, connect, fleet_option
from bottega.client.cli.terminal import PlainTable, note, print_table, short_hash
from bottega.latents.names import FRACTIONS
from bottega.v1.cache_pb2 import CacheLengthClass, CacheProfile

NO_PROFILE = (
    "Without a profile nothing is reused for a model (but by Nirvana's own thresholds, where its embeddings are 768 "
    "wide). To measure one: bottega cache profile --prompts FILE --clip FOLDER; for the embedded model without both."
)

# A fraction that a store keeps as a number of 64 bits is one of ours.
_CLOSE = 1e-6


@click.command("profiles")
@address_option
@fleet_option
def command(*, address: str) -> None:
    """List, for each model, the similarity from which so many of the steps are skipped."""
    with connect(address) as client:
        profiles = client.cache_profiles()
        names = {model.model_hash: model.name for model in client.models()}
    if not profiles:
        note(NO_PROFILE)
        return
    print_profiles(profiles, names)


def print_profiles(profiles: Sequence[CacheProfile], names: Mapping[str, str]) -> None:
    """A table, and how each was measured. names: of models, by their hash."""
    table = PlainTable("model", "fidelity", "words", *(f">{fraction:.0%}" for fraction in FRACTIONS), wraps=("model",))
    titles = {each.model_hash: names.get(each.model_hash, short_hash(each.model_hash)) for each in profiles}
    for profile in profiles:
        for row in _rows(profile):
            table.add_row(titles[profile.model_hash], *row)
    table.add_caption("Columns are shares of the steps; - is never skipped.")
    print_table(table)
    for profile in profiles:
        if profile.about:
            note(f"{titles[profile.model_hash]}: {profile.about}")


def _rows(profile: CacheProfile) -> Iterator[tuple[str, ...]]:
    for fidelity, classes in (("balanced", profile.balanced), ("fast", profile.fast)):
        yield from ((fidelity, *row) for row in _class_rows(classes))


def _class_rows(classes: Sequence[CacheLengthClass]) -> Iterator[tuple[str, ...]]:
    for each in classes:
        words = f"up to {each.max_words}" if each.max_words else "more" if len(classes) > 1 else "any"
        yield (words, *(_similarity(each, fraction) for fraction in FRACTIONS))


def _similarity(each: CacheLengthClass, fraction: float) -> str:
    found = [threshold.similarity for threshold in each.thresholds if abs(threshold.fraction - fraction) < _CLOSE]
    return f"{found[0]:.3f}" if found else "-"
