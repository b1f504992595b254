"""Accelerations: faster ways to compute the same. A worker keeps those that prove faster and accurate on its device.

`self_check` times each against the plain path at warm-up, with the worker's own model, and compares the results.
"""
