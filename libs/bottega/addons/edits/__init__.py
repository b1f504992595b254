"""Edits: requests that redraw a masked part of an image."""
