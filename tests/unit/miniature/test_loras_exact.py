"""The embedded LoRAs, imported as the store does it, draw in the engine what stock Diffusers draws with their files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bottega.diffusion.engine.engine import Engine, EngineLimits
from bottega.diffusion.engine.job import EngineOrder
from bottega.diffusion.model.model import Model
from bottega.diffusion.spec import LoraSpec, ResolvedSpec
from bottega.lora import canonical
from bottega.loras.importing.base import read_base
from bottega.loras.importing.converting import convert
from bottega.loras.importing.source import sources
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import STYLES
from load import stock_loras
from load.bench.local_loras import LocalLoras
from load.bench.lora_styles import use
from tests.support.manual_engine import ManualEngine, load
from tests.support.stock import assert_close, latent_of, load_stock

PROMPT = "a white heart left of a yellow circle on a purple background"
FIRST, *_, LAST = STYLES
SETS: list[dict[str, float]] = [*({style: 1.0} for style in STYLES), {FIRST: 0.8, LAST: 1.0}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """digests: by style."""

    loras: LocalLoras
    digests: Mapping[str, str]


@pytest.fixture(scope="module")
def model() -> Model:
    return load()


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Imported]:
    folder = tmp_path_factory.mktemp("canonical")
    base = read_base(WEIGHTS)
    digests, files = dict[str, str](), dict[str, Path]()
    for style in STYLES:
        path = folder / style
        with path.open("wb") as file:
            canonical.write(file, convert(sources(WEIGHTS / "loras" / style), base=base).modules)
        digests[style] = hashlib.sha256(path.read_bytes()).hexdigest()
        files[digests[style]] = path
    with LocalLoras(files) as loras:
        yield Imported(loras=loras, digests=digests)


@pytest.fixture(scope="module")
def stock() -> Any:
    pipeline = load_stock()
    for style in STYLES:
        stock_loras.load(pipeline, WEIGHTS / "loras" / style, style)
    return pipeline


@pytest.mark.parametrize("patches", [False, True], ids=["beside", "inside"])
@pytest.mark.parametrize("scales", SETS, ids="+".join)
def test_an_embedded_lora_draws_what_stock_draws_with_its_file(
    model: Model, imported: Imported, stock: Any, scales: dict[str, float], patches: bool
) -> None:
    uses = tuple(LoraSpec(name=name, digest=imported.digests[name], scale=scale) for name, scale in scales.items())
    spec = ResolvedSpec(prompt=PROMPT, num_inference_steps=6, width=64, height=64, seed=5, loras=uses)
    engine = Engine(model, EngineLimits(max_wait_turns=0), loras=imported.loras)
    engine.lora_weights.costs.pays = lambda *_, **__: patches  # type: ignore[method-assign]

    drawn = ManualEngine(engine).draw(EngineOrder(key="styled", spec=spec)).latents[0]
    engine.lora_weights.restore()

    use(stock, scales)
    theirs = latent_of(stock, spec)
    use(stock, {})
    assert_close(drawn, theirs)
    assert (theirs - latent_of(stock, spec)).abs().max() > 0.05, "the LoRAs matter"
    assert torch.isfinite(drawn).all()
