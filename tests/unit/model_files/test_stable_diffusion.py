"""What is published for Stable Diffusion 1.5 and 2.1 is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bottega.model_files.configuration_rules import check_configurations
from bottega.model_files.family_names import SD15, SD21
from tests.samples.stable_diffusion_configs import sd15, sd21

INPAINTING = {"in_channels": 9}
LCM = {"time_cond_proj_dim": 256}


@pytest.mark.parametrize(
    ("family", "published", "changes"),
    [(SD15, sd15, {}), (SD15, sd15, INPAINTING), (SD15, sd15, LCM), (SD21, sd21, {}), (SD21, sd21, INPAINTING)],
    ids=["1.5", "1.5 for inpainting", "1.5 of LCM", "2.1", "2 for inpainting"],
)
def test_published_configurations_are_served(
    family: str, published: Callable[[], Mapping[str, dict[str, Any]]], changes: Mapping[str, Any]
) -> None:
    configs = dict(published())
    index = configs.pop("index")
    configs["unet"] |= changes
    assert check_configurations(index, configs, family=family) == []
