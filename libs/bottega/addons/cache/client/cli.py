"""`bottega cache`, and what the approximate cache adds to other commands: options, output lines and advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from bottega import errors, kinds
from bottega.addons.cache.client.types import CachedEntry, CacheStats
from bottega.addons.cache.starts import ENTRY_PATTERN, parse_start
from bottega.client.cli.addons import GenerationPart
from bottega.client.cli.error_help import storage_advice
from bottega.client.cli.options import ListGroup, address_option, connect, fleet_option, with_examples
from bottega.client.cli.terminal import (
    PlainTable,
    confirm,
    fail,
    moment_text,
    note,
    print_facts,
    print_table,
    say,
    short_hash,
    size_text,
)
from bottega.client.sdk.clients import Client
from bottega.client.types.provenance import Parameters, Provenance
from bottega.errors import BottegaError
from bottega.state_folder import write_whole

# Commands of a module that is imported on demand: the options of `warm` are those of all add-ons, of this one too.
_DRAWING = ("profile", "warm")


class _CacheGroup(ListGroup):
    default_command = "stats"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_DRAWING])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _DRAWING:
            return super().get_command(ctx, cmd_name)
        from bottega.addons.cache.client import cli_drawing

        return cli_drawing.profile if cmd_name == "profile" else cli_drawing.warm


@click.group("cache", cls=_CacheGroup)
@with_examples("""
    bottega cache                    shows what it has, and its hit rate
    bottega cache inspect ENTRY      shows one entry, and writes its picture
    bottega cache warm prompts.txt   draws each line, to fill the cache
    bottega cache profile            measures which similarity is enough
    bottega cache profiles           shows what was measured
    bottega cache clear              deletes all entries
    bottega generate "a red star" --cache
""")
def command() -> None:
    """Inspect, fill, measure and clear the approximate cache.

    The cache stores latents of drawn pictures. A request with a similar prompt can start from one and skip steps.
    """


@command.command("clear")
@click.option("--model", help="Delete only the entries of this model, a name or hash that bottega cache lists.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@address_option
@fleet_option
def clear(*, model: str | None, yes: bool, address: str) -> None:
    """Delete all entries, or those of one model. Measured profiles are kept."""
    with connect(address) as client:
        model_hash = _hash_of(client, model) if model else ""
        if not yes:
            which = f"all entries of {model}" if model else "all entries of the cache"
            confirm(f"Delete {which} for good?")
        number = client.clear_cache(model_hash)
    say(f"{number} {'entry' if number == 1 else 'entries'} deleted")


def _hash_of(client: Client, model: str) -> str:
    """Return the hash of a model, given by name or by the first digits of the hash.

    The model must be served or have entries in the cache. Ends the command unless exactly one model matches.
    """
    for served in client.models():
        if served.name == model:
            return served.model_hash
    known = {cached.model_hash for cache in client.cache_stats() for cached in cache.models}
    found = sorted(model_hash for model_hash in known if model_hash.startswith(model))
    if len(found) != 1:
        fail(
            f"{len(found)} models in the cache have a hash that begins with {model!r}"
            if found
            else f"the cache has no entries of a model {model!r}",
            "bottega cache lists the models that have entries.",
            status=2,
        )
    return found[0]


_HIT = "hit"


@command.command("stats")
@address_option
@fleet_option
def stats(*, address: str) -> None:
    """Show the contents of the cache, its hits and savings."""
    with connect(address) as client:
        caches = client.cache_stats()
        names = {model.model_hash: model.name for model in client.models()}
    for cache in caches:
        if cache.failure:
            note(f"The cache {cache.cache} is not shown: {cache.failure}")
            continue
        if len(caches) > 1:
            note(f"Cache {cache.cache}:")
        _show(cache, names)


def _show(cache: CacheStats, names: Mapping[str, str]) -> None:
    """Print the statistics of one cache. `names` has the names of served models, by their hashes."""
    if cache.models:
        table = PlainTable("model", ">entries", ">latents", ">keys", "profile")
        for model in cache.models:
            name = names.get(model.model_hash, short_hash(model.model_hash))
            counts = (str(model.entries), str(model.latents), str(model.keys))
            table.add_row(name, *counts, "yes" if model.has_profile else "none")
        print_table(table)
    else:
        note("The cache is empty. It records pictures from the second request with the same settings on.")
    print_facts(_stats_facts(cache), caption="Counts since the start of the cache.")
    if any(not model.has_profile for model in cache.models):
        _note_missing_profile()


def _stats_facts(stats: CacheStats) -> Iterator[tuple[str, str]]:
    yield "on disk", f"{size_text(stats.size_bytes)} of {size_text(stats.budget_bytes)}"
    yield "lookups", _counted(stats.lookups)
    if lookups := sum(stats.lookups.values()):
        yield "hit rate", f"{stats.lookups.get(_HIT, 0) / lookups:.3f}"
    yield "steps skipped", f"{stats.steps_skipped}"
    yield "evicted", f"{stats.evictions} latents; {stats.holes} hits skipped fewer steps because of that"
    yield "not recorded", _counted(stats.dropped)
    yield "match predictor", "on" if stats.predictor_on else "off"
    if stats.elsewhere:
        yield "elsewhere", f"{stats.elsewhere} entries belong to other caches since some joined or left"
    if stats.trouble:
        yield "trouble", stats.trouble


def _counted(counts: Mapping[str, int]) -> str:
    """Return a text such as "12: 9 hit, 3 miss"."""
    parts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(counts.items()) if count)
    return f"{sum(counts.values())}{f': {parts}' if parts else ''}"


@command.command("inspect")
@click.argument("entry")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="PNG file to write or replace; default: ENTRY.png.",
)
@address_option
@fleet_option
def inspect(*, entry: str, output: Path | None, address: str) -> None:
    """Show all about ENTRY, and write its small picture to a file.

    ENTRY has 32 hex digits. bottega generate prints it for a picture that started from the cache, followed by @STEP,
    which is ignored here.
    """
    name = entry.partition("@")[0]
    if ENTRY_PATTERN.fullmatch(name) is None:
        raise click.UsageError(f"{entry!r} is not the ID of an entry, which has 32 hex digits")
    target = output or Path(f"{name}.png")
    if target.suffix.lower() != ".png":
        raise click.UsageError(f"the picture is PNG: name the file {target.with_suffix('.png')}")
    with connect(address) as client:
        found = client.cache_entry(name)
    print_facts(_entry_facts(found))
    if not found.picture:
        say("The cache no longer has the entry's picture.")
        return
    try:
        write_whole(target, found.picture)
    except OSError as error:
        fail(f"the picture cannot be written: {error.strerror}", "Name another file with -o FILE.")
    say(str(target))


def _entry_facts(entry: CachedEntry) -> Iterator[tuple[str, str]]:
    parameters = entry.parameters
    yield "entry", entry.entry
    yield "prompt", parameters.prompt
    if parameters.negative_prompt is not None:
        yield "negative prompt", parameters.negative_prompt
    yield "drawn with", _drawn_with(parameters)
    if parameters.lora:
        yield "LoRAs", ", ".join(f"{lora.name}:{lora.scale:g}" for lora in parameters.lora)
    if parameters.controlnets:
        yield "ControlNets", ", ".join(net.name for net in parameters.controlnets)
    yield "model", short_hash(entry.model_hash)
    yield "latents", f"after {', '.join(map(str, entry.steps)) or 'no'} steps, {size_text(entry.size_bytes)}"
    yield "started from", f"{entry.hits} times"
    yield "recorded", moment_text(entry.recorded)
    yield "key", short_hash(entry.key)


def _drawn_with(parameters: Parameters) -> str:
    facts = [f"{parameters.num_inference_steps} steps", f"guidance {parameters.guidance_scale:g}"]
    if parameters.sampler is not None:
        facts.append(parameters.sampler)
    return ", ".join([*facts, f"{parameters.width}x{parameters.height}", f"seed {parameters.seed}"])


def _note_missing_profile() -> None:
    note("A model without a profile reuses nothing, except with embeddings 768 wide (Nirvana's thresholds).")
    note("Measure one: bottega cache profile --prompts FILE --clip FOLDER; the embedded model needs neither option.")


@command.command("profiles")
@click.option("--share", is_flag=True, help="First copy the profiles to caches that lack them.")
@address_option
@fleet_option
def profiles(*, share: bool, address: str) -> None:
    """Show the similarity thresholds that were measured for each model."""
    with connect(address) as client:
        if share:
            copied = client.share_cache_profiles()
            note(f"{copied} profile{'' if copied == 1 else 's'} copied")
        profiles = client.cache_profiles()
        names = {model.model_hash: model.name for model in client.models()}
    if not profiles:
        _note_missing_profile()
        return
    from bottega.addons.cache.client import cli_drawing

    cli_drawing.print_profiles(profiles, names)


class StartType(click.ParamType[str]):
    """A Click type for a cached latent, given as ENTRY@STEP."""

    name = "entry"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_start(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}, such as {'0f' * 16}@10", param, ctx)
        return value


def _describe(provenance: Provenance) -> Iterator[str]:
    if provenance.identical_job:
        yield f"nothing was drawn: this is the stored result of job {provenance.identical_job}, an identical request"
    starts = provenance.cached_starts
    for use in starts:
        picture = f"picture {use.image} " if len(starts) > 1 or use.image else ""
        how = "approximate, without the LoRAs" if use.without_loras else "approximate"
        facts = f"similarity {use.similarity:.3f}"
        if use.skipped_steps:  # workers of earlier versions do not report it
            facts += f"; {use.skipped_steps} step{'' if use.skipped_steps == 1 else 's'} skipped"
        yield f"cache: {picture}starts from {use.entry}, {facts} ({how})"


_IDENTICAL = click.option(
    "--identical/--no-identical",
    "identical_results",
    default=None,
    help="Return the stored result of an identical request (exact). Default: as the gateway is configured.",
)

PART = GenerationPart(
    options=(
        click.option(
            "--cache/--no-cache",
            "approximate_cache",
            default=None,
            help="Start from a cached latent of a similar prompt (approximate). Default: by --fidelity.",
        ),
        click.option(
            "--cache-entry",
            type=StartType(),
            metavar="ENTRY@STEP",
            help="Start from this cached latent, as the output of an earlier generation names it. With the same seed, "
            "the result is the same picture.",
        ),
        _IDENTICAL,
    ),
    stage="cache",
    describe=_describe,
    options_of_edits=(_IDENTICAL,),  # no edit starts from a cached latent
    approximations=("cache_entry",),
)


_BY_CLASS = {
    errors.CacheEntryNotFound: "It was evicted or cleared, or never existed; bottega cache shows what the cache has.",
    errors.CacheEntryGone: (
        "bottega cache inspect ENTRY shows whether the cache has it, and its settings: all but prompt and seed must be"
        " equal.\nWithout --cache-entry the picture is drawn from noise."
    ),
    errors.NoCache: "bottega fleet shows whether a cache has joined; bottega logs cache says why one has not.",
}


def advice_for(error: BottegaError) -> str | None:
    """Return advice about an error of the approximate cache; None for other errors."""
    if error.metadata.get("service") == kinds.CACHE and isinstance(error, errors.StorageUnavailable):
        return storage_advice(error, "approximate cache")
    return _BY_CLASS.get(type(error))
