"""Which activations of coming steps are loaded, and when.

times    seconds of blocks, fitted to the turns that ran or as measured
planner  the plan for all edits in hand; what it decides for a row is a `recordings.step_loads.StepLoads`
"""
