"""Decides which recorded activations the next steps load from a store, and when.

`times` has the seconds of each block, fitted to finished forward passes or measured. `planner` makes the plan for all
running edits; its decision for a row is a `recordings.step_loads.StepLoads`.
"""
