"""Checks a model's folder: its index, its parts' configurations and the headers of their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from bottega.model_files.index_rules import check_index, check_parts_together, check_tokenizer_config
from bottega.model_files.json_files import read_json_object
from bottega.model_files.report import ModelReport, PartReport
from bottega.model_files.scheduler_rules import check_scheduler_config
from bottega.model_files.text_encoder_rules import check_text_encoder_config
from bottega.model_files.unet_rules import check_unet_config
from bottega.model_files.vae_rules import check_vae_config

INDEX_FILE = "model_index.json"

# By part, the file of its configuration.
_CONFIG_FILES = {
    "scheduler": "scheduler_config.json",
    "text_encoder": "config.json",
    "text_encoder_2": "config.json",
    "tokenizer": "tokenizer_config.json",
    "tokenizer_2": "tokenizer_config.json",
    "unet": "config.json",
    "vae": "config.json",
}
# By part, what is checked of its configuration.
_RULES: Mapping[str, Callable[[Mapping[str, object]], Iterable[str]]] = {
    "scheduler": check_scheduler_config,
    "text_encoder": check_text_encoder_config,
    "text_encoder_2": check_text_encoder_config,
    "tokenizer": check_tokenizer_config,
    "tokenizer_2": check_tokenizer_config,
    "unet": check_unet_config,
    "vae": check_vae_config,
}


def check_model_folder(folder: Path) -> ModelReport:
    """Return what a model's folder is and every reason why it cannot be served."""
    try:
        index = read_json_object(folder / INDEX_FILE)
    except ValueError as error:
        return ModelReport(folder=folder, problems=(f"{INDEX_FILE}: {error}",))
    parts, problems = {}, [f"{INDEX_FILE}: {sentence}" for sentence in check_index(index)]
    for name, config_file in _CONFIG_FILES.items():
        try:
            config = read_json_object(folder / name / config_file)
        except ValueError as error:
            problems.append(f"{name}/{config_file}: {error}")
            continue
        parts[name] = PartReport(name=name, class_name=_class_name(index, name), config=config)
        problems += _broken_rules(name, config)
    if not problems:
        problems += check_parts_together({name: part.config for name, part in parts.items()})
    return ModelReport(
        folder=folder, pipeline_class=str(index.get("_class_name", "")), parts=parts, problems=tuple(problems)
    )


def _broken_rules(name: str, config: Mapping[str, object]) -> Iterator[str]:
    for sentence in _RULES[name](config):
        yield f"{name}/{_CONFIG_FILES[name]}: {sentence}"


def _class_name(index: Mapping[str, object], part: str) -> str:
    entry = index.get(part)
    return str(entry[1]) if isinstance(entry, list) and len(entry) == 2 else ""
