"""The bench of a day: what its plain server and its suite are told."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from load.bench.day_plain import AloneTimes, PlainSide, together
from load.bench.day_reference import PlainBatch
from load.bench.day_requests import RequestClass
from load.bench.day_suite import DaySuite
from load.bench.day_techniques import ALL, LABELS, Techniques, without_each
from load.bench.day_world import World
from load.replay.pictures import Pictures
from tests.support.days import (
    DRAW,
    EDIT,
    LORAS,
    NETS,
)


def suite_of(tmp_path: Path, techniques: Techniques) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Configurations by kind, and options of requests."""
    world = World(
        model=tmp_path / "model",
        controlnets={"net0": tmp_path / "net0"},
        loras={},
        pictures=Pictures(width=64, height=64),
        images=tmp_path,
    )
    suite = DaySuite(
        world=world,
        folder=tmp_path / "services",
        state=tmp_path / "state",
        threads=2,
        deadline_s=9.0,
        techniques=techniques,
    )
    return cast("dict[str, dict[str, Any]]", suite.configurations("127.0.0.1:1")), dict(suite.options())


def test_a_technique_that_is_off_is_off_in_what_the_suite_is_told(tmp_path: Path) -> None:
    whole, options = suite_of(tmp_path, ALL)
    assert set(whole) == {"loras", "cache", "activations", "controlnet", "worker"}
    assert options["masked_blocks"] is True
    assert not {"approximate_cache", "bounded_lora_loading"} & set(options), "as BALANCED has them"

    def told(name: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        return suite_of(tmp_path, without_each()[name])

    services, options = told("cached_starts")
    assert set(whole) - set(services) == {"cache"}
    assert options["approximate_cache"] is False
    services, options = told("masked_blocks")
    assert set(whole) - set(services) == {"activations"}
    assert options["masked_blocks"] is False
    services, _ = told("stored_activations")
    assert set(whole) - set(services) == {"activations"}
    services, _ = told("controlnet_server")
    assert set(whole) - set(services) == {"controlnet"}
    assert services["worker"]["engine"]["controlnets"] == {"folders": {"net0": str(tmp_path / "net0")}}
    services, _ = told("sparse_convolutions")
    assert services["worker"]["engine"]["edits"]["sparse_convolutions"] is False
    services, options = told("late_residuals")
    assert services == whole
    assert options["stale_residuals"] is False
    services, options = told("late_loras")
    assert services == whole
    assert options["bounded_lora_loading"] is False
    services, _ = told("batches")
    assert services["worker"]["engine"]["max_rows"] == 2


class FakeReference:
    """A process that draws at once, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[PlainBatch] = []

    def draw(self, batch: PlainBatch) -> float:
        self.asked.append(batch)
        return 0.1


def plain_side(tmp_path: Path) -> tuple[PlainSide, FakeReference]:
    world = World(
        model=tmp_path,
        controlnets={name: tmp_path / name for name in NETS},
        loras={name: tmp_path / f"{name}.safetensors" for name in LORAS},
        pictures=Pictures(width=64, height=64),
        images=tmp_path,
    )
    reference = FakeReference()
    return PlainSide(process=cast("Any", reference), world=world), reference


def test_what_a_class_takes_alone_is_measured_once(tmp_path: Path) -> None:
    side, reference = plain_side(tmp_path)
    alone = AloneTimes(side=side)
    assert alone.of(EDIT) == alone.of(replace(EDIT, seed=9)) == 0.1
    assert alone.of(DRAW) == 0.1
    assert len(reference.asked) == 2
    assert not any(batch.stay for batch in reference.asked)
    assert alone.seconds == {RequestClass.of(EDIT): 0.1, RequestClass.of(DRAW): 0.1}


def test_a_static_batch_runs_to_its_longest_steps_with_each_ones_own_image(tmp_path: Path) -> None:
    side, reference = plain_side(tmp_path)
    controlled = replace(DRAW, controlnets=("net2", "net0"), loras=("lora1", "lora0"))
    side.draw([controlled, replace(controlled, steps=20, seed=4)])
    (batch,) = reference.asked
    assert (batch.steps, len(batch.pictures), batch.stay) == (20, 2, True)
    assert batch.nets == [str(tmp_path / "net0"), str(tmp_path / "net2")]
    assert batch.loras == [str(tmp_path / "lora0.safetensors"), str(tmp_path / "lora1.safetensors")]
    images = [picture.image for picture in batch.pictures]
    assert len(set(images)) == 2
    assert all(Path(image).read_bytes().startswith(b"\x89PNG") for image in images)


def test_an_edit_is_of_its_template_and_redraws_what_the_suite_is_told_to(tmp_path: Path) -> None:
    side, reference = plain_side(tmp_path)
    side.alone(EDIT)
    (batch,) = reference.asked
    (picture,) = batch.pictures
    box = side.world.pictures.mask(EDIT)
    assert picture.box == (box.x, box.y, box.width, box.height)
    assert Path(picture.image).read_bytes() == side.world.pictures.template(1)
    assert batch.stay is False, "alone, no LoRA is there already"


def test_one_batch_has_one_kind_and_one_set_of_weights() -> None:
    assert together(replace(DRAW, controlnets=("a", "b"))) == together(replace(DRAW, controlnets=("b", "a"), steps=20))
    others = [EDIT, replace(DRAW, controlnets=("a",)), replace(DRAW, loras=("a",))]
    assert len({together(each) for each in (DRAW, *others)}) == 4


def test_each_day_lacks_one_technique_and_each_has_a_label() -> None:
    names = {field.name for field in fields(Techniques)}
    assert set(LABELS) == set(without_each()) == names
    for name, techniques in without_each().items():
        off = {each for each in names if not getattr(techniques, each)}
        assert off == ({name, "stored_activations"} if name == "masked_blocks" else {name})
    assert all(getattr(ALL, name) for name in names)
