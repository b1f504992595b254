"""Downloads a ControlNet from the Hugging Face hub when a user asks for it. Nothing else here downloads."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from bottega.errors import BottegaError, Code
from bottega.model_files.weights import DIFFUSERS, weights_in

_CONFIG = "config.json"
# Requested if the hub cannot list its files: then files that are here already are used, or the download says why not.
_PLAIN = (_CONFIG, DIFFUSERS.whole(""), DIFFUSERS.index(""), f"{DIFFUSERS.stem}-*-of-*.safetensors")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class HubError(BottegaError, code=Code.FAILED_PRECONDITION):
    """The error that a ControlNet is neither in the folder nor can be downloaded."""

    def __init__(self, message: str, *, todo: str = "") -> None:
        super().__init__(message)
        self.todo = todo
        """What the user can do about the error."""


def fetch(repo: str, revision: str | None, root: Path) -> Path:
    """Download the files that a server needs of a ControlNet to a folder below `root`, and return that folder.

    The weights are the plain ones, else the fp16 variant, as one file or in shards. Pickled weights are never
    downloaded, and neither are files that are here already.

    Args:
        repo: OWNER/NAME on the hub, or on the server that HF_ENDPOINT names.
        revision: A branch, tag or commit; None for the newest.
        root: The folder below which servers host ControlNets.

    Raises:
        HubError: The ControlNet cannot be downloaded.
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
            todo="Run this on the servers' machine as a user who can; or copy the folder there, and add that.",
        )
    try:
        folder = root / f"hub--{repo.replace('/', '--')}"
        wanted = _wanted(repo, revision)
        huggingface_hub.snapshot_download(repo, revision=revision, local_dir=folder, allow_patterns=wanted)
    except errors.HFValidationError:
        raise HubError(f"{repo!r} is not a name on the hub", todo="Give OWNER/NAME, as in its address.") from None
    except errors.GatedRepoError:
        raise HubError(
            f"{repo} requires an agreement first", todo="Agree on its page, and set HF_TOKEN to your access token."
        ) from None
    except (errors.RevisionNotFoundError, UnicodeEncodeError):
        raise HubError(f"{repo} has no revision {revision}") from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"the hub has no {repo}, or it is private", todo="A private one needs HF_TOKEN, your access token."
        ) from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        raise _unreachable(repo, error) from None
    if not (folder / _CONFIG).is_file():
        raise HubError(f"{repo} has no {_CONFIG}, so it is no ControlNet in Diffusers' layout")
    return folder


def _wanted(repo: str, revision: str | None) -> list[str]:
    """Return the names of the files that a server reads, or patterns if the hub does not answer.

    Raises:
        HubError: The repository has no weights that a server could load.
    """
    from huggingface_hub import HfApi

    try:
        found = HfApi().model_info(repo, revision=revision).siblings or []
    except Exception:  # noqa: BLE001 - of the hub's client or of httpx; the download fails likewise, and reports it
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
            f"{repo} cannot be downloaded: the disk of {error.filename or 'the folder'} is full",
            todo="Free space there, and try again: complete files are not downloaded again.",
        )
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    if offline:
        return HubError(
            f"{repo} cannot be downloaded: HF_HUB_OFFLINE is set", todo="Unset it, or add a folder that is here."
        )
    lines = str(error).strip().splitlines()
    return HubError(
        f"{repo} cannot be downloaded: the hub does not answer ({lines[0] if lines else type(error).__name__})",
        todo="Set HF_ENDPOINT to a mirror; or download it elsewhere, copy the folder here, and add that.",
    )
