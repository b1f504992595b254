"""Decides which recorded activations the coming steps load, and when.

times    seconds of each block, fitted to finished turns or measured planner  the plan for all running edits; its
decision for a row is a `recordings.step_loads.StepLoads`
"""
