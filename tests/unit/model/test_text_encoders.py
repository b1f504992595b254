"""Text encoders in other element types and on the host, and the cache of what they made of prompts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import T5EncoderModel

from bottega.addons.loras.engine import WholeLayer
from bottega.addons.loras.wire.module_parts import TOKEN_EMBEDDING, VECTORS
from bottega.device.memory_plan import MemoryPlan
from bottega.engine import encode
from bottega.engine.encode import encode_all_prompts, encode_prompts
from bottega.engine.engine import Engine
from bottega.engine.job import EngineOrder
from bottega.engine.spec import EmbeddingSpec, ResolvedSpec
from bottega.errors import LoraUnusable, TooLarge
from bottega.fair_order import Share
from bottega.model import loading
from bottega.model.loading import load_model
from bottega.model.model import Model
from bottega.model.rows import Embeds
from bottega.model.schedulers import SamplerKind
from bottega.model.text_encoders import JobTexts, TextCache, TextEncoderSettings, keep_on_host
from bottega.model.weights import Placement
from bottega.model_files.folder_check import check_model_folder
from tests.samples.engine_loras import TEXT, Components, LorasByHand, digest_of, lora_spec, random_layers
from tests.samples.family_models import SIZE, Z_IMAGE, FamilyStock, family_model, sampler_of
from tests.support.engines import TOGETHER, lora_weights, make_engine
from tests.support.manual_engine import ManualEngine, load
from tests.support.staged_device import StagedDevice
from tests.support.stock import assert_close

CPU = torch.device("cpu")
T5 = "text_encoder_3"
SPEC = ResolvedSpec(
    prompt="a star",
    negative_prompt="a circle",
    num_inference_steps=2,
    width=SIZE,
    height=SIZE,
    sampler=SamplerKind.FLOW_MATCH_EULER,
)
# A text of the smallest models has 10 KB; that of the smallest one of Stable Diffusion 3 has 130 KB.
BUDGET_BYTES = 4 << 20


def model_with(family: str, **settings: TextEncoderSettings) -> Model:
    return load_model(family_model(family), name="m", device=CPU, dtype=torch.float32, text=settings)


@functools.cache
def model_of(family: str) -> Model:
    return load(family_model(family))


def caching(family: str, budget_bytes: int = BUDGET_BYTES) -> Model:
    """Return a model whose weights other tests share, with a cache of its own."""
    return replace(model_of(family), prompt_cache=TextCache(budget_bytes))


@pytest.mark.parametrize(
    ("family", "part", "dtype"),
    [("SD 3", T5, torch.bfloat16), ("SD 3", T5, torch.float16), (Z_IMAGE, "text_encoder", torch.bfloat16)],
)
def test_an_encoder_in_another_dtype_draws_what_stock_draws_with_it(family: str, part: str, dtype: torch.dtype) -> None:
    model, stock = model_with(family, **{part: TextEncoderSettings(dtype=dtype)}), FamilyStock(family)
    stock.text = type(stock.text).from_pretrained(family_model(family), dtype={part: dtype, "default": torch.float32})
    assert [encoder.dtype for encoder in model.text_encoders] == [
        dtype if each == part else torch.float32 for each in model.family.text_encoders
    ]
    drawing = ManualEngine(make_engine(model, TOGETHER)).draw(EngineOrder(key="it", spec=SPEC))
    assert_close(drawing.latents[0], stock.latent(SPEC))
    # Others must not go on with its checkpoints, nor use its cached latents.
    assert not model.is_as_stock
    assert model.digest != model_of(family).digest
    plain = model_with(family, **{part: TextEncoderSettings(dtype=torch.float32)})
    assert plain.digest == model_of(family).digest


@pytest.mark.parametrize(("family", "part"), [("SD 3", "text_encoder"), ("SD 3", T5), (Z_IMAGE, "text_encoder")])
def test_an_encoder_on_the_host_computes_the_same_with_a_block_on_the_device(family: str, part: str) -> None:
    model = load(family_model(family))
    encoder = dict(zip(model.family.text_encoders, model.text_encoders, strict=True))[part]
    ids = torch.tensor([[5, 3, 1, 1]])
    plain = states(encoder, ids)
    device = StagedDevice()
    kept = keep_on_host(encoder, device)
    assert device.staged == len({*encoder.parameters(), *encoder.buffers()})
    home = {id(tensor): tensor.data_ptr() for tensor in (*encoder.parameters(), *encoder.buffers())}
    visiting = list[int]()

    def look(*_: object) -> None:
        visiting.append(sum(tensor.nbytes for tensor in encoder.parameters() if tensor.data_ptr() != home[id(tensor)]))

    for module in encoder.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.register_forward_pre_hook(look)
    for _ in range(2):
        assert all(torch.equal(one, other) for one, other in zip(states(encoder, ids), plain, strict=True))
    assert min(visiting) > 0
    assert max(visiting) <= kept.device < sum(tensor.nbytes for tensor in encoder.parameters())
    assert {id(tensor): tensor.data_ptr() for tensor in (*encoder.parameters(), *encoder.buffers())} == home
    assert kept.host >= sum(tensor.nbytes for tensor in encoder.parameters())
    with pytest.raises((IndexError, RuntimeError)):
        states(encoder, torch.tensor([[10**6]]))
    assert all(tensor.data_ptr() == home[id(tensor)] for tensor in encoder.parameters())


def test_the_plan_counts_weights_on_the_host_and_a_block_on_the_device() -> None:
    part = check_model_folder(family_model("SD 3")).parts[T5]
    target, memory = Placement(device=CPU, dtype=torch.float32, on_read=lambda _: None), MemoryPlan(1 << 30)
    encoder = loading._load_on_host(T5EncoderModel, part, target, memory)
    loading._reserve(memory, {T5: encoder})
    weights_bytes = 4 * part.parameters
    assert weights_bytes <= memory.on_host[T5] <= 2 * weights_bytes
    assert 0 < memory.reserved["text encoder blocks"] < weights_bytes
    assert memory.reserved["model"] == 0
    with pytest.raises(TooLarge, match="text_encoder_3 would take 0 MiB of the host's memory"):
        loading._load_on_host(T5EncoderModel, part, target, MemoryPlan(1 << 30, available=lambda: 64 << 20))


@torch.inference_mode()
def states(encoder: Any, ids: Tensor) -> Sequence[Tensor]:
    found: Sequence[Tensor] = encoder(ids, output_hidden_states=True).hidden_states
    return found


def on_host(family: str) -> Model:
    """Return a model whose text encoders are kept on the host, as beside a GPU."""
    model = load(family_model(family))
    memory = MemoryPlan()
    for part, encoder in zip(model.family.text_encoders, model.text_encoders, strict=True):
        memory.keep_on_host(part, keep_on_host(encoder, StagedDevice()).host)
    return replace(model, memory=memory)


def test_loras_and_embeddings_reach_encoders_on_the_host() -> None:
    drawings = []
    for model in (load(family_model("SDXL")), on_host("SDXL")):
        easel = ManualEngine(engine_with_loras(model))
        orders = [order("SDXL", key="loras", prompt="a <toy> star", **CHANGED), order("SDXL", key="plain")]
        drawings.append([easel.draw(each).latents[0] for each in orders])
    for mine, theirs in zip(*drawings, strict=True):
        assert torch.equal(mine, theirs)


def test_a_lora_of_an_encoder_in_another_dtype_is_refused() -> None:
    model = model_with("SDXL", text_encoder=TextEncoderSettings(dtype=torch.bfloat16))
    drawing = ManualEngine(engine_with_loras(model)).draw(order("SDXL", loras=(lora_spec("style"),)))
    assert isinstance(drawing.error, LoraUnusable)
    assert "which this worker computes in bfloat16 and its model in float32" in drawing.error.message


CHANGED: Mapping[str, Any] = {
    "loras": (lora_spec("style", 0.8),),
    "embeddings": (EmbeddingSpec(name="toy", digest=digest_of("toy"), token="<toy>"),),
}


def engine_with_loras(model: Model) -> Engine:
    """Return an engine with a LoRA of the first text encoder, one of the UNet, and an embedding."""
    encoders = dict(zip(model.family.text_encoders, model.text_encoders, strict=True))
    vectors = {
        name: {TOKEN_EMBEDDING: WholeLayer(parts={VECTORS: torch.ones(2, encoder.config.hidden_size)}, scale=1.0)}
        for name, encoder in encoders.items()
    }
    text = random_layers(model.text_encoders[0], 1, targets=TEXT)
    other = random_layers(model.text_encoders[0], 2, targets=TEXT)
    unet = random_layers(model.backbone.network, 3)
    loras: dict[str, Components] = {
        "style": {"text_encoder": text},
        "other": {"text_encoder": other},
        "unet": {"unet": unet},
        "toy": vectors,
    }
    return make_engine(model, TOGETHER, loras=LorasByHand.of(loras))


def order(family: str, *, key: str = "it", tenant: str = "", **changes: Any) -> EngineOrder:
    spec = replace(SPEC, sampler=sampler_of(family), **changes)
    return EngineOrder(key=key, spec=spec, share=Share(tenant=tenant))


@pytest.fixture
def encoded() -> Iterator[list[object]]:
    """Count the texts that are encoded."""
    calls = list[object]()
    plain = encode._encode

    def count(*given: Any) -> Any:
        calls.append(given[1])
        return plain(*given)

    with patch.object(encode, "_encode", count):
        yield calls


@pytest.mark.parametrize("family", ["SD 1", "SDXL", "SD 3"])
def test_equal_prompts_of_a_tenant_are_encoded_once(family: str, encoded: list[object]) -> None:
    model = caching(family)
    easel = ManualEngine(make_engine(model, TOGETHER))
    first, second = (easel.draw(order(family, key=key, tenant="a")) for key in "12")
    assert len(encoded) == 2, "the prompt and the negative one"
    assert torch.equal(first.latents[0], second.latents[0])
    assert_close(second.latents[0], FamilyStock(family).latent(order(family).spec))
    assert (model.prompt_cache.hits, model.prompt_cache.misses) == (2, 2)
    easel.draw(order(family, key="3", tenant="b"))
    assert len(encoded) == 4, "another tenant must not learn from the time whose prompts were here"
    easel.draw(order(family, key="4", tenant="a", prompt="a circle", negative_prompt="a star", seed=9))
    assert len(encoded) == 4, "the negative prompt was a prompt"


READINGS: Sequence[Mapping[str, Any]] = (
    {},
    {"prompt": "a  big star"},
    {"prompt_2": "a circle"},
    {"negative_prompt_2": "a star"},
    {"clip_skip": 1},
    {"weighted": True, "prompt": "a (star)"},
    {"weighted": True, "prompt": "a (star:1.2)"},
    {"weighted": True, "prompt": "a (star:1.3)"},
    {"weighted": True, "prompt": "a star BREAK a"},
    {"loras": (lora_spec("style"),)},
    {"loras": (lora_spec("style", 0.8),)},
    {"loras": (lora_spec("other"),)},
    {"embeddings": CHANGED["embeddings"], "prompt": "a <toy> star"},
    {"prompt": "a <toy> star"},
)
"""Parameters with each of which the same model reads other embeddings."""


def test_whatever_changes_an_embedding_is_in_its_key() -> None:
    """Pictures after all others are those of an engine without a cache, bit for bit."""
    pictures = list[list[Tensor]]()
    for budget_bytes in (0, BUDGET_BYTES):
        easel = ManualEngine(engine_with_loras(caching("SDXL", budget_bytes)))
        pictures.append(
            [easel.draw(order("SDXL", num_inference_steps=1, **changes)).latents[0] for changes in READINGS]
        )
        lora_weights(easel.engine).restore()
    assert all(torch.equal(cached, plain) for plain, cached in zip(*pictures, strict=True))
    assert len({tuple(picture.flatten().tolist()) for picture in pictures[0]}) == len(READINGS)


def test_a_lora_of_the_unet_alone_uses_embeddings_without_it(encoded: list[object]) -> None:
    easel = ManualEngine(engine_with_loras(caching("SDXL")))
    easel.draw(order("SDXL", key="plain"))
    easel.draw(order("SDXL", key="LoRA", loras=(lora_spec("unet"),)))
    lora_weights(easel.engine).restore()
    assert len(encoded) == 2


def test_the_cache_is_bounded_and_the_least_recently_used_text_goes_first() -> None:
    model = caching("SD 1")
    spec = replace(SPEC, negative_prompt=None, guidance_scale=1.0, sampler=SamplerKind.EULER)
    texts = [replace(spec, prompt=prompt) for prompt in ("a", "b", "a", "c")]
    encode_all_prompts(model, texts[0])
    size_bytes = model.prompt_cache.used_bytes
    assert size_bytes >= encode_prompts(model, texts[0]).conditional.prompt.nbytes
    model = caching("SD 1", 2 * size_bytes)
    for one in texts:
        encode_all_prompts(model, one)
        assert model.prompt_cache.used_bytes <= 2 * size_bytes
    encode_all_prompts(model, texts[0])
    assert (model.prompt_cache.hits, model.prompt_cache.misses) == (2, 3)
    encode_all_prompts(model, texts[1])
    assert (model.prompt_cache.hits, model.prompt_cache.misses) == (2, 4)
    small = caching("SD 1", size_bytes - 1)
    encode_all_prompts(small, texts[0])
    assert small.prompt_cache.used_bytes == 0


def test_a_job_without_a_cache_encodes_equal_texts_once(encoded: list[object]) -> None:
    spec = replace(SPEC, prompt="", prompts=("a", "b", "a"), num_images=3)
    model = caching("SD 3", 0)
    conditions = encode_all_prompts(model, spec)
    assert len(encoded) == 3, "two prompts and the negative one"
    assert (model.prompt_cache.hits, model.prompt_cache.misses, model.prompt_cache.used_bytes) == (0, 0, 0)
    assert isinstance(conditions[0].unconditional, Embeds)


def test_keys_do_not_mix_what_they_are_made_of() -> None:
    keys = [
        JobTexts(cache=TextCache(), tenant=tenant, changes=changes).key(what)
        for tenant, changes, what in (
            ("a", (), ((1, 2), 3)),
            ("b", (), ((1, 2), 3)),
            ("a", (("x", 1.0),), ((1, 2), 3)),
            ("a", (("x", "1.0"),), ((1, 2), 3)),
            ("a", (), ((1,), 2, 3)),
        )
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.gpu
def test_encoders_on_the_host_of_a_gpu_draw_what_those_on_it_draw() -> None:
    latents = list[Tensor]()
    for on_host in (False, True):
        settings = dict.fromkeys(("text_encoder", "text_encoder_2", T5), TextEncoderSettings(on_host=on_host))
        model = load_model(
            family_model("SD 3"), name="m", device=torch.device("cuda:0"), dtype=torch.float32, text=settings
        )
        assert {encoder.device.type for encoder in model.text_encoders} == {"cpu" if on_host else "cuda"}
        latents.append(ManualEngine(make_engine(model, TOGETHER)).draw(order("SD 3")).latents[0])
    assert torch.equal(*latents)
