"""Keyword arguments to the contract and back, and what a picture can do by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import resource
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.PngImagePlugin
import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.client import ControlNet, GenerationOptions, Lora, Picture, parameters_of
from bottega.client.types.options import SAMPLERS, options_from, spec_from
from bottega.client.types.provenance import (
    CacheUse,
    ControlNetUse,
    LoraUse,
    MaskUse,
    PairUse,
    Provenance,
    SourceUse,
    StageTime,
    Truncation,
    parameters_from,
    provenance_from,
)
from bottega.codec.images import encode_image
from bottega.errors import InvalidRequest
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import GenerationSpec, Techniques
from tests.samples.hostile_images import chunk, compressed_texts

# Texts as PNG files have them, compressed as quickly as can be.
LARGE, MEBIBYTE = (zlib.compress(bytes(size << 20), 1) for size in (64, 1))
FULL: GenerationOptions = {
    "model": "miniature",
    "prompt_2": "a star",
    "negative_prompt": "",
    "negative_prompt_2": "blur",
    "prompt_syntax": "weighted",
    "clip_skip": 1,
    "max_sequence_length": 77,
    "num_inference_steps": 30,
    "guidance_scale": 4.5,
    "guidance_rescale": 0.5,
    "true_cfg_scale": 2.5,
    "cfg_normalization": 1.5,
    "cfg_truncation": 0.75,
    "width": 64,
    "height": 128,
    "seed": 7,
    "sampler": "euler_ancestral",
    "use_karras_sigmas": True,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "timestep_spacing": "trailing",
    "final_sigmas_type": "sigma_min",
    "timesteps": (999, 499, 9),
    "sigmas": (14.5, 0.5, 0.0),
    "strength": 0.4,
    "mask_alpha": True,
    "padding_mask_crop": 32,
    "keep_unmasked": True,
    "mask_feather": 4,
    "controlnets": (
        ControlNet("edges", controlnet_conditioning_scale=0.5, control_guidance_end=0.75, guess_mode=True),
        ControlNet("depth", control_guidance_start=0.25),
    ),
    "lora": (Lora("pastel", 0.5, from_step=2, digest="a" * 64),),
    "stale_residuals": False,
    "latent_parallelism": True,
    "shared_turns": False,
    "step_caching": True,
    "masked_blocks": False,
    "approximate_cache": False,
    "cache_entry": f"{'ab' * 16}@6",
    "recording": "cd" * 16,
    "identical_results": True,
    "format": "webp",
    "quality": 80,
    "metadata": True,
    "fidelity": "fast",
    "keep_for_editing": True,
}


def png(path: Path, text: dict[str, str]) -> Path:
    info = PIL.PngImagePlugin.PngInfo()
    for key, value in text.items():
        info.add_itxt(key, value)
    PIL.Image.new("RGB", (8, 8), "red").save(path, pnginfo=info)
    return path


def picture(data: bytes = b"bytes") -> Picture:
    return Picture(
        data=data, format="png", seed=7, width=8, height=8, index=0, digest="", job_id="j", provenance=Provenance()
    )


def test_every_option_reaches_the_contract_and_comes_back() -> None:
    spec = spec_from("a red star", {**FULL, "controlnets": _with_images()}, num_images=3)
    assert (spec.prompt, spec.num_images, spec.height, spec.quality) == ("a red star", 3, 128, 80)
    assert (spec.sampler, spec.fidelity, spec.format) == (
        generation_pb2.SAMPLER_EULER_ANCESTRAL,
        generation_pb2.FIDELITY_FAST,
        generation_pb2.IMAGE_FORMAT_WEBP,
    )
    assert [(net.name, net.image, net.guess_mode) for net in spec.controlnets] == [
        ("edges", b"edges", True),
        ("depth", b"depth", False),
    ]
    assert options_from(spec) == FULL


def _with_images() -> list[ControlNet]:
    """Those of FULL, as they can be sent."""
    return [dataclasses.replace(net, image=net.name.encode()) for net in FULL["controlnets"] or ()]


def test_what_cannot_be_sent_of_controlnets_is_named_by_its_place() -> None:
    nets: list[Any] = [
        ControlNet("edges", "/no/such/file.png"),
        ControlNet(7, b"x", control_guidance_end="late"),  # type: ignore[arg-type]
        "depth",
        ControlNet("pose"),
    ]
    with pytest.raises(InvalidRequest) as caught:
        spec_from("a star", {"controlnets": nets})
    described = {violation.field: violation.description for violation in caught.value.violations}
    assert described.keys() == {
        "controlnets[0].image",
        "controlnets[1].name",
        "controlnets[1].control_guidance_end",
        "controlnets[2]",
        "controlnets[3].image",
    }
    assert "/no/such/file.png" in described["controlnets[0].image"]
    with pytest.raises(InvalidRequest) as caught:
        spec_from("a star", {"controlnets": ControlNet("edges", b"x")})  # type: ignore[typeddict-item]
    assert "list" in caught.value.violations[0].description


def test_all_wrong_arguments_are_listed_at_once() -> None:
    wrong = {"seed": -1, "width": 1.5, "sampler": [], "steps": 3, "image": "a\0b"}
    with pytest.raises(InvalidRequest) as caught:
        spec_from("a star", wrong)  # type: ignore[arg-type]
    described = {violation.field: violation.description for violation in caught.value.violations}
    assert described.keys() == wrong.keys()
    assert described["sampler"] == f"must be one of {', '.join(SAMPLERS)}; got list"
    assert described["image"] == r"'a\x00b' cannot be the path of a file"


def test_an_unknown_keyword_is_told_the_one_that_was_meant() -> None:
    for said, meant in (("steps", "num_inference_steps"), ("cfg_scale", "guidance_scale"), ("zzz", "")):
        with pytest.raises(InvalidRequest) as caught:
            spec_from("a star", {said: 1})  # type: ignore[misc]
        (violation,) = caught.value.violations
        hint = f"; did you mean {meant}?" if meant else ""
        assert (violation.field, violation.description) == (said, f"there is no such argument{hint}")


def test_several_prompts_are_a_list_and_come_back_with_their_parameters() -> None:
    spec = spec_from(["a star", "a ring"], {"seed": 7})
    assert (spec.prompt, list(spec.prompts), spec.HasField("num_images")) == ("", ["a star", "a ring"], False)
    assert parameters_from(spec).prompts == ("a star", "a ring")
    for wrong in ([], ["a star", 7], ["\ud800"]):
        with pytest.raises(InvalidRequest, match="prompt"):
            spec_from(wrong, {})  # type: ignore[arg-type]


def test_the_parameters_of_a_provenance_are_typed_and_draw_the_same_again() -> None:
    spec = spec_from("a red star", {**FULL, "controlnets": _with_images()}, num_images=3)
    for net in spec.controlnets:
        net.image = b""
    parameters = parameters_from(spec)
    assert (parameters.prompt, parameters.num_images, parameters.sampler) == ("a red star", 3, "euler_ancestral")
    assert parameters.options() == FULL
    again = spec_from(parameters.prompt, {**parameters.options(), "controlnets": _with_images()}, num_images=3)
    assert options_from(again) == FULL
    assert parameters_from(GenerationSpec(sampler=99, fidelity=98)).sampler is None  # type: ignore[arg-type]


def test_a_provenance_has_a_typed_value_for_every_field_of_the_contract() -> None:
    message = generation_pb2.Provenance(worker="w", exact=True, accelerations=["faster"])
    message.loras.add(name="ink", similarities=[0.5, 0.25])
    message.controlnets.add(name="edges", servers=["s1"], mode=generation_pb2.RESIDUAL_MODE_PIPELINED)
    message.controlnets.add(similarity=0.9)
    message.mask.digest = "d"
    made = provenance_from(message)
    assert (made.worker, made.exact, made.accelerations, made.mask.digest) == ("w", True, ("faster",), "d")
    assert made.loras == (LoraUse(name="ink", similarities=(0.5, 0.25)),)
    assert [(net.mode, net.similarity) for net in made.controlnets] == [("pipelined", None), (None, 0.9)]
    assert provenance_from(generation_pb2.Provenance()) == Provenance()
    for kind, descriptor in _TYPED.items():
        fields = {known.name for known in dataclasses.fields(kind)}
        assert fields == set(descriptor.fields_by_name) - {"cache"}, kind


_TYPED: dict[Any, Any] = {
    kind: getattr(generation_pb2, kind.__name__).DESCRIPTOR
    for kind in (Provenance, LoraUse, ControlNetUse, PairUse, CacheUse, MaskUse, SourceUse, StageTime, Truncation)
}


def test_every_field_of_the_contract_has_an_argument() -> None:
    arguments = GenerationOptions.__annotations__.keys() - {"lora"} | {
        "prompt",
        "prompts",
        "num_images",
        "loras",
        "techniques",
    }
    techniques = set(Techniques.DESCRIPTOR.fields_by_name)
    assert set(GenerationSpec.DESCRIPTOR.fields_by_name) | techniques == arguments


def test_the_source_image_may_be_bytes_a_path_a_picture_or_a_pillow_image(tmp_path: Path) -> None:
    source = png(tmp_path / "source.png", {})
    assert spec_from("a star", {"image": picture()}).image == b"bytes"
    assert spec_from("a star", {"image": b"as it is"}).image == b"as it is"
    assert spec_from("a star", {"image": source}).image == source.read_bytes()
    with PIL.Image.open(source) as image:
        sent = spec_from("a star", {"image": image}).image
    assert PIL.Image.open(io.BytesIO(sent)).getpixel((0, 0)) == (255, 0, 0)


def test_a_picture_tells_how_to_draw_it_again(tmp_path: Path) -> None:
    spec = spec_from("a red star", {**FULL, "controlnets": _with_images()})
    for net in spec.controlnets:
        net.ClearField("image")  # as a picture carries it
    text = json_format.MessageToJson(spec, preserving_proto_field_name=True)
    assert parameters_of(png(tmp_path / "star.png", {"bottega": text})) == ("a red star", FULL)
    for number, name in (
        (generation_pb2.IMAGE_FORMAT_JPEG, "star.jpg"),
        (generation_pb2.IMAGE_FORMAT_WEBP, "star.webp"),
    ):
        path = tmp_path / name
        path.write_bytes(encode_image(PIL.Image.new("RGB", (8, 8)), number, 90, {"bottega": text}))
        assert parameters_of(path) == ("a red star", FULL)


def test_loras_are_said_by_name_by_name_and_scale_or_in_full() -> None:
    full = Lora("pastel", 0.5, from_step=3, digest="a" * 64, max_step=6)
    sent = spec_from("a star", {"lora": ["ink", ("outline", 0.8), full], "bounded_lora_loading": False})
    first, second, third = sent.loras
    assert (first.name, first.scale, first.HasField("from_step")) == ("ink", 1.0, False)
    assert (second.name, second.scale) == ("outline", 0.8)
    assert (third.from_step, third.digest, third.max_step) == (3, "a" * 64, 6)
    assert sent.techniques.bounded_lora_loading is False
    said = options_from(sent)
    assert said.get("lora") == (Lora("ink"), Lora("outline", 0.8), full)
    assert said.get("bounded_lora_loading") is False


@pytest.mark.parametrize(
    ("lora", "field"),
    [
        ("ink", "lora"),
        ([3], "lora[0]"),
        ([("ink", "x")], "lora[0]"),
        ([Lora("ink", from_step=2**40)], "lora[0].from_step"),
    ],
)
def test_what_is_no_lora_is_named(lora: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        spec_from("a star", {"lora": lora})
    assert [violation.field for violation in refused.value.violations] == [field]


def test_saving_writes_the_bytes_as_they_are_and_leaves_nothing_else(tmp_path: Path) -> None:
    assert picture().save(tmp_path / "star.png").read_bytes() == b"bytes"
    picture(b"newer").save(tmp_path / "star.png")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("star.png", b"newer")]


def test_parameters_are_read_of_no_file_that_would_be_long_to_decode(tmp_path: Path) -> None:
    path = tmp_path / "hostile.png"
    path.write_bytes(compressed_texts(7900))
    with pytest.raises(InvalidRequest, match=r"hostile\.png cannot be read: the image has 7900 PNG texts; at most 128"):
        parameters_of(path)
    path.write_bytes(png(path, {}).read_bytes().ljust(64 * 2**20 + 1, b"\0"))
    with pytest.raises(InvalidRequest, match="67108864 bytes"):
        parameters_of(path)


def test_the_text_of_another_tool_is_said_to_be_so(tmp_path: Path) -> None:
    for keyword, tool in (("parameters", "AUTOMATIC1111's web UI or one like it"), ("prompt", "ComfyUI")):
        path = png(tmp_path / "foreign.png", {keyword: "a star\nSteps: 20, Seed: 7, Size: 64x64"})
        with pytest.raises(InvalidRequest, match=rf"foreign\.png was written by another tool \({tool}\)"):
            parameters_of(path)
    path = tmp_path / "bare.jpg"
    path.write_bytes(encode_image(PIL.Image.new("RGB", (8, 8)), generation_pb2.IMAGE_FORMAT_JPEG, 90, {}))
    with pytest.raises(InvalidRequest, match=r"bare\.jpg has no parameters"):
        parameters_of(path)


def raw_png(*chunks: bytes, width: int = 8, height: int = 8) -> bytes:
    """A picture with these chunks behind its pixels, which it may lack."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(9 * 8))
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + b"".join(chunks) + chunk(b"IEND", b"")


def test_parameters_that_cannot_be_are_refused_by_file_and_value(tmp_path: Path) -> None:
    for text, said in (
        ('{"sampler": 99}', "sampler: 99 is unknown to this version, which has euler, euler_ancestral"),
        ('{"sampler": "SAMPLER_OF_TOMORROW"}', "SAMPLER_OF_TOMORROW"),
        ('{"num_inference_steps": 100000}', "num_inference_steps must be 1 to 200; got 100000"),
        ('{"seed": 1e400}', "seed"),
        ('{"seed": "18446744073709551615"}', "seed must be 0 to 9007199254740984; got 18446744073709551615"),
        (f'{{"seed": {"9" * 5000}}}', "integer string conversion"),
        ('{"guidance_scale": "NaN"}', "guidance_scale must be 0 to 50; got nan"),
        ('{"strength": 0}', "strength must be above 0 and at most 1; got 0.0"),
        ('{"prompt": "\\ud800"}', "prompt"),
        (f'{{"prompt": "{"x" * 20_000}"}}', "prompt is over 16384 bytes"),
        ('{"loras": [{"name": "../up"}]}', "loras[0].name must be the name of a LoRA"),
        ('{"controlnets": [{"name": "a b"}]}', "controlnets[0].name"),
        ('{"width": 0, "height": 99999}', "width must be 1 to 16384; got 0; height must be 1 to 16384; got 99999"),
        ("[7]", "cannot read"),
        ("[" * 100_000, "recursion"),
    ):
        path = png(tmp_path / "odd.png", {"bottega": text})
        with pytest.raises(InvalidRequest) as refused:
            parameters_of(path)
        assert str(path) in refused.value.message
        assert said in refused.value.message
        assert len(refused.value.message) < 1000
        assert not refused.value.violations, "which would be shown without the file"


@pytest.mark.parametrize(
    "data",
    [
        raw_png(width=60_000, height=60_000),
        raw_png(chunk(b"zTXt", b"bottega\0\0" + LARGE)),
        raw_png(chunk(b"iTXt", b"bottega\0\1\0\0\0" + LARGE)),
        raw_png(*[chunk(b"zTXt", b"k%d\0\0" % n + MEBIBYTE) for n in range(80)]),
        raw_png(chunk(b"tEXt", b"bottega\0" + b"x" * (300 << 10))),
        raw_png(chunk(b"zTXt", b"bottega\0\7x")),
        raw_png(chunk(b"tRNS", b"")),
        raw_png()[:-20],
        b"hello",
    ],
    ids=lambda data: f"{len(data)} bytes",
)
def test_a_png_of_any_kind_is_refused_within_bounds(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "odd.png"
    path.write_bytes(data)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequest, match=r"odd\.png"):
        parameters_of(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 400 << 10


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_png_is_refused_and_never_a_fault(data: st.DataObject) -> None:
    whole = bytearray(raw_png(chunk(b"tEXt", b'bottega\0{"prompt": "a star", "seed": 7}')))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(8, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "odd.png"
        path.write_bytes(whole)
        with contextlib.suppress(InvalidRequest):
            parameters_of(path)


def test_saving_under_a_suffix_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format='jpeg'"):
        picture().save(tmp_path / "star.jpg")
    assert list(tmp_path.iterdir()) == []
