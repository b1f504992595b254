"""Sparse convolutions (after SIGE): feature maps of masked rows are computed in rectangles around their masks alone."""

from bottega.diffusion.editing.sparse.maps import SparseMaps

__all__ = ["SparseMaps"]
