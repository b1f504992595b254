"""The embedded models: the scenes that they draw, their prompts, and where their weights are."""

from collections.abc import Mapping
from pathlib import Path

import bottega


def _folder(package: str) -> Path:
    """Return the folder of a package of weights, which are a distribution of their own, bottega-miniature.

    In a source checkout they are beside this distribution, installed or not.
    """
    in_checkout = Path(__file__).parents[2] / "weights/bottega" / package
    installed = (Path(folder) / package for folder in bottega.__path__)
    return next((folder for folder in (in_checkout, *installed) if folder.is_dir()), in_checkout)


WEIGHTS = _folder("miniature_weights")
"""Folder of the embedded model, in Diffusers' layout. It does not exist where bottega-miniature is not installed."""

MODELS: Mapping[str, Path] = {"miniature": WEIGHTS}
"""Folders of the embedded models by the name that operators give, and under which they are served."""
