"""Cost models and the decisions that follow from them, in plain Python without torch and gRPC.

The gateway's scheduler and the worker's engine decide with the same functions, so that they agree.
"""

from bottega.planning.cost import PackedTimes, RowFractions, Shape, StepTimes, relative_area, rounded_share, rows_in
from bottega.planning.width import (
    MAX_BACKLOG,
    Pace,
    RemainingWork,
    StepTable,
    best_width,
    completion_times,
    control_steps,
    most_on_trial,
    rows_per_image,
    rows_to_offload,
    steps_to_run,
)

__all__ = [
    "MAX_BACKLOG",
    "Pace",
    "PackedTimes",
    "RemainingWork",
    "RowFractions",
    "Shape",
    "StepTable",
    "StepTimes",
    "best_width",
    "completion_times",
    "control_steps",
    "most_on_trial",
    "relative_area",
    "rounded_share",
    "rows_in",
    "rows_per_image",
    "rows_to_offload",
    "steps_to_run",
]
