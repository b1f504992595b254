"""Whether ControlNet residuals one step old pay: pipelined mode against synchronous mode. Plain numbers."""

from __future__ import annotations

# Below this cosine between the residuals of adjacent steps, those of the step before are another picture's.
LEAST_SIMILARITY = 0.99
# Of a step: less waiting than that is not worth an approximation.
_LEAST_GAIN = 0.1


def pipelines(similarity: float, *, answer_s: float, encoder_s: float, step_s: float) -> bool:
    """Whether steps should go on with the residuals of the step before.

    similarity: cosine of a ControlNet's residuals between adjacent steps, from its profile. answer_s: from a step
    asked for to its last residual, as measured of late on this link; 0 is not known. encoder_s: of the step, until the
    first residual is needed. step_s: of the whole step, waiting included.
    """
    if similarity < LEAST_SIMILARITY or answer_s <= 0.0 or step_s <= 0.0:
        return False
    return answer_s - encoder_s > _LEAST_GAIN * step_s
