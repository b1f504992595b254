"""What work will cost, and what follows from it: plain Python, no torch, no gRPC.

The gateway's scheduler and the worker's engine decide by the same functions, so that they agree.
"""

from bottega.planning.cost import Shape, StepTimes
from bottega.planning.lora_bounds import LEAST_LATENT_SIMILARITY, latest_step
from bottega.planning.pairing import rows_to_offload
from bottega.planning.residuals import LEAST_SIMILARITY, pipelines
from bottega.planning.width import best_width, completion_times, most_on_trial
from bottega.planning.work import RemainingWork, control_steps, rows_per_image, steps_to_run

__all__ = [
    "LEAST_LATENT_SIMILARITY",
    "LEAST_SIMILARITY",
    "Shape",
    "StepTimes",
    "RemainingWork",
    "best_width",
    "completion_times",
    "control_steps",
    "latest_step",
    "most_on_trial",
    "pipelines",
    "rows_to_offload",
    "rows_per_image",
    "steps_to_run",
]
