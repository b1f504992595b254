"""`bottega cache` and the options, output lines and advice that the approximate cache adds to other commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from bottega import errors, kinds
from bottega.client.addons.cache.client import CacheFigures
from bottega.client.cli.addons import GenerationPart
from bottega.client.cli.error_help import storage_advice
from bottega.client.cli.options import ListGroup, address_option, connect, fleet_option
from bottega.client.cli.terminal import PlainTable, confirm, fail, note, print_table, say, short_hash, size_text
from bottega.client.files import write_whole
from bottega.client.sdk.clients import Client
from bottega.client.types.options import SAMPLERS
from bottega.client.types.provenance import Provenance
from bottega.errors import BottegaError
from bottega.latents import ENTRY_PATTERN, parse_start
from bottega.latents.names import FRACTIONS
from bottega.v1.cache_pb2 import CacheEntry, CacheLengthClass, CacheProfile, GetCacheStatsResponse
from bottega.v1.generation_pb2 import GenerationSpec

# Commands of a module that is imported on demand: the options of `warm` are those of all add-ons, of this one too.
_DRAWING = ("profile", "warm")


class _CacheGroup(ListGroup):
    default_command = "stats"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_DRAWING])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _DRAWING:
            return super().get_command(ctx, cmd_name)
        from bottega.client.addons.cache import cli_drawing

        return cli_drawing.profile if cmd_name == "profile" else cli_drawing.warm


@click.group("cache", cls=_CacheGroup)
def command() -> None:
    """Look after the approximate cache: stats, inspect, warm, clear, profile, profiles.

    \b
      bottega cache                    what it holds, and how well it serves
      bottega cache inspect ENTRY      one entry; writes its picture
      bottega cache warm prompts.txt   draws a prompt a line, so that later ones may start from theirs
      bottega cache profile            measures which similarity is enough to skip how many steps
      bottega cache profiles           what was measured
      bottega cache clear              forgets the entries
      bottega generate "a red star" --cache
    """


@command.command("clear")
@click.option("--model", help="Only the entries of this model, as bottega models or bottega cache lists it.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@address_option
@fleet_option
def clear(*, model: str | None, yes: bool, address: str) -> None:
    """Forget the entries: all, or those of one model. Profiles stay."""
    with connect(address) as client:
        model_hash = _hash_of(client, model) if model else ""
        if not yes:
            whose = f"all entries of {model}" if model else "all entries of the cache"
            note(f"{whose} will be deleted for good")
            confirm("Delete?")
        number = client.clear_cache(model_hash)
    say(f"{number} {'entry' if number == 1 else 'entries'} deleted")


def _hash_of(client: Client, model: str) -> str:
    """A model that is not served now is meant by its hash, or by the beginning of it, as tables show it."""
    for served in client.models():
        if served.name == model:
            return served.model_hash
    known = {each.model_hash for cache in client.cache_stats() for each in cache.stats.models}
    found = sorted(each for each in known if each.startswith(model))
    if len(found) != 1:
        fail(
            f"{len(found)} models that the cache has entries of have a hash that begins with {model!r}"
            if found
            else f"the cache has no entries of a model {model!r}",
            "bottega cache lists the models that it has entries of.",
            status=2,
        )
    return found[0]


_HIT = "hit"


@command.command("stats")
@address_option
@fleet_option
def stats(*, address: str) -> None:
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
    for label, text in _stats_facts(cache.stats):
        facts.add_row(label, text)
    facts.add_caption("Counted since it started.")
    print_table(facts)
    if any(not model.has_profile for model in models.values()):
        note(NO_PROFILE)


def _stats_facts(stats: GetCacheStatsResponse) -> Iterator[tuple[str, str]]:
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


@command.command("inspect")
@click.argument("entry")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="PNG to write the picture to, replacing it; default: the entry's name.",
)
@address_option
@fleet_option
def inspect(*, entry: str, output: Path | None, address: str) -> None:
    """Say all that is known of ENTRY, and write its picture, which is small.

    ENTRY is 32 hex digits, as a picture that started from it was said to; what follows an @ does not matter.
    """
    name = entry.partition("@")[0]
    if ENTRY_PATTERN.fullmatch(name) is None:
        raise click.UsageError(f"{entry!r} is no entry: 32 hex digits are wanted, with @STEP or without")
    target = output or Path(f"{name}.png")
    if target.suffix.lower() != ".png":
        raise click.UsageError(f"the picture is PNG: name the file {target.with_suffix('.png')}")
    with connect(address) as client:
        found = client.cache_entry(name)
    table = PlainTable("", "")
    for label, text in _entry_facts(found.entry):
        table.add_row(label, text)
    print_table(table)
    if not found.picture:
        say("its picture is gone")
        return
    try:
        write_whole(target, found.picture)
    except OSError as error:
        fail(f"the picture cannot be written: {error.strerror}", "Name another file: -o FILE")
    say(str(target))


def _entry_facts(entry: CacheEntry) -> Iterator[tuple[str, str]]:
    spec = entry.parameters
    yield "entry", entry.entry
    yield "prompt", spec.prompt
    if spec.HasField("negative_prompt"):
        yield "negative prompt", spec.negative_prompt
    yield "drawn with", _drawn_with(spec)
    if spec.loras:
        yield "LoRAs", ", ".join(f"{lora.name}:{lora.scale:g}" for lora in spec.loras)
    if spec.controlnets:
        yield "ControlNets", ", ".join(net.name for net in spec.controlnets)
    yield "model", short_hash(entry.model_hash)
    yield "latents", f"after {', '.join(map(str, entry.steps)) or 'no'} steps, {size_text(entry.bytes)}"
    yield "started from", f"{entry.hits} times"
    yield "recorded", _moment(entry.recorded_s)
    yield "key", short_hash(entry.key)


def _drawn_with(spec: GenerationSpec) -> str:
    samplers = {number: name for name, number in SAMPLERS.items()}
    facts = [f"{spec.num_inference_steps} steps", f"guidance {spec.guidance_scale:g}"]
    if spec.sampler in samplers:
        facts.append(samplers[spec.sampler])
    return ", ".join([*facts, f"{spec.width}x{spec.height}", f"seed {spec.seed}"])


def _moment(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return "at no time that there is"


NO_PROFILE = (
    "Without a profile nothing is reused for a model (but by Nirvana's own thresholds, where its embeddings are 768 "
    "wide). To measure one: bottega cache profile --prompts FILE --clip FOLDER; for the embedded model without both."
)

# A fraction that a store keeps as a number of 64 bits is one of ours.
_CLOSE = 1e-6


@command.command("profiles")
@address_option
@fleet_option
def profiles(*, address: str) -> None:
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


class StartType(click.ParamType[str]):
    """Says what is wrong before anything is asked for."""

    name = "entry"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_start(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}, such as {'0f' * 16}@10", param, ctx)
        return value


def _describe(provenance: Provenance) -> Iterator[str]:
    if provenance.identical_job:
        yield f"nothing was drawn: it is the stored result of job {provenance.identical_job}, an identical request"
    starts = provenance.cached_starts
    for use in starts:
        picture = f"picture {use.image} " if len(starts) > 1 or use.image else ""
        how = "approximate, without the LoRAs" if use.without_loras else "approximate"
        facts = f"similarity {use.similarity:.3f}"
        if use.skipped_steps:  # workers of earlier versions do not say it
            facts += f"; {use.skipped_steps} step{'' if use.skipped_steps == 1 else 's'} skipped"
        yield f"cache: {picture}starts from {use.entry}, {facts} ({how})"


_IDENTICAL = click.option(
    "--identical/--no-identical",
    "identical_results",
    default=None,
    help="Take the stored result of an identical request (exact). Default: as the gateway is configured.",
)

PART = GenerationPart(
    options=(
        click.option(
            "--cache/--no-cache",
            "approximate_cache",
            default=None,
            help="Start from the latent of a similar prompt's picture (approximate). Default: by --fidelity.",
        ),
        click.option(
            "--cache-entry",
            type=StartType(),
            metavar="ENTRY@STEP",
            help="Start from this cached latent, as an earlier picture was said to; with its seed, draws it again.",
        ),
        _IDENTICAL,
    ),
    stage="cache",
    describe=_describe,
    options_of_edits=(_IDENTICAL,),  # no edit starts from a cached latent
)


_BY_CLASS = {
    errors.CacheEntryNotFound: "It was evicted or cleared, or never there; bottega cache says what the cache holds.",
    errors.CacheEntryGone: (
        "bottega cache inspect ENTRY says whether it is there, and what for: all but prompt and seed has to be equal. "
        "Without --cache-entry the picture is drawn from noise."
    ),
    errors.NoCache: "bottega fleet shows whether an approximate cache has joined; bottega logs cache why one has not.",
}


def advice_for(error: BottegaError) -> str | None:
    """None where the error is about no cache."""
    if error.metadata.get("service") == kinds.CACHE and isinstance(error, errors.StorageUnavailable):
        return storage_advice(error, "approximate cache")
    return _BY_CLASS.get(type(error))
