"""`bottega models`: the models that are served, and those in folders and files of this machine."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bottega.client.cli.options import ListGroup, address_option, connect, with_examples
from bottega.client.cli.terminal import PlainTable, fail, note, print_facts, print_table, say, size_text
from bottega.client.types.models import ServedModel, ServedSampler
from bottega.errors import ConfigError
from bottega.model_files.family_names import FAMILIES, PREDICTION_TYPES

if TYPE_CHECKING:
    from bottega.client.checkup.models import ModelFacts

ImportedT = TypeVar("ImportedT")

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line instead.")


@click.group("models", cls=ListGroup)
@with_examples("""
    bottega models                          lists what is served
    bottega models list /models             lists the models in a folder
    bottega models inspect /models/sdxl     shows all about one
    bottega models check /models/sdxl       says whether it can be served
    bottega models import sdxl.safetensors  makes a folder of a single file
""")
def command() -> None:
    """List, check and import models."""


@command.command("list")
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@address_option
@_JSON
def list_command(*, folder: Path | None, address: str, as_json: bool) -> None:
    """List the models that are served, or those in FOLDER."""
    if folder is None:
        _list_served(address, as_json=as_json)
    else:
        _list_folder(folder, as_json=as_json)


@command.command("inspect")
@click.argument("path")
@_JSON
def inspect_command(*, path: str, as_json: bool) -> None:
    """Show all about the model PATH.

    PATH is a folder, a single file or "miniature".
    """
    from bottega.client.checkup.models import read_model_facts

    facts = read_model_facts(path)
    if as_json:
        say(json.dumps(facts.as_json()))
        return
    print_facts(_facts(facts))
    if facts.parts:
        print_table(_parts_table(facts))
    for problem in facts.problems:
        say(f"not served: {problem}")
    if facts.advice:
        say(facts.advice)


@command.command("check")
@click.argument("path")
@_JSON
def check_command(*, path: str, as_json: bool) -> None:
    """Check whether the model PATH can be served.

    Every reason why not is shown, and the exit status is then 1. A worker does the same check when it starts, before it
    reads weights.
    """
    from bottega.client.checkup.models import read_model_facts

    facts = read_model_facts(path)
    if as_json:
        say(json.dumps({"path": str(facts.path), "served": not facts.problems, "problems": list(facts.problems)}))
    elif facts.problems:
        for problem in facts.problems:
            say(f"{facts.path}: {problem}")
    else:
        what = f"{facts.content}{f' of {facts.family}' if facts.family else ''}" if facts.is_file else facts.family
        say(f"{facts.path}: {what}; {facts.advice or 'it can be served'}")
    raise SystemExit(1 if facts.problems else 0)


@command.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--family", type=click.Choice(list(FAMILIES)), help="Family, for a file that does not tell, such as a VAE."
)
@click.option(
    "--prediction-type",
    type=click.Choice(PREDICTION_TYPES),
    help="What its UNet predicts, for a file that does not tell.",
)
@click.option(
    "--vae", type=click.Path(path_type=Path), help="File of a VAE for a model, in place of its own or of none."
)
@click.option(
    "--parts",
    type=click.Path(path_type=Path),
    help="Folder of a model of the same family, for the parts that a model lacks, such as T5 with its tokenizer. The "
    "new folder links to them.",
)
@click.option("--to", "folder", type=click.Path(path_type=Path), help="New folder; default: FILE without its suffix.")
@_JSON
def import_command(
    *,
    file: Path,
    family: str | None,
    prediction_type: str | None,
    vae: Path | None,
    parts: Path | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Make a folder of FILE, a single file.

    FILE is a .safetensors file with a whole model, a VAE or a ControlNet in the layout of A1111, ComfyUI and kohya; the
    folder has Diffusers' layout. Nothing is downloaded. An interrupted import leaves nothing, and a second one finds
    what the first has made.
    """
    from bottega.model_files.importing import import_file
    from bottega.model_files.single_file_kind import FileKind

    target = folder or file.with_suffix("")
    importing = import_file(file, target, family or "", prediction_type or "", vae, parts=parts, on_part=note_part)
    result = run_import(importing)
    if as_json:
        say(json.dumps({**asdict(result), "folder": str(target)}))
        return
    say(f"{target}: {result.kind} of {result.title}" + ("" if result.is_new else "; it was imported before"))
    if result.kind == FileKind.CONTROLNET:
        say("To serve it, move it into the folder controlnets of a model's folder, and restart the suite.")
    elif result.kind == FileKind.VAE:
        say("A worker decodes with it if engine.vae.folder in its configuration names this folder.")
    else:
        say(result.summary)
        say(f"Serve it with: bottega up --model {shlex.quote(str(target))}")


def run_import(importing: Coroutine[Any, Any, ImportedT]) -> ImportedT:
    """Run an import and return its result. End the command with a sentence if it fails."""
    try:
        return asyncio.run(importing)
    except ConfigError as error:
        fail(error.message)


def note_part(part: str, size_bytes: int) -> None:
    """Show that a part is being converted."""
    note(f"converting {part} ({size_text(size_bytes)})")


def _list_folder(folder: Path, *, as_json: bool) -> None:
    from bottega.client.checkup.models import models_in, read_model_facts

    listed = [read_model_facts(model) for model in models_in(folder)]
    if as_json:
        for facts in listed:
            say(json.dumps(facts.as_json()))
        return
    if not listed:
        note(f"There are no models in {folder}.")
        return
    table = PlainTable("model", "family", "type", ">size", "served", optional=("type",))
    for facts in listed:
        size = size_text(facts.size_bytes) if facts.size_bytes else ""
        served = "no" if facts.problems else "yes"
        table.add_row(facts.path.name, facts.family, ", ".join(facts.dtypes), size, served)
    table.add_caption(*(f"{facts.path.name} is not served: {facts.problems[0]}" for facts in listed if facts.problems))
    print_table(table)


def _facts(facts: ModelFacts) -> list[tuple[str, str]]:
    memory = f"{size_text(facts.half_bytes)} in half precision, {size_text(facts.float32_bytes)} in float32"
    shown = [
        ("model", f"{facts.path} ({facts.kind}{f', {facts.content}' if facts.content else ''})"),
        ("family", facts.family),
        ("pipeline", facts.pipeline),
        ("weights", f"{facts.parameters / 1e6:.1f} million in {', '.join(facts.dtypes)}" if facts.parameters else ""),
        ("variant", facts.variant),
        ("memory for weights", memory if facts.parameters else ""),
        ("size of pictures", f"{facts.default_size} x {facts.default_size}" if facts.default_size else ""),
        ("sampler", facts.sampler),
        ("predicts", facts.prediction_type),
    ]
    return [(label, text) for label, text in shown if text]


def _parts_table(facts: ModelFacts) -> PlainTable:
    own = () if facts.is_file else ("class", ">files")
    table = PlainTable("part", *own, "type", ">size", optional=("class",))
    for part in facts.parts:
        size = size_text(part.size_bytes) if part.size_bytes else ""
        cells = () if facts.is_file else (part.class_name, str(part.files or ""))
        table.add_row(part.name, *cells, ", ".join(part.dtypes), size)
    return table


def _list_served(address: str, *, as_json: bool) -> None:
    with connect(address) as client:
        models = client.models()
    if as_json:
        for model in models:
            say(json.dumps(_served_json(model)))
        return
    if not models:
        note("No worker has joined yet; bottega fleet shows the services that have.")
        return
    print_table(models_table(models))


def _served_json(model: ServedModel) -> dict[str, object]:
    return {
        "name": model.name,
        "workers": model.workers,
        "width": model.default_width,
        "height": model.default_height,
        "num_inference_steps": model.default_steps,
        "guidance_scale": model.default_guidance_scale,
        "sampler": _default_sampler(model),
        "dtype": model.dtype,
        "model_hash": model.model_hash,
    }


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
