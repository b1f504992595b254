"""The bench of a day: what its requests are, what its runs come to, and what it tells people."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import pytest

from bottega.client import Picture
from bottega.errors import ConfigError
from bottega.v1.generation_pb2 import CacheUse, ControlNetUse, LoraUse, Provenance, StageTime
from load.bench import day_page
from load.bench.day_figures import Comparison, DayRun, Figures, Scale
from load.bench.day_kinds import kinds, slowest
from load.bench.day_options import parse
from load.bench.day_plain import AloneTimes, PlainSide, together
from load.bench.day_reference import PlainBatch
from load.bench.day_requests import DayShape, RequestClass, rate_for, warm_up_requests
from load.bench.day_suite import DaySuite
from load.bench.day_table import rows
from load.bench.day_techniques import ALL, LABELS, Techniques, Uses, without_each
from load.bench.day_world import World
from load.replay.pictures import Pictures
from load.replay.requests import PlannedRequest
from load.replay.results import Answer, Outcome, concluded

NETS, LORAS = ("net0", "net1", "net2"), ("lora0", "lora1")
SHAPE = DayShape(mix="day", minutes=2.0, steps_share=0.4, templates=5, controlnets=NETS, loras=LORAS)
DRAW = PlannedRequest(
    at_s=0.0,
    kind="draw",
    prompt="a star",
    seed=3,
    steps=8,
    template=None,
    mask_ratio=None,
    controlnets=(),
    loras=(),
    session=0,
)
EDIT = replace(DRAW, kind="edit", template=1, mask_ratio=0.1)
LENGTH_S, DEADLINE_S = 240.0, 60.0
SCALE = Scale(alone_s={RequestClass.of(DRAW): 2.0, RequestClass.of(EDIT): 1.0}, deadline_s=DEADLINE_S)


def answered(request: PlannedRequest, latency_s: float) -> Answer[PlannedRequest]:
    return Answer(request=request, outcome=Outcome.ANSWERED, reason="", latency_s=latency_s, delay_s=0.0)


def refused(request: PlannedRequest) -> Answer[PlannedRequest]:
    return Answer(request=request, outcome=Outcome.REFUSED, reason="Overloaded", latency_s=0.01, delay_s=0.0)


def figures(*answers: Answer[PlannedRequest], processor_s: float = 60.0) -> Figures:
    replayed = concluded(answers, deadline_s=DEADLINE_S, length_s=LENGTH_S)
    return Figures(runs=[DayRun(replayed=replayed, processor_s=processor_s)], scale=SCALE)


def at(hour: float, request: PlannedRequest) -> PlannedRequest:
    return replace(request, at_s=hour / 24 * LENGTH_S)


def compared() -> Comparison:
    """Of twenty requests the plain server answers five in time, the suite all, and without masks ten."""
    requests = [at(number, EDIT) for number in range(20)]
    return Comparison(
        plain=figures(*(answered(each, 2.5 if number < 5 else 30.0) for number, each in enumerate(requests))),
        suite=figures(*(answered(each, 1.5) for each in requests)),
        without={
            "masked_blocks": figures(
                *(answered(each, 2.0 if number < 10 else 6.0) for number, each in enumerate(requests))
            )
        },
    )


def test_a_compressed_day_has_the_mixes_shares_and_fewer_steps_templates_and_shorter_bursts() -> None:
    requests = SHAPE.requests(rate_per_s=10.0, seed=1)
    assert len(requests) == 1200
    assert sum(request.kind == "edit" for request in requests) / len(requests) == pytest.approx(0.7, abs=0.05)
    assert {request.steps for request in requests if request.kind == "edit"} == {8}
    assert {request.steps for request in requests if request.kind == "draw"} == {8, 12, 20}
    assert {request.template for request in requests} <= {None, *range(5)}
    assert {name for request in requests for name in request.controlnets} == set(NETS)
    bursts = SHAPE.at(10.0).arrivals.bursts
    assert bursts is not None
    assert (bursts.every_s, bursts.length_s) == pytest.approx((24.0, 0.4)), "a tenth of the mix's 20 minutes"
    assert SHAPE.requests(10.0, seed=1) == requests


def test_a_days_first_requests_are_known_before_its_rate_is() -> None:
    sample, requests = SHAPE.sample(seed=4), SHAPE.requests(rate_per_s=2.0, seed=4)
    assert [replace(each, at_s=0.0) for each in sample[: len(requests)]] == [
        replace(each, at_s=0.0) for each in requests
    ]


def test_a_days_rate_is_that_at_which_its_own_requests_take_so_much_of_it_and_no_others_are_asked_about() -> None:
    samples = [[DRAW, EDIT, EDIT, EDIT, DRAW, DRAW], [EDIT, EDIT, DRAW, EDIT, DRAW, DRAW]]
    asked: list[int] = []

    def alone_s(request: PlannedRequest) -> float:
        asked.append(request.steps)
        return 6.0 if request.kind == "draw" else 2.0

    # The first three of a day take 10 s on average: half of 20.
    assert rate_for(samples, alone_s, load=0.5, length_s=20.0) == pytest.approx(3 / 20)
    assert len(asked) == 6
    # Where all of them are too few, the mean of all counts: 24 s for six.
    assert rate_for(samples, alone_s, load=0.5, length_s=2000.0) == pytest.approx(0.5 * 6 / 24)


def test_what_a_class_takes_alone_is_measured_once(tmp_path: Path) -> None:
    side, reference = plain_side(tmp_path)
    alone = AloneTimes(side=side)
    assert alone.of(EDIT) == alone.of(replace(EDIT, seed=9)) == 0.1
    assert alone.of(DRAW) == 0.1
    assert len(reference.asked) == 2
    assert not any(batch.stay for batch in reference.asked)
    assert alone.seconds == {RequestClass.of(EDIT): 0.1, RequestClass.of(DRAW): 0.1}


def test_a_mix_that_the_plain_server_cannot_draw_is_refused(tmp_path: Path) -> None:
    mix = tmp_path / "edits.toml"
    mix.write_text("minutes = 1\nrate_per_s = 1\n[edits]\nshare = 1.0\n[controlnets]\nof_edits = 1.0\n")
    with pytest.raises(ConfigError, match="edits with ControlNets"):
        replace(SHAPE, mix=str(mix)).requests(rate_per_s=1.0, seed=1)


def test_every_controlnet_and_both_kinds_are_drawn_before_a_day_with_prompts_of_its_own() -> None:
    requests = SHAPE.sample(seed=1)
    wanted = warm_up_requests(requests, NETS)
    assert {name for request in wanted for name in request.controlnets} == set(NETS)
    assert {request.kind for request in wanted} == {"draw", "edit"}
    assert any(request.loras for request in wanted)
    prompts = [request.prompt for request in wanted]
    assert len(set(prompts)) == len(prompts)
    assert not {*prompts} & {request.prompt for request in requests}


def test_an_answer_is_in_time_by_what_its_own_class_takes_alone() -> None:
    side = figures(answered(DRAW, 5.9), answered(DRAW, 6.1), answered(EDIT, 2.9), answered(EDIT, 3.1), refused(EDIT))
    assert side.good == 2
    assert side.good_share == pytest.approx(0.4)
    assert side.answered == 4


def test_what_was_not_answered_counts_as_long_as_anybody_waits() -> None:
    side = figures(*(answered(EDIT, 1.0) for _ in range(9)), refused(EDIT))
    assert side.latency_s(0.9) == 1.0
    assert side.latency_s(0.95) == DEADLINE_S
    assert side.slowdowns[-1] == math.inf
    assert side.reasons == ["1 refused: Overloaded"]


def test_pictures_a_core_minute_are_those_that_came_for_the_processor_time_of_their_side() -> None:
    assert figures(*(answered(EDIT, 1.0) for _ in range(6)), refused(EDIT), processor_s=120.0).per_core_minute == 3.0


def test_both_ratios_are_better_the_better_the_suite_is_and_a_techniques_worth_the_more_it_saves() -> None:
    comparison = compared()
    assert comparison.goodput_ratio == pytest.approx(20 / 5)
    assert comparison.p95_ratio == pytest.approx(30.0 / 1.5)
    assert comparison.worth("masked_blocks") == pytest.approx((20 / 10, 6.0 / 1.5))
    values = comparison.values()
    assert values["goodput_ratio"] == pytest.approx(4.0)
    assert values["masked_blocks_p95_gain"] == pytest.approx(4.0)
    assert values["void_runs"] == 0
    json.dumps(values, allow_nan=False)


def test_a_plain_server_that_is_never_in_time_makes_no_ratio_infinite() -> None:
    late = figures(answered(EDIT, 30.0), answered(EDIT, 30.0))
    comparison = Comparison(plain=late, suite=figures(answered(EDIT, 1.0), answered(EDIT, 1.0)), without={})
    assert comparison.goodput_ratio == 2.0


def test_a_run_that_went_out_late_is_named() -> None:
    held_up = replace(answered(EDIT, 9.0), delay_s=5.0)
    comparison = replace(compared(), plain=figures(*(held_up for _ in range(5))))
    assert [why.partition(":")[0] for why in comparison.void] == ["plain"]
    assert comparison.values()["void_runs"] == 1


def test_each_day_lacks_one_technique_and_each_has_a_label() -> None:
    names = {field.name for field in fields(Techniques)}
    assert set(LABELS) == set(without_each()) == names
    for name, techniques in without_each().items():
        off = {each for each in names if not getattr(techniques, each)}
        assert off == ({name, "stored_activations"} if name == "masked_blocks" else {name})
    assert all(getattr(ALL, name) for name in names)


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
    assert services["worker"]["engine"]["controlnets"] == {"net0": str(tmp_path / "net0")}
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


def picture_of(provenance: Provenance) -> Picture:
    return cast("Picture", type("Made", (), {"provenance": provenance})())


def test_what_techniques_did_is_read_from_provenances() -> None:
    uses = Uses()
    cached, lora, net, edit, again = (Provenance(worker="worker", mean_group_requests=2.0) for _ in range(5))
    for each in (cached, lora, net, edit, again):
        each.parameters.num_inference_steps = 10
    cached.cached_starts.append(CacheUse(from_step=5))
    lora.loras.extend([LoraUse(from_step=0), LoraUse(from_step=3)])
    net.controlnets.append(ControlNetUse(servers=["controlnet"]))
    edit.blocks_total, edit.blocks_reused = 100, 80
    again.identical_job = "job"
    for each in (cached, lora, net, edit, again):
        uses.add(DRAW, picture_of(each))
    assert list(uses.said()) == [
        "1 answered with a stored picture",
        "1 from cached latents (10% of all steps spared)",
        "80% of edits' blocks masked",
        "1 with ControlNets of a server",
        "1 with LoRAs that came late",
        "2.0 requests a step",
    ]


def test_a_worker_that_runs_its_controlnets_itself_is_no_server() -> None:
    uses = Uses()
    uses.add(DRAW, picture_of(Provenance(worker="worker", controlnets=[ControlNetUse(servers=["worker"])])))
    assert uses.served == 0


def test_a_page_shows_both_ratios_all_sides_and_needs_nothing_from_elsewhere() -> None:
    options = parse(None, ["--minutes", "4", "--rows", "masked_blocks"])
    html = day_page.page(compared(), options, rate_per_s=0.5)
    said = re.sub(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+", "", html)
    assert "4.00" in said
    assert "20.00" in said
    assert LABELS["masked_blocks"] in said
    assert "25.0%" in said
    assert "100.0%" in said
    assert not re.findall(r"(?:src|href)=\"(?!\")(?!data:)", said), "all of it is in the file"
    assert "http" not in said
    plots = re.findall(r"base64,([A-Za-z0-9+/=]+)", html)
    assert len(plots) == 4
    assert all(b"</svg>" in base64.b64decode(plot) for plot in plots)


def test_a_page_without_rows_and_one_of_a_void_run_say_so() -> None:
    comparison = replace(compared(), without={})
    options = parse(None, ["--rows", "none"])
    assert "What each technique was worth" not in day_page.page(comparison, options, rate_per_s=0.5)
    held_up = replace(answered(EDIT, 9.0), delay_s=5.0)
    comparison = Comparison(plain=figures(answered(EDIT, 9.0)), suite=figures(held_up), without={})
    html = day_page.page(comparison, options, rate_per_s=0.5)
    assert "suite: void: 0 of 1 requests went out on time" in html


def test_the_table_has_both_sides_beside_each_other_and_a_line_for_each_technique() -> None:
    table = rows(compared())
    assert table[0][1:] == ("25.0%", "100.0%")
    assert ("p95", "30.00 s", "1.50 s") in table
    assert ("20 edits: p50, p95, in time", "30.0 s, 30.0 s, 25%", "1.5 s, 1.5 s, 100%") in table
    assert ("    alone; of the suite's turns, their part", "1.0 s", "0.0 s") in table
    (without,) = [row for row in table if LABELS["masked_blocks"] in row[0]]
    assert without[2] == "50.0%, 6.00 s; 2.00, 4.00"


def test_kinds_of_requests_are_told_apart_and_the_most_frequent_come_first() -> None:
    controlled = replace(DRAW, controlnets=("net0",))
    scale = replace(SCALE, alone_s={**SCALE.alone_s, RequestClass.of(controlled): 4.0})
    requests = [DRAW, EDIT, EDIT, controlled]
    plain = replace(figures(*(answered(each, 7.0) for each in requests)), scale=scale)
    suite = replace(figures(*(answered(each, 2.0) for each in requests[:3]), refused(controlled)), scale=scale)
    found = kinds(Comparison(plain=plain, suite=suite, without={}))
    assert [(kind.name, kind.requests, kind.alone_s) for kind in found] == [
        ("edits", 2, 1.0),
        ("draws without ControlNets", 1, 2.0),
        ("draws with ControlNets", 1, 4.0),
    ]
    assert [str(kind.plain) for kind in found] == ["7.0 s, 7.0 s, 0%", "7.0 s, 7.0 s, 0%", "7.0 s, 7.0 s, 100%"]
    assert str(found[2].suite) == "60.0 s, 60.0 s, 0%", "what was refused counts as its deadline"


def test_the_suites_slowest_requests_are_named_with_where_their_time_went() -> None:
    requests = [at(number, EDIT) for number in range(9)]
    uses = Uses()
    for number, request in enumerate(requests):
        times = [StageTime(stage="queue", seconds=0.6 * number), StageTime(stage="decode", seconds=0.01)]
        denoise = StageTime(stage="denoise", seconds=0.3 * number)
        uses.add(request, picture_of(Provenance(times=[*times, denoise], mean_group_requests=2)))
    replayed = concluded(
        [answered(request, 1.0 * number) for number, request in enumerate(requests)],
        deadline_s=DEADLINE_S,
        length_s=LENGTH_S,
    )
    suite = Figures(runs=[DayRun(replayed=replayed, processor_s=1.0, uses=uses)], scale=SCALE)
    plain = figures(*(answered(request, 20.0 - number) for number, request in enumerate(requests)))
    slow = slowest(Comparison(plain=plain, suite=suite, without={}))
    assert [(row.plain_s, row.suite_s) for row in slow] == [
        (12.0, 8.0),
        (13.0, 7.0),
        (14.0, 6.0),
        (15.0, 5.0),
        (16.0, 4.0),
    ]
    (kind,) = kinds(Comparison(plain=plain, suite=suite, without={}))
    assert kind.turns_s == pytest.approx(0.3 * 4 / 2), "they shared their turns with one other each"
    assert slow[0].where == "queue 4.8, denoise 2.4", "decoding took next to nothing"
    unknown = slowest(compared())
    assert [row.where for row in unknown] == [""] * 5, "no picture came with these"


@pytest.mark.parametrize("bad", [["--minutes", "0"], ["--rows", "nonsense"], ["--load", "-1"], ["--rounds", "0"]])
def test_options_that_cannot_be_are_refused(bad: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(None, bad)
    assert bad[0] in capsys.readouterr().err


def test_all_rows_are_the_default_and_none_is_possible() -> None:
    assert list(parse(None, []).rows) == list(LABELS)
    assert not set(parse(None, ["--rows", "none"]).rows) & set(LABELS)
