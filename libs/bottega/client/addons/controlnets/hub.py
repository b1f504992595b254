"""Brings a ControlNet's folder from the hub, when a person asks for it; nothing else here downloads."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from bottega.errors import BottegaError, Code
from bottega.model_files.weights import DIFFUSERS, weights_in

_CONFIG = "config.json"
# What is asked for where the hub cannot say what it has: what is here already, or the reason why not, comes of it.
_PLAIN = (_CONFIG, DIFFUSERS.whole(""), DIFFUSERS.index(""), f"{DIFFUSERS.stem}-*-of-*.safetensors")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class HubError(BottegaError, code=Code.FAILED_PRECONDITION):
    """It is not here, and could not be brought. todo: what a person may do."""

    def __init__(self, message: str, *, todo: str = "") -> None:
        super().__init__(message)
        self.todo = todo


def fetch(repo: str, revision: str | None, root: Path) -> Path:
    """Download what a server needs of a ControlNet to a folder of its own below `root`, and return the folder.

    Weights are its plain ones, else its fp16 variant, whole or in shards; pickled ones stay where they are. What is
    there already is not downloaded again.

    Args:
        repo: OWNER/NAME on the hub, or wherever HF_ENDPOINT points.
        revision: A branch, tag or commit; None for the newest.
        root: Below which servers take folders.

    Raises:
        HubError: With what a person may do.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise HubError(
            "huggingface_hub is not installed here", todo="It comes with pip install 'bottega-libs[diffusion]'."
        ) from None
    if not os.access(root, os.W_OK):
        raise HubError(
            f"{root} cannot be written to from here",
            todo="Run this on the servers' machine, as a user who may; or copy the folder there, and add that.",
        )
    try:
        folder = root / f"hub--{repo.replace('/', '--')}"
        wanted = _wanted(repo, revision)
        huggingface_hub.snapshot_download(repo, revision=revision, local_dir=folder, allow_patterns=wanted)
    except errors.HFValidationError:
        raise HubError(f"{repo!r} is no name on the hub", todo="OWNER/NAME is wanted, as in its address.") from None
    except errors.GatedRepoError:
        raise HubError(
            f"{repo} asks for an agreement first", todo="Agree on its page, and say who you are: HF_TOKEN."
        ) from None
    except (errors.RevisionNotFoundError, UnicodeEncodeError):
        raise HubError(f"{repo} has no revision {revision}") from None
    except errors.RepositoryNotFoundError:
        raise HubError(f"the hub has no {repo}, or it is private", todo="A private one needs HF_TOKEN.") from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        raise _unreachable(repo, error) from None
    if not (folder / _CONFIG).is_file():
        raise HubError(f"{repo} has no {_CONFIG}: it is no ControlNet in Diffusers' layout")
    return folder


def _wanted(repo: str, revision: str | None) -> list[str]:
    """Return the names of the files that a server reads, or patterns of plain ones where the hub cannot be asked.

    Raises:
        HubError: It has no weights that could be loaded.
    """
    from huggingface_hub import HfApi

    try:
        found = HfApi().model_info(repo, revision=revision).siblings or []
    except Exception:  # noqa: BLE001 - of the hub's client and of httpx; the download meets the same, and says it
        return list(_PLAIN)
    names = [file.rfilename for file in found if "/" not in file.rfilename]
    if _CONFIG not in names:
        return [_CONFIG]
    try:
        weights = weights_in(names, DIFFUSERS, repo)
    except ValueError as error:
        raise HubError(f"{repo} cannot be used: {error}") from None
    return [_CONFIG, *weights]


def _unreachable(repo: str, error: Exception) -> HubError:
    if isinstance(error, OSError) and error.errno in _FULL:
        return HubError(
            f"{repo} cannot be brought: the disk of {error.filename or 'the folder'} is full",
            todo="Make room there, and try again: what has come stays, and is not downloaded again.",
        )
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    if offline:
        return HubError(
            f"{repo} cannot be brought: HF_HUB_OFFLINE forbids it", todo="Unset it, or add a folder that is here."
        )
    said = str(error).strip().splitlines()
    return HubError(
        f"{repo} cannot be brought: the hub was not reached ({said[0] if said else type(error).__name__})",
        todo="HF_ENDPOINT names a mirror. Else download it elsewhere, copy its folder here, and add that.",
    )
