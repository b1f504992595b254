"""Decides which recorded activations the coming steps load, and when.

`times` has the seconds of each block, fitted to finished turns or measured. `planner` is the plan for all running
edits; its decision for a row is a `recordings.step_loads.StepLoads`.
"""
