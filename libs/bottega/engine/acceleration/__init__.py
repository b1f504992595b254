"""Accelerations: faster ways to compute the same results.

A worker uses those that are faster and accurate on its device.

At warm-up, `self_check` times each with the worker's own model, and compares its results with the plain path's.
"""
