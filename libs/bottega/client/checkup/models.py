"""What a model's folder or a single file is, and what of it will not be served, for `bottega models`. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any

from bottega.miniature import MODELS
from bottega.model_files.configuration_rules import INDEX_FILE
from bottega.model_files.family_names import FAMILIES, SD3, SDXL, denoiser_part
from bottega.model_files.folder_check import check_model_folder, default_size, folder_of, name_of
from bottega.model_files.presets import read_preset
from bottega.model_files.report import ModelReport
from bottega.model_files.scheduler_rules import FLOW_MATCHING, SAMPLER_CLASSES
from bottega.model_files.single_file import SingleFile, read_single_file
from bottega.model_files.single_file_check import check_header
from bottega.model_files.single_file_config import Config
from bottega.model_files.single_file_folder import scheduler_config
from bottega.model_files.single_file_kind import FileKind
from bottega.model_files.single_file_transformer import WITHOUT_T5

_SINGLE_FILE = "single file"
_SAFETENSORS = ".safetensors"
# Entries of a folder that are looked at; a home folder may have any number.
_MAX_ENTRIES = 4096
_HALF_BYTES, _SINGLE_BYTES = 2, 4
_INTEGERS = frozenset({"I32", "I64", "U8"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """A part of a model."""

    name: str
    class_name: str
    """Class in Diffusers or transformers; empty in a single file."""
    files: int
    dtypes: tuple[str, ...]
    """Element types of its weights as safetensors names them, the most frequent first; empty if it has none."""
    parameters: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model, or what is in its place."""

    path: Path
    name: str
    """Name under which it is served."""
    kind: str
    """`embedded`, `folder`, `single file`, `file` of something else, or `nothing`."""
    content: str
    """The network in a single file, such as `a whole model`; empty for anything else."""
    family: str
    """Display name of the family; empty if it is unknown."""
    pipeline: str
    """Class of the pipeline; empty in a single file."""
    variant: str
    parts: tuple[PartFacts, ...]
    default_size: int
    """Side of a picture in pixels; 0 if it is unknown."""
    sampler: str
    """Default sampler, or the class of a scheduler that is not served; empty if it is unknown."""
    prediction_type: str
    """What the UNet predicts; empty if it is unknown."""
    problems: tuple[str, ...]
    """Reasons why it cannot be served."""
    advice: str
    """How to serve it, or to serve it better; empty if there is nothing to do."""

    @property
    def is_file(self) -> bool:
        """Whether it is a single file."""
        return self.kind == _SINGLE_FILE

    @property
    def parameters(self) -> int:
        """Number of all weights."""
        return sum(part.parameters for part in self.parts)

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights in their files."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def half_bytes(self) -> int:
        """Memory that the weights take in float16 or bfloat16."""
        return _HALF_BYTES * self.parameters

    @property
    def float32_bytes(self) -> int:
        """Memory that the weights take in float32."""
        return _SINGLE_BYTES * self.parameters

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types of all parts."""
        return tuple(dict.fromkeys(dtype for part in self.parts for dtype in part.dtypes))

    def as_json(self) -> dict[str, Any]:
        """Return the facts as a JSON object."""
        parts = [
            {
                "name": part.name,
                "class": part.class_name,
                "files": part.files,
                "dtypes": list(part.dtypes),
                "parameters": part.parameters,
                "size_bytes": part.size_bytes,
            }
            for part in self.parts
        ]
        return {
            "path": str(self.path),
            "name": self.name,
            "kind": self.kind,
            "content": self.content,
            "family": self.family,
            "pipeline": self.pipeline,
            "variant": self.variant,
            "parts": parts,
            "default_size": self.default_size,
            "sampler": self.sampler,
            "prediction_type": self.prediction_type,
            "parameters": self.parameters,
            "size_bytes": self.size_bytes,
            "half_bytes": self.half_bytes,
            "float32_bytes": self.float32_bytes,
            "problems": list(self.problems),
            "advice": self.advice,
        }


def read_model_facts(model: str) -> ModelFacts:
    """Return the facts about an embedded model, a folder or a single file. Only headers of weights are read."""
    path = folder_of(model)
    if path.suffix == _SAFETENSORS and path.is_file():
        try:
            return _of_file(read_single_file(path))
        except ValueError as error:
            return _unknown(path, str(error))
    return _of_folder(check_model_folder(path), model)


def models_in(folder: Path) -> Iterator[str]:
    """Yield the models in a folder: folders with model_index.json, and single files of whole models."""
    with os.scandir(folder) as entries:
        paths = sorted(Path(entry.path) for entry in islice(entries, _MAX_ENTRIES))
    for path in paths:
        if path.suffix == _SAFETENSORS and path.is_file():
            try:
                is_model = read_single_file(path).kind is FileKind.MODEL
            except ValueError:
                is_model = True  # to say what is wrong with it
            if is_model:
                yield str(path)
        elif (path / INDEX_FILE).is_file():
            yield str(path)


def _of_folder(report: ModelReport, model: str) -> ModelFacts:
    parts = tuple(
        PartFacts(
            name=part.name,
            class_name=part.class_name,
            files=len(part.files),
            dtypes=_dtypes(part.bytes_by_dtype),
            parameters=part.parameters,
            size_bytes=part.size_bytes,
        )
        for part in report.parts.values()
    )
    scheduler = report.parts["scheduler"].config if "scheduler" in report.parts else {}
    return ModelFacts(
        path=report.folder,
        name=name_of(model),
        kind="embedded" if model in MODELS else _kind(report.folder),
        content="",
        family=report.family_title,
        pipeline=report.pipeline_class,
        variant=report.variant,
        parts=parts,
        default_size=report.default_size,
        sampler=_sampler(report),
        prediction_type=_prediction_of(scheduler) if scheduler else "",
        problems=report.problems,
        advice=report.advice,
    )


def _sampler(report: ModelReport) -> str:
    try:
        preset = read_preset(report.folder)
    except ValueError:
        preset = None
    if preset is not None and preset.sampler:
        return preset.sampler
    return _sampler_of(report.scheduler_class)


def _sampler_of(own: str) -> str:
    return next((name for name, class_name in SAMPLER_CLASSES.items() if class_name == own), own)


def _prediction_of(scheduler: Mapping[str, object]) -> str:
    if scheduler.get("_class_name") == FLOW_MATCHING:
        return "flow"
    return str(scheduler.get("prediction_type", "epsilon"))


def _of_file(found: SingleFile) -> ModelFacts:
    parts = []
    for name, entries in found.parts.items():
        sizes: dict[str, int] = {}
        for entry in entries:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.end - entry.begin
        parts.append(
            PartFacts(
                name=name,
                class_name="",
                files=1 if entries else 0,
                dtypes=_dtypes(sizes),
                parameters=sum(entry.elements for entry in entries if entry.dtype not in _INTEGERS),
                size_bytes=sum(sizes.values()),
            )
        )
    problem, configs = _checked(found)
    denoiser = configs.get(denoiser_part(found.family)) if found.family else None
    importing = f"`bottega models import {quote(str(found.path))}`"
    if found.kind is FileKind.VAE:
        importing = f"`bottega models import {quote(str(found.path))} --family FAMILY` ({', '.join(FAMILIES)})"
    advice = (
        ""
        if problem
        else f"{importing} converts it to a folder, and only that checks whether all weights are finite numbers"
    )
    if advice and found.kind is FileKind.MODEL:
        advice = f"`bottega up --model {quote(str(found.path))}` serves it, and {advice}"
    if advice and denoiser and found.family == SD3:
        advice = f"{advice}. {WITHOUT_T5}"
    if advice and found.kind is FileKind.VAE:
        advice = f"`bottega up --model MODEL --vae {quote(str(found.path))}` serves a model with it, and {advice}"
    return ModelFacts(
        path=found.path,
        name=found.path.stem,
        kind=_SINGLE_FILE,
        content=found.kind.value,
        family=found.title,
        pipeline="",
        variant="",
        parts=tuple(parts),
        default_size=default_size(configs, found.family) if denoiser else 0,
        sampler=_sampler_of(scheduler_config(found)["_class_name"]) if denoiser else "",
        prediction_type=found.prediction_type if found.kind is FileKind.MODEL and found.family else "",
        problems=(problem,) if problem else (),
        advice=advice,
    )


def _checked(found: SingleFile) -> tuple[str, Mapping[str, Config]]:
    """Return a sentence on why a file cannot be converted, or else the configurations of its parts."""
    try:
        # A VAE that says no family is converted for the one that the operator names; the rules are those of all.
        if found.kind is FileKind.VAE and not found.family:
            converts = any(entry.name.endswith("post_quant_conv.weight") for entry in found.parts["vae"])
            found = read_single_file(found.path, SDXL if converts else SD3)
        return "", check_header(found)
    except ValueError as error:
        return str(error), {}


def _kind(path: Path) -> str:
    return "folder" if path.is_dir() else "file" if path.is_file() else "nothing"


def _unknown(path: Path, problem: str) -> ModelFacts:
    return ModelFacts(
        path=path,
        name=path.stem,
        kind=_SINGLE_FILE,
        content="",
        family="",
        pipeline="",
        variant="",
        parts=(),
        default_size=0,
        sampler="",
        prediction_type="",
        problems=(problem,),
        advice="",
    )


def _dtypes(sizes: Mapping[str, int]) -> tuple[str, ...]:
    ordered: Sequence[str] = sorted(sizes, key=lambda dtype: -sizes[dtype])
    return tuple(dtype for dtype in ordered if dtype not in _INTEGERS)
