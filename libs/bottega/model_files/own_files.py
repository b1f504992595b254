"""The ControlNets and LoRAs in a model's own folder, for a suite on this machine to host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bottega import rules
from bottega.model_files.controlnet_folder import SINGLE_FILE
from bottega.plain_text import excerpt

_SAFETENSORS = ".safetensors"
_PICKLES = frozenset({".bin", ".ckpt", ".pt", ".pth"})
_PICKLE = "it is pickled, and only safetensors are opened; convert it"
_BAD_NAME = f"nobody can ask for its name; rename it: {rules.ADAPTER_NAMES}"
_SAME_NAME = "it has the name of another file or folder here; rename one of them"
# Share of a device's memory. SDXL's ControlNets have half the weights of its UNet, and forward passes with equally many
# rows.
_CONTROLNETS_SHARE = 0.25
_SAME_NAME_OF_MODELS = "the model {} has an adapter of the same name; rename one of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFiles:
    """The adapters in a subfolder of a model's folder."""

    hosted: Mapping[str, str]
    """Paths, by name, of adapters for a service to host."""
    left_out: Mapping[str, str]
    """Reasons, by file name, why others are not hosted."""


def own_controlnets(model: Path) -> OwnFiles:
    """Return the folders in a model's folder `controlnets`. The service that hosts them checks them."""
    entries = _entries(model / "controlnets")
    found = [(path.name, path) for path in entries if path.is_dir()]
    files = {path: SINGLE_FILE for path in entries if path.is_file() and path.suffix in {_SAFETENSORS, *_PICKLES}}
    return _own_files(found, files)


def own_loras(model: Path) -> OwnFiles:
    """Return the safetensors files and folders in a model's folder `loras`."""
    entries = _entries(model / "loras")
    found = [(path.name if path.is_dir() else path.stem, path) for path in entries if _may_be_lora(path)]
    pickles = {path: _PICKLE for path in entries if path.is_file() and path.suffix in _PICKLES}
    return _own_files(found, pickles)


def controlnets_share(models: Iterable[Path], servers: int) -> float:
    """Return the share of a device's memory that all ControlNet servers together get if workers use the device, too.

    It is 0 if the servers start without ControlNets; ControlNets that are added later use memory that is free then.
    """
    return _CONTROLNETS_SHARE if servers and any(own_controlnets(model).hosted for model in models) else 0.0


def files_of_models(own: Mapping[str, OwnFiles]) -> OwnFiles:
    """Return the adapters of several models, which are given by their names.

    Those of a model are left out if one before it has an adapter of the same name.
    """
    hosted: dict[str, str] = {}
    left_out: dict[str, str] = {}
    owners: dict[str, str] = {}
    for model, files in own.items():
        left_out |= files.left_out
        left_out |= {name: _SAME_NAME_OF_MODELS.format(owners[name]) for name in files.hosted if name in owners}
        hosted = {**files.hosted, **hosted}
        owners = {**dict.fromkeys(files.hosted, model), **owners}
    return OwnFiles(hosted=hosted, left_out=left_out)


def _own_files(found: Iterable[tuple[str, Path]], left_out: Mapping[Path, str]) -> OwnFiles:
    found = list(found)
    counts = Counter(name for name, _ in found)
    reasons = dict(left_out)
    reasons |= {path: _BAD_NAME for name, path in found if not rules.is_adapter_name(name)}
    reasons |= {path: _SAME_NAME for name, path in found if counts[name] > 1}
    return OwnFiles(
        hosted={name: str(path) for name, path in found if path not in reasons},
        left_out={excerpt(path.name, rules.MAX_ADAPTER_CHARACTERS // 2): reason for path, reason in reasons.items()},
    )


def _entries(folder: Path) -> list[Path]:
    """Return the entries of a folder without hidden ones; none if there is no folder."""
    return sorted(path for path in folder.glob("*") if not path.name.startswith("."))


def _may_be_lora(path: Path) -> bool:
    return path.is_dir() or path.suffix == _SAFETENSORS
