"""Where a model lies and by which name it is served, from what an operator gives for it."""

from __future__ import annotations

from pathlib import Path

from bottega.miniature import WEIGHTS

MINIATURE = "miniature"
"""What an operator gives for the embedded model, and the name by which it is served."""

# A repository's folder in the hub's cache: models--OWNER--NAME, with a folder `snapshots` of commits.
_REPOSITORY = "models--"
_SNAPSHOTS = "snapshots"


def folder_of(model: str) -> Path:
    """Return the folder of `miniature`, or of a path."""
    return WEIGHTS if model == MINIATURE else Path(model)


def name_of(model: str, name: str = "") -> str:
    """Return the name by which a model is served.

    Args:
        model: `miniature` or a folder's path.
        name: What the operator calls it; empty is the name of its repository, where the folder is a snapshot in a hub's
            cache, else the folder's own.
    """
    if name or model == MINIATURE:
        return name or MINIATURE
    # Not resolved: a link's own name is the name that its maker chose.
    folder = Path(model).resolve() if ".." in Path(model).parts else Path(model).absolute()
    repository = folder.parent.parent.name
    if folder.parent.name == _SNAPSHOTS and repository.startswith(_REPOSITORY):
        return repository.rpartition("--")[2]
    return folder.name
