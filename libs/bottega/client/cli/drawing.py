"""What commands that draw have in common: where pictures go, the request while it is under way, and what is said of it.

Knows nothing of how their arguments become a request's parameters.
"""

from __future__ import annotations

import functools
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bottega.client.addons.cache.samples import EMBEDDED_MODEL
from bottega.client.cli.addons import generation_parts
from bottega.client.cli.escaping import escaped_and_cut
from bottega.client.cli.options import DEFAULT_TIMEOUT_S, address_option, connect, gateway_choice
from bottega.client.cli.output_files import OutputTarget, choose_output, save_all
from bottega.client.cli.terminal import fail, note, say, share_text
from bottega.client.files import write_whole
from bottega.client.sdk.clients import Client
from bottega.client.types.events import Completed, Progress
from bottega.client.types.jobs import Priority
from bottega.client.types.options import GenerationOptions
from bottega.client.types.provenance import MaskUse, Parameters, Provenance
from bottega.errors import InvalidRequest, Violation

# In the order of a request's life, as the contract names them; those of add-ons are between the two.
_FIRST_STAGES = ("validate", "queue", "route", "decode_image", "encode")
_LAST_STAGES = ("denoise", "batch", "decode", "handoff", "encode_image")
_SHORTEST_S = 0.0005
# A side that is so many times as long or as short as those that a model was trained on is far from them.
_FAR = 2
# Of a prompt that was cut: enough to see where.
_CUT_COLUMNS = 100

_TIMEOUT_ADVICE = "Allow more time with --timeout SECONDS, ask for fewer steps, or wait for nothing with --detach."
_DETACHED_TIMEOUT_ADVICE = "Allow more time with --timeout SECONDS, or all that it takes: leave --timeout out."

_FILE = click.Path(dir_okay=False, path_type=Path)

Rename = Callable[[Violation], Violation]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingTerms:
    """What a command line says of a request beside what to draw. timeout_s: None where none was given."""

    output: Path | None
    num_images: int
    preview: Path | None
    detach: bool
    timeout_s: float | None
    priority: str
    address: str


_OPTIONS = (
    click.option(
        "-o", "--output", type=_FILE, help="Picture to write, replacing it; default: a new name from prompt and seed."
    ),
    click.option(
        "-n", "--num-images", type=click.IntRange(1, 8), default=1, help="Draw NAME-0.png, NAME-1.png and so on."
    ),
    click.option("--preview", type=_FILE, help="JPEG of the unfinished picture, rewritten as it goes."),
    click.option("--detach", is_flag=True, help="Do not wait: print the job's ID, for bottega jobs."),
    click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0.0, min_open=True),
        default=None,
        help=f"Seconds in which it must be done, or is given up; default: {DEFAULT_TIMEOUT_S:g}; with --detach none.",
    ),
    click.option(
        "--priority",
        type=click.Choice(("low", "normal", "high")),
        default="normal",
        help="How urgent it is beside your other pictures; those of other tenants do not wait for it.",
    ),
    address_option,
)


def drawing_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds options that the command gets as `terms`."""

    @functools.wraps(command)
    def with_terms(**said: Any) -> None:
        command(terms=DrawingTerms(**{name: said.pop(name) for name in DrawingTerms.__slots__}), **said)

    for option in reversed(_OPTIONS):
        with_terms = option(with_terms)
    return with_terms


def draw(
    prompt: str, options: GenerationOptions, terms: DrawingTerms, *, rename: Rename | None = None
) -> Completed | None:
    """Draws, saves the pictures and says what happened; None where nobody waits for them.

    rename: names what is wrong with a request by the command's own arguments, as the add-ons do by theirs.
    """
    target = choose_output(terms.output, options.get("format"), prompt)
    options["format"] = target.format
    _check_preview(terms)
    choice = gateway_choice(click.get_current_context())
    choice.timeout_advice = _DETACHED_TIMEOUT_ADVICE if terms.detach else _TIMEOUT_ADVICE
    began_s = time.monotonic()
    timeout_s = terms.timeout_s or DEFAULT_TIMEOUT_S
    with connect(terms.address, timeout_s=timeout_s) as client, _violations_by_given_names(options, rename):
        if terms.detach:
            job = client.submit(
                prompt,
                num_images=terms.num_images,
                deadline_s=terms.timeout_s,
                priority=Priority(terms.priority),
                **options,
            )
            _say_detached(job.id, terms.output)
            return None
        try:
            completed = _follow(client, prompt, options, terms)
        except KeyboardInterrupt:
            fail("stopped; the job is cancelled")
    _report(completed, target, time.monotonic() - began_s)
    return completed


@contextmanager
def _violations_by_given_names(options: GenerationOptions, rename: Rename | None) -> Iterator[None]:
    """What is wrong with the request is said by the names and files that were given."""
    try:
        yield
    except InvalidRequest as error:
        for part in generation_parts():
            error.violations = tuple(part.rename(violation, options) for violation in error.violations)
        if rename is not None:
            error.violations = tuple(map(rename, error.violations))
        raise


def _check_preview(terms: DrawingTerms) -> None:
    preview = terms.preview
    if preview and terms.detach:
        raise click.UsageError("nobody waits for previews with --detach; leave one of the two out.")
    if preview and preview.suffix.lower() not in (".jpg", ".jpeg"):
        raise click.UsageError(f"previews are JPEG: name the file {preview.with_suffix('.jpg')}")
    if preview and not preview.parent.is_dir():
        raise click.UsageError(f"there is no folder {preview.parent}; make it first.")


def _follow(client: Client, prompt: str, options: GenerationOptions, terms: DrawingTerms) -> Completed:
    from bottega.client.cli.progress_bar import show_progress

    preview, count = terms.preview, terms.num_images
    priority = Priority(terms.priority)
    stream = client.stream(prompt, num_images=count, preview=preview is not None, priority=priority, **options)
    return show_progress(stream, (lambda progress: _write_previews(preview, progress, count)) if preview else None)


def _say_detached(job_id: str, output: Path | None) -> None:
    """The id alone as the result, for scripts; what to do with it beside."""
    say(job_id)
    name = shlex.quote(job_id)
    note(f"bottega jobs watch {name}    follows it")
    note(f"bottega jobs get {name}{f' -o {shlex.quote(str(output))}' if output else ''} --wait    has its picture")


def _write_previews(target: Path, progress: Progress, num_images: int) -> None:
    for preview in progress.previews:
        write_whole(target.with_stem(f"{target.stem}-{preview.index}") if num_images > 1 else target, preview.jpeg)


def _report(completed: Completed, output: OutputTarget, elapsed_s: float) -> None:
    """Saves the pictures; says path, seed and times, and what was not as asked."""
    save_all(completed.images, output)
    stages = _stages(completed.provenance)
    say(f"{elapsed_s:.2f} s{f' ({stages})' if stages else ''}")
    for line in _source_lines(completed.provenance):
        note(line)
    if completed.provenance.mask != MaskUse():
        say(f"mask: {', '.join(_mask_facts(completed.provenance.mask))}")
    for part in generation_parts():
        for line in part.describe(completed.provenance):
            say(line)
        for line in part.warn(completed.provenance):
            note(line)
    note_approximate(completed.provenance)
    note_unknown_to_embedded_model(completed.provenance.parameters)
    if completed.provenance.vae_tiled:
        say("decoded in tiles, which are blended: not to the last level what stock Diffusers draws")
    for cut in completed.provenance.truncations:
        lost = escaped_and_cut(cut.text, _CUT_COLUMNS)
        note(f"{cut.field} was too long for the model; without effect: {lost}")


def note_approximate(provenance: Provenance) -> None:
    """Say on one line that a picture is approximate, and how to have it exact."""
    if provenance.exact:
        return
    stock_vae_dtypes = {"", provenance.dtype, *(["float32"] if provenance.dtype == "float16" else [])}
    if provenance.vae_tiled or provenance.vae_dtype not in stock_vae_dtypes:
        note("the picture is approximate: it was decoded in tiles or in another type, as the operator configured it")
    elif any(lora.rounded_otherwise for lora in provenance.loras):
        note(
            f"the picture is approximate: LoRAs were merged into {provenance.dtype} weights, as the operator allowed "
            "(engine.lora_merge_half_precision)"
        )
    elif provenance.parameters.fidelity != "exact":
        note("the picture is approximate; --fidelity exact draws it as stock Diffusers does")
    else:
        note("the picture is approximate in spite of --fidelity exact: an option of the request allows it")


def note_unknown_to_embedded_model(parameters: Parameters) -> None:
    """Say on one line that the embedded model drew what it was not trained for: other words, or far another size."""
    if parameters.model != EMBEDDED_MODEL:
        return
    from bottega.miniature.scenes import SIDE, unknown_words

    sides = (parameters.width, parameters.height)
    unknown = any(map(unknown_words, parameters.prompts or (parameters.prompt,)))
    if unknown or max(sides) >= _FAR * SIDE or min(sides) * _FAR <= SIDE:
        note("the embedded model draws simple shapes; `bottega up --model FOLDER` serves yours")


def _mask_facts(use: MaskUse) -> Iterator[str]:
    """What of the picture it redrew, and what had to be done with it first."""
    yield f"{share_text(use.share)} of what was drawn is redrawn"
    if use.crop_width:
        yield f"drawn: {use.crop_width}x{use.crop_height} pixels at {use.crop_x},{use.crop_y}"
    if use.resized:
        yield f"resized from {use.width}x{use.height}"
    if use.converted:
        yield "made grey first"
    if use.transparency_unread:
        yield "what is transparent in it was not looked at (--alpha redraws that)"


def _source_lines(provenance: Provenance) -> Iterator[str]:
    """Say what of the source is not in the picture, and what had to be done with it first."""
    source, size = provenance.source, provenance.parameters
    if source.resized and provenance.mask == MaskUse():  # of edits their command says what helps
        yield f"the image is {source.width}x{source.height}, and was resized to {size.width}x{size.height}"
    if provenance.source.transparency_unread:
        said = provenance.parameters
        kept_but_for_jpeg = said.keep_unmasked and said.format == "jpeg"
        why = "a JPEG has no transparency; PNG and WebP keep it" if kept_but_for_jpeg else "what is drawn is opaque"
        yield f"the image is transparent in parts, and the picture is not: {why}"
    if provenance.source.scaled_from_16_bits:
        yield "the image has 16 bits of grey, which were scaled to 8 (Diffusers makes nearly all of such levels white)"


def _stages(provenance: Provenance) -> str:
    """Seconds by stage in the order of a request's life, without those that took no time."""
    taken = {time.stage: time.seconds for time in provenance.times if time.seconds >= _SHORTEST_S}
    order = (*_FIRST_STAGES, *(part.stage for part in generation_parts()), *_LAST_STAGES)
    known = [stage for stage in order if stage in taken]
    return ", ".join(f"{stage} {taken[stage]:.3f}" for stage in [*known, *sorted(taken.keys() - set(known))])
