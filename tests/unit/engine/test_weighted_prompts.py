"""Weighted prompts of any length condition pictures as in AUTOMATIC1111's web UI.

The expected conditions are computed here from tokens and weights that are written out for each prompt. The tokenizers
of these models take 24 tokens, so that a chunk has 22, and each word and comma of these prompts is one token.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from bottega.engine.encode import encode_prompts
from bottega.engine.events import JobCheckpointed
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits, check_drawable
from bottega.engine.parallel import pair
from bottega.engine.prompt_chunks import empty_chunk, plain_chunk, weighted_chunks
from bottega.engine.spec import ResolvedSpec
from bottega.errors import InvalidRequest
from bottega.model.model import Model
from bottega.prompt_syntax import MalformedPrompt
from tests.samples.controlnets import control_image, control_spec, save
from tests.samples.family_models import (
    SIZE,
    FamilyStock,
    control_networks,
    family_model,
    is_sdxl,
)
from tests.support.controlled_engine import Desk, on
from tests.support.engines import TOGETHER, make_engine
from tests.support.linked_servers import Offers, linked_server
from tests.support.manual_engine import ManualEngine, load
from tests.support.pair_follower import FollowerThread, led
from tests.support.stock import assert_close

PLAIN = ResolvedSpec(prompt="a big red star", num_inference_steps=4, width=SIZE, height=SIZE, seed=3)
WEIGHTED = replace(PLAIN, weighted=True)
CHUNK = 22
DRAWING = ("SD 1", "SD 2", "SDXL", "SDXL pruned")

# The words of one chunk with their weights.
Words = Sequence[tuple[str, float]]


@functools.cache
def model_of(family: str) -> Model:
    model = load(family_model(family))
    change_norm(model.text_encoders[0])
    return model


@functools.cache
def stock_of(family: str) -> FamilyStock:
    stock = FamilyStock(family)
    change_norm(stock.text.text_encoder)
    return stock


def change_norm(encoder: Any) -> None:
    """Give an encoder's last norm values as trained ones have, because the mean of states is restored.

    The norm of a random encoder makes it 0.
    """
    torch.nn.init.uniform_(encoder.final_layer_norm.bias, 0.1, 0.5, generator=torch.Generator().manual_seed(1))


def words(text: str, weight: float = 1.0) -> list[tuple[str, float]]:
    return [(word, weight) for word in text.split()]


def by_hand(family: str, chunks: Sequence[Words], *, clip_skip: int = 0) -> tuple[Tensor, Tensor]:
    """Return the states of a prompt with these chunks, [1, tokens, features], and the last encoder's pooled state."""
    stock, of_encoders, pooled = stock_of(family).text, [], []
    names = ("", "_2") if hasattr(stock, "text_encoder_2") else ("",)
    for name in names:
        tokenizer, encoder = getattr(stock, f"tokenizer{name}"), getattr(stock, f"text_encoder{name}")
        vocabulary, states = tokenizer.get_vocab(), []
        for chunk in chunks:
            ids = [tokenizer.bos_token_id, *(vocabulary[f"{word}</w>"] for word, _ in chunk), tokenizer.eos_token_id]
            ids += [tokenizer.pad_token_id] * (CHUNK + 2 - len(ids))
            with torch.inference_mode():
                output = encoder(torch.tensor([ids]), output_hidden_states=True)
                if len(names) == 2:
                    state = output.hidden_states[-2 - clip_skip]
                else:
                    state = encoder.final_layer_norm(output.hidden_states[-1 - clip_skip])
            pooled.append(output.text_embeds if hasattr(output, "text_embeds") else output.pooler_output)
            weighted = state.clone()
            for place, (_, weight) in enumerate(chunk, start=1):
                weighted[0, place] = weighted[0, place] * weight
            states.append(weighted * (float(state.sum()) / float(weighted.sum())))
        of_encoders.append(torch.cat(states, dim=1))
    return torch.cat(of_encoders, dim=-1), pooled[-len(chunks)]


def drawn_by_stock(
    family: str, spec: ResolvedSpec, prompt: Sequence[Words], negative: Sequence[Words], **options: Any
) -> Tensor:
    """Return the latent that stock draws with conditions that are computed by hand."""
    embeds, pooled = by_hand(family, prompt)
    negative_embeds, negative_pooled = by_hand(family, negative)
    conditions = {"prompt_embeds": embeds, "negative_prompt_embeds": negative_embeds}
    if is_sdxl(family):
        conditions |= {"pooled_prompt_embeds": pooled, "negative_pooled_prompt_embeds": negative_pooled}
    return stock_of(family).latent(spec, conditions=conditions, **options)


LONG = "a big red star on the left " * 5
CASES: dict[str, tuple[str, list[Words]]] = {
    "brackets": (
        "a (big:1.5) red [star], ((left",
        [[("a", 1), ("big", 1.5), ("red", 1), ("star", 1 / 1.1), (",", 1), ("left", 1.1 * 1.1)]],
    ),
    "below zero": ("a (red:-0.5) star", [[("a", 1), ("red", -0.5), ("star", 1)]]),
    "break": ("a red BREAK (star:2)", [words("a red"), [("star", 2.0)]]),
    "two breaks": ("a BREAK BREAK (red)", [words("a"), [], [("red", 1.1)]]),
    "long": (LONG, [words(LONG)[:22], words(LONG)[22:]]),
    "longer by one": ("(star:1.2) " * 23, [words("star " * 22, 1.2), words("star", 1.2)]),
    "19 words behind a comma": (
        "a (star:1.4), " + "left " * 20,
        [[("a", 1), ("star", 1.4), (",", 1)], words("left " * 20)],
    ),
    "a comma behind a chunk": ("star " * 22 + ", left", [words("star " * 22), words(", left")]),
    "nothing": ("", [[]]),
}


# A text is cut into chunks in one way for all families; what they make of the chunks differs.
@pytest.mark.parametrize(
    ("family", "case"),
    [(family, case) for family in DRAWING for case in CASES if case in {"brackets", "break"} or family == "SDXL"],
)
def test_conditions_are_those_of_the_web_ui(family: str, case: str) -> None:
    prompt, chunks = CASES[case]
    model = model_of(family)
    conditions = encode_prompts(model, replace(WEIGHTED, prompt=prompt, negative_prompt=""))
    expected, pooled = by_hand(family, chunks)
    torch.testing.assert_close(conditions.conditional.prompt[None], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(conditions.summary[None], pooled, rtol=1e-4, atol=1e-5)
    if is_sdxl(family):
        torch.testing.assert_close(conditions.conditional.added["text_embeds"][None], pooled, rtol=1e-4, atol=1e-5)
    assert conditions.unconditional is not None
    empty, _ = by_hand(family, [[]] * len(chunks))
    torch.testing.assert_close(conditions.unconditional.prompt[None], empty, rtol=1e-4, atol=1e-5)
    assert not conditions.truncations


@pytest.mark.parametrize("family", DRAWING)
def test_a_text_without_weights_is_encoded_as_a_plain_one(family: str) -> None:
    model = model_of(family)
    weighted, plain = (
        encode_prompts(model, replace(spec, negative_prompt=r"a circle", prompt=PLAIN.prompt))
        for spec in (WEIGHTED, PLAIN)
    )
    for ours, theirs in ((weighted.conditional, plain.conditional), (weighted.unconditional, plain.unconditional)):
        assert ours is not None
        assert theirs is not None
        assert all(torch.equal(tensor, theirs.tensors[name]) for name, tensor in ours.tensors.items())


VECTORS = [("<toy>" if index == 0 else f"<toy>_{index}", 1.5) for index in range(8)]
EMBEDDED: dict[str, tuple[str, list[Words]]] = {
    "it fits": ("star " * 14 + "(<toy>:1.5)", [[*words("star " * 14), *VECTORS]]),
    "longer by one": ("star " * 15 + "(<toy>:1.5) red", [words("star " * 15), [*VECTORS, ("red", 1.0)]]),
    "behind a full chunk": ("star " * 22 + "(<toy>:1.5)", [words("star " * 22), VECTORS]),
    "19 words behind a comma": (
        "a big, " + "star " * 19 + "(<toy>:1.5)",
        [words("a big ,"), words("star " * 19), VECTORS],
    ),
}


@pytest.mark.parametrize("case", EMBEDDED)
def test_an_embedding_is_in_one_chunk_as_in_the_web_ui(case: str) -> None:
    """Its tokenize_line begins a chunk with an embedding for which the chunk before has no room."""
    prompt, chunks = EMBEDDED[case]
    tokenizer = copy.deepcopy(model_of("SD 1").tokenizers[0])
    tokenizer.add_tokens([token for token, _ in VECTORS])
    read = [
        [
            (tokenizer.convert_ids_to_tokens(token).removesuffix("</w>"), weight)
            for token, weight in zip(chunk.ids, chunk.weights or [1.0] * len(chunk.ids), strict=True)
            if token not in tokenizer.all_special_ids
        ]
        for chunk in weighted_chunks(prompt, tokenizer)
    ]
    assert read == chunks


def test_chunks_are_padded_as_diffusers_pads_them() -> None:
    """The second tokenizer of SDXL pads with another token than that which ends a text."""
    tokenizer = copy.deepcopy(model_of("SDXL").tokenizers[1])
    tokenizer.pad_token = "!"
    (chunk,) = weighted_chunks("a (star)", tokenizer)
    vocabulary = tokenizer.get_vocab()
    ids = [tokenizer.bos_token_id, vocabulary["a</w>"], vocabulary["star</w>"], tokenizer.eos_token_id]
    assert list(chunk.ids) == [*ids, *[vocabulary["!"]] * 20]
    assert chunk.ids == plain_chunk("a star", tokenizer)[0].ids
    assert empty_chunk(tokenizer).ids == plain_chunk("", tokenizer)[0].ids


@pytest.mark.parametrize("family", DRAWING)
def test_pictures_are_those_of_stock_with_these_conditions(family: str) -> None:
    spec = replace(WEIGHTED, prompt="a (red:1.4) star BREAK left", negative_prompt="[a circle]")
    drawing = ManualEngine(make_engine(model_of(family), TOGETHER)).draw(EngineOrder(key=0, spec=spec))
    prompt = [[("a", 1), ("red", 1.4), ("star", 1)], words("left")]
    negative = [words("a circle", 1 / 1.1), []]
    assert_close(drawing.latents[0], drawn_by_stock(family, spec, prompt, negative))


def test_the_shorter_of_both_prompts_is_padded() -> None:
    model = model_of("SDXL")
    conditions = encode_prompts(model, replace(WEIGHTED, prompt="(star)", negative_prompt="a BREAK b BREAK c"))
    assert conditions.unconditional is not None
    assert conditions.conditional.prompt.shape == conditions.unconditional.prompt.shape
    expected, _ = by_hand("SDXL", [words("star", 1.1), [], []])
    torch.testing.assert_close(conditions.conditional.prompt[None], expected, rtol=1e-4, atol=1e-5)


def test_both_encoders_read_their_own_text() -> None:
    spec = replace(WEIGHTED, prompt="a (star:2)", prompt_2="red BREAK (left:0.5)", guidance_scale=1.0)
    conditional = encode_prompts(model_of("SDXL"), spec).conditional
    first, _ = by_hand("SDXL", [[("a", 1), ("star", 2)], []])
    second, pooled = by_hand("SDXL", [words("red"), words("left", 0.5)])
    width = first.shape[-1] // 2
    expected = torch.cat([first[..., :width], second[..., width:]], dim=-1)
    torch.testing.assert_close(conditional.prompt[None], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(conditional.added["text_embeds"][None], pooled, rtol=1e-4, atol=1e-5)


def test_rows_of_any_length_are_drawn_in_one_engine_as_alone() -> None:
    orders = [
        EngineOrder(key="plain", spec=replace(PLAIN, negative_prompt="")),
        EngineOrder(key="one", spec=replace(WEIGHTED, prompt="a (star:1.3)", negative_prompt="", seed=4)),
        EngineOrder(key="three", spec=replace(WEIGHTED, prompt="a BREAK b BREAK (c)", negative_prompt="", seed=5)),
        EngineOrder(key="three more", spec=replace(WEIGHTED, prompt="c BREAK b BREAK a", negative_prompt="", seed=6)),
    ]
    by_words = {
        "plain": [words(PLAIN.prompt)],
        "one": [[("a", 1), ("star", 1.3)]],
        "three": [words("a"), words("b"), words("c", 1.1)],
        "three more": [words("c"), words("b"), words("a")],
    }
    drawings = ManualEngine(make_engine(model_of("SDXL"), TOGETHER)).run({0: orders})
    for order in orders:
        chunks = by_words[str(order.key)]
        expected = drawn_by_stock("SDXL", order.spec, chunks, [[]] * len(chunks))
        assert_close(drawings[order.key].latents[0], expected)
        assert drawings[order.key].record.provenance.mean_group_requests > 1


LONG_SPEC = replace(WEIGHTED, prompt="a (red:1.4) BREAK star", negative_prompt="")
LONG_WORDS: list[Words] = [[("a", 1), ("red", 1.4)], words("star")]


@functools.cache
def drawn_of_all_chunks() -> Tensor:
    return drawn_by_stock("SDXL", LONG_SPEC, LONG_WORDS, [[], []])


def test_another_worker_of_a_pair_reads_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "rows_to_offload", lambda rows, able, **_: min(rows - 1, able, 1))
    with FollowerThread(make_engine(load(family_model("SDXL")), TOGETHER)) as follower:
        peer = led(follower)
        engine = make_engine(model_of("SDXL"), TOGETHER, peer=peer)
        drawing = ManualEngine(engine).draw(EngineOrder(key=0, spec=LONG_SPEC))
        peer.stop()
    assert drawing.record.provenance.pair.steps > 0
    assert_close(drawing.latents[0], drawn_of_all_chunks())


def test_controlnets_on_servers_read_all_chunks(tmp_path: Path) -> None:
    networks, images = control_networks("SDXL"), [control_image(seed, SIZE, SIZE) for seed in (1, 2)]
    folders = save(dict(zip(("edges", "depth"), networks, strict=True)), tmp_path)
    controls = tuple(control_spec(name, image, 0.6) for name, image in zip(folders, images, strict=True))
    spec = replace(LONG_SPEC, controlnets=controls)
    with linked_server("server", folders, tmp_path) as server, Desk.closing():
        order = on(EngineOrder(key=0, spec=spec, control_images=tuple(images)), server)
        drawing = Desk(model_of("SDXL"), Offers(server)).draw(order)
    expected = drawn_by_stock("SDXL", spec, LONG_WORDS, [[], []], networks=networks, control_images=images)
    assert_close(drawing.latents[0], expected)


def test_another_worker_resumes_a_weighted_prompt() -> None:
    limits = EngineLimits(max_rows=2, checkpoint_interval_s=0.0)
    order, first = EngineOrder(key=0, spec=LONG_SPEC), ManualEngine(make_engine(model_of("SDXL"), limits))
    drawing = first.submit(order)
    while not drawing.all(JobCheckpointed):
        first.turn()
    left = drawing.all(JobCheckpointed)[-1]
    other = ManualEngine(make_engine(model_of("SDXL"), limits)).draw(replace(order, checkpoint=left.data))
    assert other.job is not None
    assert other.job.steps_resumed > 0
    assert_close(other.latents[0], drawn_of_all_chunks())


@pytest.mark.parametrize("family", DRAWING)
def test_clip_skip_holds_for_both_halves_of_weighted_prompts(family: str) -> None:
    conditions = encode_prompts(
        model_of(family), replace(WEIGHTED, prompt="a (star:2)", negative_prompt="a", clip_skip=1)
    )
    for half, chunks in (
        (conditions.conditional, [[("a", 1.0), ("star", 2.0)]]),
        (conditions.unconditional, [words("a")]),
    ):
        assert half is not None
        expected, _ = by_hand(family, chunks, clip_skip=1)
        torch.testing.assert_close(half.prompt[None], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "clip_skip"), [("SD 1", 0), ("SD 1", 1), ("SDXL", 1)])
def test_clip_skip_of_plain_prompts_is_that_of_stock(
    monkeypatch: pytest.MonkeyPatch, family: str, clip_skip: int
) -> None:
    # Diffusers looks for the last norm where transformers had it before version 5.
    monkeypatch.setattr(CLIPTextModel, "text_model", property(lambda encoder: encoder), raising=False)
    spec = replace(PLAIN, clip_skip=clip_skip, negative_prompt="a circle")
    drawing = ManualEngine(make_engine(model_of(family), TOGETHER)).draw(EngineOrder(key=0, spec=spec))
    assert_close(drawing.latents[0], stock_of(family).latent(spec))


TOO_LONG = "has over 20 chunks of 22 tokens, which is the maximum"
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "twelve thousand tokens": ({"prompt": "a " * 12_000}, f"spec.prompt: {TOO_LONG}"),
    "a negative prompt": ({"negative_prompt": "a " * 12_000}, f"spec.negative_prompt: {TOO_LONG}"),
    "a list": ({"prompts": ("a", "a " * 12_000), "num_images": 2}, f"spec.prompts[1]: {TOO_LONG}"),
    "eight thousand weights": ({"prompt": "(a)b" * 4000}, "spec.prompt: has over 3000 texts between"),
    "as many as are read": ({"prompt": "(a) b " * 749}, f"spec.prompt: {TOO_LONG}"),
    "a wrong number": ({"prompt": "(a:.)"}, "spec.prompt: has the weight ., which is not a number"),
    "clip_skip": (
        {"clip_skip": 99},
        "spec.clip_skip: must be 0 to 1 with this model, by the layers of its text encoders",
    ),
    "clip_skip below 0": ({"clip_skip": -1}, "must be 0 to 1 with this model"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_cannot_be_encoded_is_refused_before_it_is_drawn(refusal: str) -> None:
    changes, message = REFUSALS[refusal]
    model, began_s = model_of("SDXL"), time.process_time()
    with pytest.raises(InvalidRequest) as caught:
        check_drawable(replace(WEIGHTED, **changes), EngineLimits(), model)
    assert message in str(caught.value)
    assert time.process_time() - began_s < 2.0


def test_a_prompt_that_is_too_long_is_not_tokenized_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenize, texts = CLIPTokenizer.__call__, list[str]()

    def counted(tokenizer: CLIPTokenizer, parts: list[str], **options: Any) -> Any:
        texts.extend(parts)
        return tokenize(tokenizer, parts, **options)

    monkeypatch.setattr(CLIPTokenizer, "__call__", counted)
    with pytest.raises(MalformedPrompt):
        weighted_chunks("(a) b " * 749, model_of("SD 1").tokenizers[0])
    assert len(texts) < 20 * CHUNK + 200


def test_the_longest_prompt_is_served() -> None:
    (first, *_) = model_of("SDXL").tokenizers
    prompt = "a " * (20 * CHUNK)
    assert len(weighted_chunks(prompt, first)) == 20
    conditions = encode_prompts(model_of("SDXL"), replace(WEIGHTED, prompt=prompt))
    assert len(conditions.conditional.prompt) == 20 * (CHUNK + 2)
