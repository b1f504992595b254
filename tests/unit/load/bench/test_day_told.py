"""The bench of a day: what it tells people, and takes from them."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bottega.v1.generation_pb2 import CacheUse, ControlNetUse, LoraUse, Provenance, StageTime
from load.bench import day_page
from load.bench.day_figures import Comparison, DayRun, Figures
from load.bench.day_kinds import kinds, slowest
from load.bench.day_options import parse
from load.bench.day_requests import RequestClass
from load.bench.day_table import rows
from load.bench.day_techniques import LABELS, Uses
from load.replay.results import concluded
from tests.support.days import (
    DEADLINE_S,
    DRAW,
    EDIT,
    LENGTH_S,
    SCALE,
    answered,
    at,
    compared,
    figures,
    picture_of,
    refused,
)


def test_what_techniques_did_is_read_from_provenances() -> None:
    uses = Uses()
    cached, lora, net, edit, again = (Provenance(worker="worker", mean_group_requests=2.0) for _ in range(5))
    for each in (cached, lora, net, edit, again):
        each.parameters.num_inference_steps = 10
    cached.cached_starts.append(CacheUse(from_step=7, skipped_steps=5))
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


def test_a_class_of_requests_says_what_it_has_in_words() -> None:
    plain = RequestClass(kind="draw", steps=4, controlnets=0, loras=0)
    assert str(plain) == "draw, 4 steps"
    assert str(replace(plain, controlnets=1, loras=2)) == "draw, 4 steps, 1 ControlNet, 2 LoRAs"


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
