"""The folder of a model, and the name under which it is served, from an operator's configuration."""

from __future__ import annotations

from pathlib import Path

from bottega.miniature import WEIGHTS

MINIATURE = "miniature"
"""The operator's value for the embedded model, and the name under which it is served."""

# A repository's folder in the hub's cache: models--OWNER--NAME, with a folder `snapshots` of commits.
_REPOSITORY = "models--"
_SNAPSHOTS = "snapshots"


def folder_of(model: str) -> Path:
    """Return the folder of `miniature` or of a path."""
    return WEIGHTS if model == MINIATURE else Path(model)


def name_of(model: str, name: str = "") -> str:
    """Return the name under which a model is served.

    Args:
        model: `miniature` or a folder's path.
        name: The operator's name for it. If it is empty, the name is that of the repository if the folder is a snapshot
            in a hub's cache, else the folder's.
    """
    if name or model == MINIATURE:
        return name or MINIATURE
    # Links are not resolved: their creator chose the name.
    folder = Path(model).resolve() if ".." in Path(model).parts else Path(model).absolute()
    repository = folder.parent.parent.name
    if folder.parent.name == _SNAPSHOTS and repository.startswith(_REPOSITORY):
        return repository.rpartition("--")[2]
    return folder.name
