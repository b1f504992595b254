"""What the checker says of model folders."""

from __future__ import annotations

from bottega.miniature import WEIGHTS
from bottega.model_files import check_model_folder


def test_the_embedded_model_can_be_served() -> None:
    report = check_model_folder(WEIGHTS)
    assert report.problems == ()
    assert report.pipeline_class == "StableDiffusionXLPipeline"
    assert report.scheduler_class == "EulerDiscreteScheduler"
