"""Accelerations that use the package `bottega.kernels`, which is imported only when one of them is enabled."""
