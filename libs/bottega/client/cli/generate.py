"""`bottega generate`: draws pictures and says where they are."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import click

from bottega.client.cli.addons import generation_parts
from bottega.client.cli.escaping import escaped_and_cut
from bottega.client.cli.gateway_options import DEFAULT_TIMEOUT_S, address_option, connect, gateway_choice
from bottega.client.cli.generation_options import generation_options
from bottega.client.cli.output_files import OutputTarget, choose_output, save_all
from bottega.client.cli.terminal import fail, note, say
from bottega.client.files import write_whole
from bottega.client.sdk.clients import Client
from bottega.client.types.events import Completed, Progress
from bottega.client.types.options import GenerationOptions
from bottega.client.types.png_parameters import parameters_of
from bottega.errors import InvalidRequest
from bottega.v1.generation_pb2 import Provenance

# In the order of a request's life, as the contract names them; those of add-ons are between the two.
_FIRST_STAGES = ("validate", "queue", "route", "decode_image", "encode")
_LAST_STAGES = ("denoise", "batch", "decode", "handoff", "encode_image")
_SHORTEST_S = 0.0005
# Of a prompt that was cut: enough to see where.
_CUT_COLUMNS = 100

_TIMEOUT_ADVICE = "Allow more time with --timeout SECONDS, ask for fewer steps, or wait for nothing with --detach."
_DETACHED_TIMEOUT_ADVICE = "Allow more time with --timeout SECONDS, or all that it takes: leave --timeout out."

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("generate")
@click.argument("prompt", required=False)
@click.option(
    "-o", "--output", type=_FILE, help="Picture to write, replacing it; default: a new name from prompt and seed."
)
@click.option("-n", "--num-images", type=click.IntRange(1, 8), default=1, help="Draw NAME-0.png, NAME-1.png and so on.")
@click.option(
    "--like",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Draw this picture of ours again, as changed by the other options.",
)
@generation_options
@click.option("--preview", type=_FILE, help="JPEG of the unfinished picture, rewritten as it goes.")
@click.option("--detach", is_flag=True, help="Do not wait: print the job's ID, for bottega jobs.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.0, min_open=True),
    default=None,
    help=f"Seconds in which it must be done, or it is given up; default: {DEFAULT_TIMEOUT_S:g}, with --detach none.",
)
@address_option
def command(
    *,
    prompt: str | None,
    output: Path | None,
    num_images: int,
    like: Path | None,
    preview: Path | None,
    detach: bool,
    timeout_s: float | None,
    address: str,
    **given: Any,
) -> None:
    """Draw a picture of PROMPT.

    \b
      bottega generate "a big red star on the left on a blue background" -o star.png --seed 7
      bottega generate --like star.png --steps 50 -o better.png
      bottega generate "a big red star" --detach
      bottega generate "a big red star" --control edges=edges.png:0.8
    """
    prompt, options = _parameters(prompt, like, given)
    target = choose_output(output, options.get("format"), prompt)
    options["format"] = target.format
    _check_preview(preview, detach=detach)
    choice = gateway_choice(click.get_current_context())
    choice.timeout_advice = _DETACHED_TIMEOUT_ADVICE if detach else _TIMEOUT_ADVICE
    began_s = time.monotonic()
    with connect(address, timeout_s=timeout_s or DEFAULT_TIMEOUT_S) as client, _violations_by_given_names(options):
        if detach:
            job = client.submit(prompt, num_images=num_images, deadline_s=timeout_s, **options)
            _say_detached(job.id, output)
            return
        try:
            completed = _draw(client, prompt, options, num_images=num_images, preview=preview)
        except KeyboardInterrupt:
            fail("stopped; the job is cancelled")
    _report(completed, target, time.monotonic() - began_s)


@contextmanager
def _violations_by_given_names(options: GenerationOptions) -> Iterator[None]:
    """What is wrong with the request is said by the names and files that were given."""
    try:
        yield
    except InvalidRequest as error:
        for part in generation_parts():
            error.violations = tuple(part.rename(violation, options) for violation in error.violations)
        raise


def _parameters(prompt: str | None, like: Path | None, given: dict[str, Any]) -> tuple[str, GenerationOptions]:
    """The prompt and the arguments: those of `like`, changed by those that were given."""
    then, options = parameters_of(like) if like else (None, {})
    prompt = then if prompt is None else prompt
    if prompt is None:
        raise click.UsageError("say what to draw: bottega generate PROMPT")
    options.pop("format", None)  # the new file's name says it
    for part in generation_parts():
        part.merge(options, given, like)
    chosen = {name: value for name, value in given.items() if value is not None and value != ()}
    options = cast("GenerationOptions", options | chosen)
    if like and "strength" in options and "image" not in options:
        raise click.UsageError(f"{like} was drawn from another picture: give that one by --image.")
    return prompt, options


def _check_preview(preview: Path | None, *, detach: bool) -> None:
    if preview and detach:
        raise click.UsageError("nobody waits for previews with --detach; leave one of the two out.")
    if preview and preview.suffix.lower() not in (".jpg", ".jpeg"):
        raise click.UsageError(f"previews are JPEG: name the file {preview.with_suffix('.jpg')}")
    if preview and not preview.parent.is_dir():
        raise click.UsageError(f"there is no folder {preview.parent}; make it first.")


def _draw(
    client: Client, prompt: str, options: GenerationOptions, *, num_images: int, preview: Path | None
) -> Completed:
    from bottega.client.cli.progress_bar import show_progress

    stream = client.stream(prompt, num_images=num_images, preview=preview is not None, **options)
    return show_progress(stream, (lambda progress: _write_previews(preview, progress, num_images)) if preview else None)


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
    for part in generation_parts():
        for line in part.describe(completed.provenance):
            say(line)
    for cut in completed.provenance.truncations:
        lost = escaped_and_cut(cut.text, _CUT_COLUMNS)
        note(f"{cut.field} was too long for the model; without effect: {lost}")


def _stages(provenance: Provenance) -> str:
    """Seconds by stage in the order of a request's life, without those that took no time."""
    taken = {time.stage: time.seconds for time in provenance.times if time.seconds >= _SHORTEST_S}
    order = (*_FIRST_STAGES, *(part.stage for part in generation_parts()), *_LAST_STAGES)
    known = [stage for stage in order if stage in taken]
    return ", ".join(f"{stage} {taken[stage]:.3f}" for stage in [*known, *sorted(taken.keys() - set(known))])
