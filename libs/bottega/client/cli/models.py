"""`bottega models`: the models that are served."""

from __future__ import annotations

from collections.abc import Sequence

import click

from bottega.client.cli.options import address_option, connect
from bottega.client.cli.terminal import PlainTable, note, print_table
from bottega.client.types.models import ServedModel, ServedSampler


@click.command("models")
@address_option
def command(address: str) -> None:
    """List the models that are served."""
    with connect(address) as client:
        models = client.models()
    if not models:
        note("No worker has joined yet; bottega fleet shows the services that have.")
        return
    print_table(models_table(models))


def models_table(models: Sequence[ServedModel]) -> PlainTable:
    """Return a table with a row for each model, and below it the samplers and edits that a model refuses, and why."""
    table = PlainTable(
        "model",
        ">workers",
        "size",
        ">steps",
        ">guidance",
        "sampler",
        "computes in",
        "hash",
        wraps=("model", "sampler"),
        optional=("hash", "workers", "computes in"),
    )
    for model in models:
        table.add_row(*_row(model))
    refused: dict[tuple[str, str], list[str]] = {}
    for model in models:
        for choice in model.sampler_choices:
            if choice.refused_because:
                refused.setdefault((model.name, choice.refused_because), []).append(_choice(choice))
    refusals = [f"{name} does not draw with {', '.join(them)}: {reason}" for (name, reason), them in refused.items()]
    refusals += [model.edits_refused_because for model in models if model.edits_refused_because]
    if refusals:
        table.add_caption(*refusals)
    return table


def _row(model: ServedModel) -> tuple[str, ...]:
    return (
        model.name,
        str(model.workers),
        f"{model.default_width}x{model.default_height}",
        str(model.default_steps),
        _guidance(model),
        _default_sampler(model),
        model.dtype,
        model.model_hash[:12],
    )


def _default_sampler(model: ServedModel) -> str:
    for choice in model.sampler_choices:
        if choice.is_default and choice.sampler == model.default_sampler:
            return _choice(choice)
    return model.default_sampler or ""


def _choice(choice: ServedSampler) -> str:
    return choice.sampler + (" --karras" if choice.use_karras_sigmas else "")


def _guidance(model: ServedModel) -> str:
    plain, edit = f"{model.default_guidance_scale:g}", model.default_edit_guidance_scale
    edits = plain if edit is None else f"{edit:g}"
    return plain if edits == plain else f"{plain}, edits {edits}"
