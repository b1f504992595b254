"""`bottega generate`: draws pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bottega.client.cli.drawing import DrawingTerms, draw, drawing_options
from bottega.client.cli.generation_options import changed, generation_options
from bottega.client.cli.options import with_examples
from bottega.client.types.file_parameters import parameters_of
from bottega.client.types.inputs import MASK_OPTIONS
from bottega.client.types.options import GenerationOptions


@click.command("generate")
@click.argument("prompt", required=False)
@click.option(
    "--like",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Repeat this earlier picture, with the other options changed.",
)
@click.option(
    "-p",
    "--prompt",
    "more_prompts",
    metavar="TEXT",
    multiple=True,
    help="Another prompt; its picture is drawn in the same request. Repeatable.",
)
@generation_options
@click.option(
    "--keep-for-editing/--no-keep-for-editing",
    default=None,
    help="Store the picture's latents and activations, so that even its first bottega edit is fast.",
)
@drawing_options
@with_examples("""
    bottega generate "a big red star on a blue background" -o star.png --seed 7
    bottega generate --like star.png --steps 50 -o better.png
    bottega generate "a big red star" -p "a small green ring" -o both.png
    bottega generate "a big red star" --detach
    bottega generate "a big red star" --control edges=edges.png:0.8
""")
def command(
    *, prompt: str | None, more_prompts: tuple[str, ...], like: Path | None, terms: DrawingTerms, **given: Any
) -> None:
    """Draw a picture of PROMPT.

    Further prompts (-p) are drawn in the same request, eight prompts at most. As with --num-images, picture i, counted
    from 0, has the seed SEED + i.
    """
    prompt, options = _parameters(prompt, like, given)
    draw([prompt, *more_prompts], options, terms)


def _parameters(prompt: str | None, like: Path | None, given: dict[str, Any]) -> tuple[str, GenerationOptions]:
    """Return the prompt and the options: those of the earlier picture `like`, overridden by the given ones."""
    earlier, options = parameters_of(like) if like else (None, {})
    prompt = earlier if prompt is None else prompt
    if prompt is None:
        raise click.UsageError("the prompt is missing: bottega generate PROMPT")
    if options.keys() & MASK_OPTIONS:
        raise click.UsageError(f"{like} is an edit; give its image and mask again: bottega edit IMAGE --like {like}")
    options = changed(options, given, like)
    if like and "strength" in options and "image" not in options:
        raise click.UsageError(f"{like} was drawn from another picture: give that one with --image.")
    return prompt, options
