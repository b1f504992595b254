"""Edits: requests that redraw a masked part of an image, and can reuse recorded activations of the rest."""
