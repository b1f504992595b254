"""The embedded models: the scenes that they draw, their prompts, and where their weights are."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path


def _folder(package: str) -> Path:
    """Return the folder of a package of weights, which are a distribution of their own, bottega-miniature.

    In a source checkout they are beside this distribution, installed or not.
    """
    in_checkout = Path(__file__).parents[2] / "weights/bottega" / package
    if not in_checkout.is_dir() and (found := find_spec(f"bottega.{package}")) is not None:
        return Path(*list(found.submodule_search_locations or ())[:1])
    return in_checkout


WEIGHTS = _folder("miniature_weights")
"""Folder of the embedded model, in Diffusers' layout. It does not exist where bottega-miniature is not installed."""

MODELS: Mapping[str, Path] = {"miniature": WEIGHTS, "miniature-dit": _folder("miniature_dit_weights")}
"""Folders of the embedded models by the name that operators give, and under which they are served."""
