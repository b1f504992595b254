"""The families of models that workers serve."""

from __future__ import annotations

from collections.abc import Mapping

SD15, SD21, SDXL = "sd15", "sd21", "sdxl"
TITLES: Mapping[str, str] = {SD15: "Stable Diffusion 1", SD21: "Stable Diffusion 2", SDXL: "SDXL"}
"""Display names of the families whose folders are checked part by part."""
PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")
"""What UNets predict, by the names of Diffusers."""


def served_titles() -> str:
    """Return the display names of the families that are served, for a sentence."""
    *others, last = TITLES.values()
    return f"{', '.join(others)} and {last}"


def with_article(title: str) -> str:
    """Return a display name with its article, such as "an SDXL"."""
    return f"an {title}" if title == TITLES[SDXL] else f"a {title}"
