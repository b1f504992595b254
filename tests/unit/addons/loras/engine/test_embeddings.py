"""Textual inversion embeddings against stock Diffusers' load_textual_inversion, for each family of text encoders."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.addons.loras.engine import Layers, WholeLayer
from bottega.addons.loras.wire.module_parts import TOKEN_EMBEDDING, VECTORS
from bottega.engine.engine import Engine
from bottega.engine.events import JobCheckpointed
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import EmbeddingSpec, ResolvedSpec
from bottega.errors import InvalidRequest, LoraUnusable, NotFinite
from bottega.model.model import Model
from tests.samples.engine_loras import LorasByHand, digest_of, lora_spec, random_layers
from tests.samples.family_models import SIZE, FamilyStock, family_model
from tests.support.engines import TOGETHER, lora_weights, make_engine
from tests.support.manual_engine import ManualEngine, load
from tests.support.stock import assert_close, deviation

# Tokens, numbers of vectors and names. The first token is in the prompt twice, and the second one is negative.
TOKENS = {"<toy>": 3, "uglything": 1}
SPEC = ResolvedSpec(
    prompt="a big red <toy> star on the <toy> left",
    negative_prompt="a uglything circle",
    num_inference_steps=3,
    width=SIZE,
    height=SIZE,
    seed=3,
    embeddings=tuple(EmbeddingSpec(name=token, digest=digest_of(token), token=token) for token in TOKENS),
)
FAMILIES = pytest.mark.parametrize("family", ["SD 1", "SD 2", "SDXL"])


@functools.cache
def model_of(family: str) -> Model:
    return load(family_model(family))


@functools.cache
def vectors_of(family: str) -> Mapping[str, Mapping[str, Tensor]]:
    """Return random vectors by token and text encoder."""
    generator = torch.Generator().manual_seed(5)
    return {
        token: {
            name: torch.randn(count, encoder.config.hidden_size, generator=generator)
            for name, encoder in zip(model_of(family).family.text_encoders, model_of(family).text_encoders, strict=True)
        }
        for token, count in TOKENS.items()
    }


@functools.cache
def stock_of(family: str) -> FamilyStock:
    """Return stock Diffusers, which knows the tokens."""
    stock = FamilyStock(family)
    for token, vectors in vectors_of(family).items():
        for name, rows in vectors.items():
            tokenizer = getattr(stock.text, name.replace("text_encoder", "tokenizer"))
            stock.text.load_textual_inversion(
                {token: rows}, tokenizer=tokenizer, text_encoder=getattr(stock.text, name)
            )
    return stock


def layers(vectors: Mapping[str, Tensor]) -> Mapping[str, Layers]:
    return {name: {TOKEN_EMBEDDING: WholeLayer(parts={VECTORS: rows}, scale=1.0)} for name, rows in vectors.items()}


def engine_of(family: str, limits: EngineLimits = TOGETHER) -> Engine:
    components = {token: layers(vectors) for token, vectors in vectors_of(family).items()}
    unet = model_of(family).backbone.network
    return make_engine(
        model_of(family), limits, loras=LorasByHand.of({**components, "style": {"unet": random_layers(unet, 3)}})
    )


def order(key: str = "it", **changes: Any) -> EngineOrder:
    return EngineOrder(key=key, spec=replace(SPEC, **changes))


@FAMILIES
def test_embeddings_in_a_mixed_batch_draw_what_stock_draws(family: str) -> None:
    engine = engine_of(family)
    easel = ManualEngine(engine)
    orders = [
        order("both"),
        order("plain", embeddings=(), seed=4),
        order("one", prompt="a uglything star", negative_prompt=None, embeddings=SPEC.embeddings[1:], seed=5),
        order("with a LoRA", seed=6, loras=(lora_spec("style"),)),
    ]
    drawings = easel.run({0: orders})
    lora_weights(engine).restore()
    stock = stock_of(family)
    for key in ("both", "one"):
        spec = next(each.spec for each in orders if each.key == key)
        assert_close(drawings[key].latents[0], stock.latent(spec))
        assert drawings[key].record.exact
    assert_close(drawings["plain"].latents[0], FamilyStock(family).latent(orders[1].spec))
    assert deviation(drawings["plain"].latents[0], stock.latent(orders[1].spec)) > 1e-3  # the tokens matter
    assert drawings["both"].record.provenance.mean_group_requests > 1
    assert [(use.name, use.token) for use in drawings["with a LoRA"].record.provenance.loras] == [
        ("style", ""),
        *((token, token) for token in TOKENS),
    ]


@pytest.mark.parametrize("family", ["SD 2", "SDXL"])
def test_truncation_counts_vectors_as_stock(family: str) -> None:
    room = model_of(family).tokenizers[0].model_max_length - 2
    long = order(prompt=f"{'star ' * (room - 5)}<toy> on <toy> <toy> red circle")
    drawing = ManualEngine(engine_of(family)).draw(long)
    assert_close(drawing.latents[0], stock_of(family).latent(long.spec))
    ((cut,),) = [[cut.text for cut in drawing.record.provenance.truncations]]
    assert cut.startswith("<toy>_1")
    assert cut.endswith("red circle")


def test_chunks_and_weights_of_a_weighted_prompt_count_each_vector() -> None:
    """The picture is that of a model whose own tokenizer and text encoder have the tokens."""
    weighted = order(prompt="a big (<toy>:1.4) star BREAK red", weighted=True, negative_prompt=None)
    easel = ManualEngine(engine_of("SD 1"))
    spelled = replace(weighted.spec, embeddings=())
    alone = load(family_model("SD 1"))
    tokenizer, encoder = alone.tokenizers[0], alone.text_encoders[0]
    tokens = ["<toy>", "<toy>_1", "<toy>_2"]
    tokenizer.add_tokens(tokens)
    table = encoder.resize_token_embeddings(len(tokenizer))
    for token, row in zip(tokens, vectors_of("SD 1")["<toy>"]["text_encoder"], strict=True):
        table.weight.data[tokenizer.convert_tokens_to_ids(token)] = row
    theirs = ManualEngine(make_engine(alone, TOGETHER)).draw(EngineOrder(key="it", spec=spelled))
    assert_close(easel.draw(weighted).latents[0], theirs.latents[0])


def _draw_with(vectors: Mapping[str, Tensor], *, token: str = "<it>", **changes: Any) -> object:
    """Draw with an embedding of these vectors alone, and return the error."""
    easel = ManualEngine(make_engine(model_of("SD 1"), TOGETHER, loras=LorasByHand.of({"it": layers(vectors)})))
    spec = EmbeddingSpec(name="it", digest=digest_of("it"), token=token)
    return easel.draw(order(embeddings=(spec,), **changes)).error


def test_a_weighted_prompt_that_vectors_make_too_long_is_refused() -> None:
    error = _draw_with({"text_encoder": torch.zeros(20, 32)}, prompt="<it> " * 30, weighted=True)
    assert isinstance(error, InvalidRequest)
    size = model_of("SD 1").tokenizers[0].model_max_length - 2
    assert error.message == f"spec.prompt: has over 20 chunks of {size} tokens, which is the maximum"


def test_vectors_that_are_too_large_are_named_as_the_cause() -> None:
    error = _draw_with({"text_encoder": torch.full((1, 32), 3e38)}, prompt="a <it>")
    assert isinstance(error, NotFinite)
    assert error.message.endswith("most likely because of its embeddings (it); try other embeddings")
    assert error.metadata == {"embeddings": "it"}


def test_another_worker_resumes_a_picture_with_embeddings() -> None:
    family = "SDXL"
    limits = EngineLimits(max_rows=2, checkpoint_interval_s=0.0, progress_interval_s=0.0)
    whole = order(num_inference_steps=6)
    first = ManualEngine(engine_of(family, limits))
    drawing = first.submit(whole)
    while not drawing.ended and not drawing.all(JobCheckpointed):
        first.turn()
    left = drawing.all(JobCheckpointed)[-1]
    resumed = ManualEngine(engine_of(family)).draw(replace(whole, checkpoint=left.data))
    assert resumed.job is not None
    assert resumed.job.steps_resumed == left.steps_done > 0
    assert_close(resumed.latents[0], stock_of(family).latent(whole.spec))


@pytest.mark.parametrize(
    ("vectors", "token", "reason"),
    [
        ({"text_encoder": torch.zeros(1, 7)}, "<new>", "has vectors of 7 values, and a text encoder .* reads 32"),
        ({"text_encoder": torch.zeros(1, 32)}, "star</w>", "is known already"),
        ({}, "<new>", "is no embedding"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_next_request_is_plain(
    vectors: Mapping[str, Tensor], token: str, reason: str
) -> None:
    model = model_of("SD 1")
    easel = ManualEngine(make_engine(model, TOGETHER, loras=LorasByHand.of({"it": layers(vectors)})))
    spec = EmbeddingSpec(name="it", digest=digest_of("it"), token=token)
    error = easel.draw(order(embeddings=(spec,))).error
    assert isinstance(error, LoraUnusable)
    assert re.search(reason, error.message)
    plain = order(embeddings=())
    assert_close(easel.draw(plain).latents[0], FamilyStock("SD 1").latent(plain.spec))
