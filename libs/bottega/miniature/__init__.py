"""The embedded default model family: weights small enough to live in the repository."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
"""Folder of the embedded model, in Diffusers' layout."""
