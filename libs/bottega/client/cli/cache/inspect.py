"""`bottega cache inspect`: one entry of the approximate cache, and its picture as a file."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import click

from bottega.client.cli.gateway_options import address_option, connect, fleet_option
from bottega.client.cli.terminal import PlainTable, fail, print_table, say, short_hash, size_text
from bottega.client.files import write_whole
from bottega.client.types.options import SAMPLERS
from bottega.latents import ENTRY_PATTERN
from bottega.v1.cache_pb2 import CacheEntry
from bottega.v1.generation_pb2 import GenerationSpec


@click.command("inspect")
@click.argument("entry")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="PNG to write the picture to, replacing it; default: the entry's name.",
)
@address_option
@fleet_option
def command(*, entry: str, output: Path | None, address: str) -> None:
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
    for label, text in _facts(found.entry):
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


def _facts(entry: CacheEntry) -> Iterator[tuple[str, str]]:
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
