"""Accelerations that use `bottega.kernels`, which is imported only when one of them is enabled."""
