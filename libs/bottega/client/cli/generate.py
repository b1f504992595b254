"""`bottega generate`: draws pictures and says where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bottega.client.cli.drawing import DrawingTerms, draw, drawing_options
from bottega.client.cli.generation_options import changed, generation_options
from bottega.client.types.mask import MASK_OPTIONS
from bottega.client.types.options import GenerationOptions
from bottega.client.types.png_parameters import parameters_of


@click.command("generate")
@click.argument("prompt", required=False)
@click.option(
    "--like",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Draw this picture of ours again, as changed by the other options.",
)
@generation_options
@click.option(
    "--keep-for-editing/--no-keep-for-editing",
    default=None,
    help="Keep what edits of it can use, so that the first one (bottega edit) is quick, too.",
)
@drawing_options
def command(*, prompt: str | None, like: Path | None, terms: DrawingTerms, **given: Any) -> None:
    """Draw a picture of PROMPT.

    \b
      bottega generate "a big red star on the left on a blue background" -o star.png --seed 7
      bottega generate --like star.png --steps 50 -o better.png
      bottega generate "a big red star" --detach
      bottega generate "a big red star" --control edges=edges.png:0.8
    """
    prompt, options = _parameters(prompt, like, given)
    draw(prompt, options, terms)


def _parameters(prompt: str | None, like: Path | None, given: dict[str, Any]) -> tuple[str, GenerationOptions]:
    """The prompt and the arguments: those of `like`, changed by those that were given."""
    then, options = parameters_of(like) if like else (None, {})
    prompt = then if prompt is None else prompt
    if prompt is None:
        raise click.UsageError("say what to draw: bottega generate PROMPT")
    if options.keys() & MASK_OPTIONS:
        raise click.UsageError(f"{like} is an edit; with its image and its mask: bottega edit IMAGE --like {like}")
    options = changed(options, given, like)
    if like and "strength" in options and "image" not in options:
        raise click.UsageError(f"{like} was drawn from another picture: give that one by --image.")
    return prompt, options
