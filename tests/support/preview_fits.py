"""The preview of a model is fitted once for all engines of a file: a tenth of the time of tests that make many."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch
from weakref import WeakKeyDictionary

import pytest
from diffusers import AutoencoderKL

from bottega.engine.encode import LatentPreview
from bottega.model.model import Model


@pytest.fixture(autouse=True, scope="module")
def preview_fitted_once() -> Iterator[None]:
    fit, fitted = LatentPreview.fit, WeakKeyDictionary[AutoencoderKL, LatentPreview]()

    def once(model: Model) -> LatentPreview:
        if model.vae not in fitted:
            fitted[model.vae] = fit(model)
        return fitted[model.vae]

    with patch.object(LatentPreview, "fit", once):
        yield
