"""Brings a ControlNet's folder from the hub, when a person asks for it; nothing else here downloads."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from bottega.errors import BottegaError, Code

# What a server reads of a folder. Weights in other element types and pickled ones stay where they are.
_FILES = [
    "config.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model-*-of-*.safetensors",
]


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class HubError(BottegaError, code=Code.FAILED_PRECONDITION):
    """It is not here, and could not be brought. todo: what a person may do."""

    def __init__(self, message: str, *, todo: str = "") -> None:
        super().__init__(message)
        self.todo = todo


def fetch(repo: str, revision: str | None, root: Path) -> Path:
    """Downloads what a server needs of a ControlNet to a folder of its own below `root`, and returns it.

    repo: OWNER/NAME on the hub, or wherever HF_ENDPOINT points. What is there already is not downloaded again.
    Raises HubError.
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
        huggingface_hub.snapshot_download(repo, revision=revision, local_dir=folder, allow_patterns=_FILES)
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
    if not (folder / "config.json").is_file():
        raise HubError(f"{repo} has no config.json: it is no ControlNet in Diffusers' layout")
    return folder


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
