"""Accelerations: ways to compute the same faster, each kept by a worker only when it has proven itself there.

`self_check` times each against the plain path at warm-up, on this worker's device and model, and compares the results.
"""
