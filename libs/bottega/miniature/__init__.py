"""The embedded model, called miniature: the scenes that it draws, their prompts, and where its weights are."""

from importlib.util import find_spec
from pathlib import Path


def _folder() -> Path:
    """Return the folder of the weights, which are a distribution of their own, bottega-miniature.

    In a source checkout they are beside this distribution, installed or not.
    """
    in_checkout = Path(__file__).parents[2] / "weights/bottega/miniature_weights"
    if not in_checkout.is_dir() and (found := find_spec("bottega.miniature_weights")) is not None:
        return Path(*list(found.submodule_search_locations or ())[:1])
    return in_checkout


WEIGHTS = _folder()
"""Folder of the embedded model, in Diffusers' layout. It does not exist where bottega-miniature is not installed."""
