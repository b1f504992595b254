"""Edits in a worker's engine: what blocks put out for their images, within a budget of its memory."""
