"""The common steps of commands that draw: send the request, show its progress, save its pictures and report on them.

generation_options.py turns the arguments of a command into the parameters of a request.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bottega.client.cli.addons import generation_parts
from bottega.client.cli.options import DEFAULT_TIMEOUT_S, address_option, connect, gateway_choice
from bottega.client.cli.terminal import escaped_and_cut, fail, note, say, share_text
from bottega.client.sdk.clients import Client
from bottega.client.types.jobs import Completed, Priority, Progress
from bottega.client.types.options import GenerationOptions
from bottega.client.types.picture import SUFFIXES, Format, Picture
from bottega.client.types.provenance import MaskUse, Parameters, Provenance
from bottega.errors import InvalidRequest, Violation
from bottega.miniature import MODELS
from bottega.state_folder import write_whole

# Stages by their names in the contract, in the order of a request's life. Those of add-ons are between the two.
_FIRST_STAGES = ("validate", "queue", "route", "decode_image", "encode")
_LAST_STAGES = ("denoise", "batch", "decode", "handoff", "encode_image", "sign")
_SHORTEST_S = 0.0005
# A side is far from the size of the training pictures if it is so many times as long or as short.
_FAR = 2
# Columns of the lost part of a prompt: enough to see where it was cut.
_CUT_COLUMNS = 100

_TIMEOUT_ADVICE = "Allow more time with --timeout SECONDS, ask for fewer steps, or do not wait: --detach."
_DETACHED_TIMEOUT_ADVICE = "Allow more time with --timeout SECONDS, or leave --timeout out, which sets no limit."

_FILE = click.Path(dir_okay=False, path_type=Path)

Rename = Callable[[Violation], Violation]

_SUFFIX_OF: dict[Format, str] = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}
_LONGEST_STEM = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingTerms:
    """The options that say how a command draws and where to, in contrast to the parameters of the picture."""

    output: Path | None
    num_images: int
    preview: Path | None
    detach: bool
    timeout_s: float | None
    """Time-out in seconds; None if --timeout was not given."""
    priority: str
    webhook: str | None
    address: str


_OPTIONS = (
    click.option(
        "-o", "--output", type=_FILE, help="Picture file to write or replace; default: a new name from prompt and seed."
    ),
    click.option(
        "-n",
        "--num-images",
        type=click.IntRange(1, 8),
        default=1,
        help="Number of pictures: NAME-0.png, NAME-1.png and so on.",
    ),
    click.option("--preview", type=_FILE, help="JPEG file of the unfinished picture, replaced while it is drawn."),
    click.option("--detach", is_flag=True, help="Do not wait; print the job's ID, for bottega jobs get ID."),
    click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0.0, min_open=True),
        default=None,
        help=f"Seconds after which to give up. Default: {DEFAULT_TIMEOUT_S:g}; no limit with --detach.",
    ),
    click.option(
        "--priority",
        type=click.Choice(("low", "normal", "high")),
        default="normal",
        help="Priority among your own requests; those of other tenants are not affected.",
    ),
    click.option("--webhook", metavar="URL", help="With --detach: URL that gets a signed POST when the job ends."),
    address_option,
)


def drawing_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of DrawingTerms, which are passed to the command as `terms`."""

    @functools.wraps(command)
    def with_terms(**arguments: Any) -> None:
        command(terms=DrawingTerms(**{name: arguments.pop(name) for name in DrawingTerms.__slots__}), **arguments)

    for option in reversed(_OPTIONS):
        with_terms = option(with_terms)
    return with_terms


def draw(
    prompts: Sequence[str], options: GenerationOptions, terms: DrawingTerms, *, rename: Rename | None = None
) -> Completed | None:
    """Draw pictures, save them and report on them. Return None with --detach, which does not wait for them.

    Args:
        prompts: One prompt for all pictures, or the prompt of each picture.
        options: The request's other parameters.
        terms: The command's other options.
        rename: Replaces the field's name in a violation with the command's own argument.
    """
    if len(prompts) > 1 and terms.num_images > 1:
        raise click.UsageError("--num-images is for a single prompt; several prompts are one picture each.")
    target = choose_output(terms.output, options.get("format"), prompts)
    options["format"] = target.format
    _check_preview(terms)
    if terms.webhook is not None and not terms.detach:
        raise click.UsageError("--webhook is for --detach; otherwise the command itself waits for the end.")
    choice = gateway_choice(click.get_current_context())
    choice.timeout_advice = _DETACHED_TIMEOUT_ADVICE if terms.detach else _TIMEOUT_ADVICE
    began_s = time.monotonic()
    timeout_s = terms.timeout_s or DEFAULT_TIMEOUT_S
    with connect(terms.address, timeout_s=timeout_s) as client, _violations_by_given_names(options, rename):
        if terms.detach:
            job = client.submit(
                _prompt_argument(prompts),
                num_images=terms.num_images,
                deadline_s=terms.timeout_s,
                priority=Priority(terms.priority),
                webhook=terms.webhook,
                **options,
            )
            _say_detached(job.id, terms.output)
            return None
        try:
            completed = _follow(client, prompts, options, terms)
        except KeyboardInterrupt:
            fail("interrupted; the job is cancelled")
    _report(completed, target, time.monotonic() - began_s)
    return completed


@contextmanager
def _violations_by_given_names(options: GenerationOptions, rename: Rename | None) -> Iterator[None]:
    """Replace field names in the violations of an invalid request with options and files of the command line."""
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
        raise click.UsageError("--preview and --detach cannot be combined; leave one of them out.")
    if preview and preview.suffix.lower() not in (".jpg", ".jpeg"):
        raise click.UsageError(f"a preview is a JPEG: name the file {preview.with_suffix('.jpg')}")
    if preview and not preview.parent.is_dir():
        raise click.UsageError(f"there is no folder {preview.parent}; make it first.")


def _prompt_argument(prompts: Sequence[str]) -> str | list[str]:
    return prompts[0] if len(prompts) == 1 else list(prompts)


def _follow(client: Client, prompts: Sequence[str], options: GenerationOptions, terms: DrawingTerms) -> Completed:
    from bottega.client.cli.progress_bar import show_progress

    preview, count = terms.preview, max(terms.num_images, len(prompts))
    stream = client.stream(
        _prompt_argument(prompts),
        num_images=terms.num_images,
        preview=preview is not None,
        priority=Priority(terms.priority),
        **options,
    )
    return show_progress(stream, (lambda progress: _write_previews(preview, progress, count)) if preview else None)


def _say_detached(job_id: str, output: Path | None) -> None:
    """Print only the job's ID on stdout, for scripts, and hints for using it on stderr."""
    say(job_id)
    name = shlex.quote(job_id)
    note(f"Follow it: bottega jobs watch {name}")
    note(f"Get its pictures: bottega jobs get {name}{f' -o {shlex.quote(str(output))}' if output else ''} --wait")


def _write_previews(target: Path, progress: Progress, num_images: int) -> None:
    for preview in progress.previews:
        write_whole(target.with_stem(f"{target.stem}-{preview.index}") if num_images > 1 else target, preview.jpeg)


def _report(completed: Completed, output: OutputTarget, elapsed_s: float) -> None:
    """Save the pictures; print their paths and times, and warnings."""
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
        say("the VAE decoded the picture in blended tiles, so its pixels differ slightly from stock Diffusers")
    for cut in completed.provenance.truncations:
        lost = escaped_and_cut(cut.text, _CUT_COLUMNS)
        note(f"{cut.field} was too long for the model, and this part was ignored: {lost}")


def note_approximate(provenance: Provenance) -> None:
    """Print whether a picture is approximate, why, and how to get an exact one."""
    if provenance.exact:
        return
    stock_vae_dtypes = {"", provenance.dtype, *(["float32"] if provenance.dtype == "float16" else [])}
    if provenance.vae_tiled or provenance.vae_dtype not in stock_vae_dtypes:
        note("the picture is approximate: the VAE decoded in tiles or in another dtype, as the operator configured")
    elif any(lora.rounded_otherwise for lora in provenance.loras):
        note(
            f"the picture is approximate: LoRAs were merged into {provenance.dtype} weights, as the operator allowed "
            "(engine.loras.merge_half_precision)"
        )
    elif provenance.shared_in_half_precision:
        alone = provenance.parameters.shared_turns is False
        advice = "" if alone else "; --fidelity exact computes them alone, as stock Diffusers does"
        note(
            f"the picture is approximate: in {provenance.dtype}, its steps were computed in batches with others or in "
            f"parts, which changes the rounding{advice}"
        )
    elif provenance.parameters.fidelity != "exact":
        note("the picture is approximate; --fidelity exact draws it as stock Diffusers does")
    else:
        note("the picture is approximate despite --fidelity exact, because another option allows it")


def note_unknown_to_embedded_model(parameters: Parameters) -> None:
    """Print a hint if an embedded model drew words or a size that it was not trained for."""
    if parameters.model not in MODELS:
        return
    from bottega.miniature.scenes import SIDE, unknown_words

    sides = (parameters.width, parameters.height)
    unknown = any(map(unknown_words, parameters.prompts or (parameters.prompt,)))
    if unknown or max(sides) >= _FAR * SIDE or min(sides) * _FAR <= SIDE:
        what = f"{parameters.model}, the embedded model, only draws simple shapes"
        note(f"{what}; `bottega up --model FOLDER` serves yours")


def _mask_facts(use: MaskUse) -> Iterator[str]:
    yield f"it covers {share_text(use.share)} of what was drawn"
    if use.crop_width:
        yield f"drew {use.crop_width}x{use.crop_height} pixels at {use.crop_x},{use.crop_y}"
    if use.resized:
        yield f"resized from {use.width}x{use.height}"
    if use.converted:
        yield "converted to grey"
    if use.transparency_unread:
        yield "its transparency was ignored (--alpha redraws transparent parts)"


def _source_lines(provenance: Provenance) -> Iterator[str]:
    source, size = provenance.source, provenance.parameters
    if source.resized and provenance.mask == MaskUse():  # bottega edit has advice of its own
        yield f"the image was resized from {source.width}x{source.height} to {size.width}x{size.height}"
    if provenance.source.transparency_unread:
        parameters = provenance.parameters
        kept_but_for_jpeg = parameters.keep_unmasked and parameters.format == "jpeg"
        why = "a JPEG has no transparency; use PNG or WebP" if kept_but_for_jpeg else "drawn pixels are opaque"
        yield f"the transparency of the image is not kept: {why}"
    if provenance.source.scaled_from_16_bits:
        yield "the image has 16 bits of grey, which were scaled to 8 (Diffusers makes nearly all of these white)"


def _stages(provenance: Provenance) -> str:
    """Return the seconds of each stage, in the order in which a request passes them; without stages that took none."""
    taken = {time.stage: time.seconds for time in provenance.times if time.seconds >= _SHORTEST_S}
    order = (*_FIRST_STAGES, *(part.stage for part in generation_parts()), *_LAST_STAGES)
    known = [stage for stage in order if stage in taken]
    return ", ".join(f"{stage} {taken[stage]:.3f}" for stage in [*known, *sorted(taken.keys() - set(known))])


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTarget:
    """The file name and format for the pictures of one command."""

    named: Path | None
    """The file that the user named; None for a new name made from prompt and seed, which replaces no file.

    The named file is replaced if it exists. Its suffix fits `format`, or is missing."""
    format: Format
    prompts: Sequence[str]
    """The prompt of all pictures, or the prompt of each picture."""

    def path_of(self, picture: Picture, count: int) -> Path:
        """Return the file for a picture of a job that has `count` pictures."""
        if self.named is None:
            prompt = self.prompts[picture.index] if picture.index < len(self.prompts) else self.prompts[0]
            return _free(Path(f"{_slug(prompt)}-{picture.seed}{_SUFFIX_OF[self.format]}"))
        number = f"-{picture.index}" if count > 1 else ""
        return self.named.with_name(f"{self.named.stem}{number}{self.named.suffix or _SUFFIX_OF[self.format]}")


def choose_output(named: Path | None, format: Format | None, prompts: Sequence[str]) -> OutputTarget:
    """Return the target of a command's pictures. Raise click.UsageError if they cannot be written there."""
    by_suffix = SUFFIXES.get(named.suffix.lower()) if named else None
    if named and named.suffix and not by_suffix:
        raise click.UsageError(f"{named}: its name must end in {', '.join(SUFFIXES)}; try {named}.png, for example.")
    if format and by_suffix and by_suffix != format:
        raise click.UsageError(f"{named} is the name of a {by_suffix} file, but the format is {format}.")
    folder = named.parent if named else Path()
    if not folder.is_dir():
        raise click.UsageError(f"there is no folder {folder}; make it first.")
    if not os.access(folder, os.W_OK):
        raise click.UsageError(f"the folder {folder.resolve()} cannot be written to.")
    return OutputTarget(named=named, format=format or by_suffix or "png", prompts=prompts)


def save_all(pictures: Sequence[Picture], output: OutputTarget) -> None:
    """Save the pictures of one job and print their files. End the command if that fails."""
    for picture in pictures:
        path = output.path_of(picture, len(pictures))
        replaced = path.exists()
        try:
            picture.save(path)
        except OSError as error:
            fail(
                f"the picture cannot be written: {error.strerror}",
                f"The gateway keeps it for a while: bottega jobs get {picture.job_id} -o FILE",
            )
        size = f"{picture.width}x{picture.height}"
        say(f"{path}  {size}  seed {picture.seed}{'  (replaced)' if replaced else ''}")


def _slug(prompt: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")
    if len(words) > _LONGEST_STEM:
        words = words[: _LONGEST_STEM + 1].rpartition("-")[0] or words[:_LONGEST_STEM]
    return words or "picture"


def _free(target: Path) -> Path:
    taken, number = target, 2
    while taken.exists():
        taken = target.with_stem(f"{target.stem}-{number}")
        number += 1
    return taken
