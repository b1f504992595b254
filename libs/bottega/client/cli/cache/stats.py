"""`bottega cache stats`: what each cache of the fleet holds, and how well it serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import click

from bottega.client.addons.cache.client import CacheFigures
from bottega.client.cli.cache.profiles import NO_PROFILE
from bottega.client.cli.gateway_options import address_option, connect, fleet_option
from bottega.client.cli.terminal import PlainTable, note, print_table, short_hash, size_text
from bottega.v1.cache_pb2 import GetCacheStatsResponse

_HIT = "hit"


@click.command("stats")
@address_option
@fleet_option
def command(*, address: str) -> None:
    """Say what the cache holds, and how well it serves."""
    with connect(address) as client:
        caches = client.cache_stats()
        names = {model.model_hash: model.name for model in client.models()}
    for cache in caches:
        if len(caches) > 1:
            note(f"The cache {cache.cache}:")
        _show(cache, names)


def _show(cache: CacheFigures, names: Mapping[str, str]) -> None:
    """names: of the models that are served, by their hashes."""
    models = {model.model_hash: model for model in cache.stats.models}
    if models:
        table = PlainTable("model", ">entries", ">latents", ">keys", "profile")
        for model_hash, model in models.items():
            name = names.get(model_hash, short_hash(model_hash))
            counts = (str(model.entries), str(model.latents), str(model.keys))
            table.add_row(name, *counts, "yes" if model.has_profile else "none")
        print_table(table)
    else:
        note("It holds nothing yet: what is drawn is recorded from the second request of a kind on.")
    facts = PlainTable("", "")
    for label, text in _facts(cache.stats):
        facts.add_row(label, text)
    facts.add_caption("Counted since it started.")
    print_table(facts)
    if any(not model.has_profile for model in models.values()):
        note(NO_PROFILE)


def _facts(stats: GetCacheStatsResponse) -> Iterator[tuple[str, str]]:
    yield "on the disk", f"{size_text(stats.bytes)} of {size_text(stats.budget_bytes)}"
    yield "questions", _counted(stats.lookups)
    if asked := sum(stats.lookups.values()):
        yield "hit rate", f"{stats.lookups.get(_HIT, 0) / asked:.3f}"
    yield "steps skipped", f"{stats.steps_skipped}"
    yield "evicted", f"{stats.evictions} latents; {stats.holes} hits had to do with fewer steps for it"
    yield "not recorded", _counted(stats.dropped)
    yield "match predictor", "on" if stats.predictor_on else "off"
    if stats.trouble:
        yield "trouble", stats.trouble


def _counted(counts: Mapping[str, int]) -> str:
    """Such as "12: 9 hit, 3 miss"."""
    parts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(counts.items()) if count)
    return f"{sum(counts.values())}{f': {parts}' if parts else ''}"
