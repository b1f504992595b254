"""Edits: images of which a masked part is redrawn."""
