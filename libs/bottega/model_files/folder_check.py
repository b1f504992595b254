"""Checks a model's folder: its index, its parts' configurations and the headers of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bottega.model_files.configuration_rules import CONFIG_FILES, INDEX_FILE, check_configurations
from bottega.model_files.json_files import read_json_object
from bottega.model_files.report import ModelReport, PartReport


def check_model_folder(folder: Path) -> ModelReport:
    """Return what a model's folder is and every reason why it cannot be served."""
    try:
        index = read_json_object(folder / INDEX_FILE)
    except ValueError as error:
        return ModelReport(folder=folder, problems=(f"{INDEX_FILE}: {error}",))
    parts, problems = {}, []
    for name, config_file in CONFIG_FILES.items():
        try:
            config = read_json_object(folder / name / config_file)
        except ValueError as error:
            problems.append(f"{name}/{config_file}: {error}")
            continue
        parts[name] = PartReport(name=name, class_name=_class_name(index, name), config=config)
    problems += check_configurations(index, {name: part.config for name, part in parts.items()})
    return ModelReport(
        folder=folder, pipeline_class=str(index.get("_class_name", "")), parts=parts, problems=tuple(problems)
    )


def _class_name(index: Mapping[str, object], part: str) -> str:
    entry = index.get(part)
    return str(entry[1]) if isinstance(entry, list) and len(entry) == 2 else ""
