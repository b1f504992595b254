"""Recordings of templates: what blocks put out where an image is not redrawn, by whom it is recorded, read and kept."""
