"""Cost models and the decisions that follow from them, in plain Python without torch and gRPC.

The gateway's scheduler and the worker's engine decide with the same functions, so that they agree.
"""

from bottega.planning.addon_bounds import LEAST_LATENT_SIMILARITY, LEAST_SIMILARITY, latest_step, pipelines
from bottega.planning.block_loading import BlockCost, StepPlan, least_end_s, plan_step, plan_steps
from bottega.planning.cost import Shape, StepTimes
from bottega.planning.eviction import (
    FIFO,
    LCBFU,
    LFU,
    LRU,
    EvictionHeap,
    EvictionPolicy,
    Usage,
    decayed_lcbfu,
)
from bottega.planning.pairing import rows_to_offload
from bottega.planning.predictor_use import PredictorRates, PredictorSwitch
from bottega.planning.row_fractions import RowFractions, rounded_share, rows_in
from bottega.planning.skip_profile import (
    BALANCED_ALPHA,
    FAST_ALPHA,
    NIRVANA_768,
    LengthClass,
    QualitySample,
    SkipProfile,
    count_words,
    fallback_profile,
    fraction_of,
    least_similarity,
    measured_class,
    served_step,
    skip_step,
    skip_steps,
)
from bottega.planning.step_table import StepTable
from bottega.planning.width import MAX_BACKLOG, best_width, completion_times, most_on_trial
from bottega.planning.work import RemainingWork, control_steps, rows_per_image, steps_to_run
from bottega.planning.work_fit import WorkCost, WorkFit

__all__ = [
    "BALANCED_ALPHA",
    "FAST_ALPHA",
    "FIFO",
    "LCBFU",
    "LEAST_LATENT_SIMILARITY",
    "LEAST_SIMILARITY",
    "LFU",
    "LRU",
    "MAX_BACKLOG",
    "NIRVANA_768",
    "BlockCost",
    "EvictionHeap",
    "EvictionPolicy",
    "LengthClass",
    "StepPlan",
    "PredictorRates",
    "PredictorSwitch",
    "QualitySample",
    "RemainingWork",
    "RowFractions",
    "Shape",
    "SkipProfile",
    "StepTable",
    "StepTimes",
    "Usage",
    "WorkCost",
    "WorkFit",
    "best_width",
    "completion_times",
    "control_steps",
    "count_words",
    "decayed_lcbfu",
    "fallback_profile",
    "fraction_of",
    "latest_step",
    "least_end_s",
    "least_similarity",
    "measured_class",
    "most_on_trial",
    "pipelines",
    "plan_step",
    "plan_steps",
    "rounded_share",
    "rows_in",
    "rows_per_image",
    "rows_to_offload",
    "served_step",
    "skip_step",
    "skip_steps",
    "steps_to_run",
]
