"""What `bottega fleet -v` says of starts, and it and doctor of the accelerations that workers have tried."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO

from rich.console import Console

from bottega.client.addons.addon import left_out_of
from bottega.client.checkup.gateway import _check_accelerations, _check_left_out
from bottega.client.cli.fleet import accelerations_table, fleet_table
from bottega.client.types.checks import Level
from bottega.client.types.fleet import fleet_from, member_from
from bottega.v1.fleet_pb2 import Acceleration, ListMembersResponse, Load, Member, Registration, StartProgress
from bottega.v1.hosted_pb2 import Hosted, LeftOut


def worker(name: str, *found: Acceleration) -> Member:
    return Member(registration=Registration(kind="worker", name=name, device="cuda:0"), load=Load(accelerations=found))


KEPT = Acceleration(name="kernels.geglu", kept=True, speedup=1.234, difference=1.5e-3, tolerance=0.02)
SLOW = Acceleration(name="graphs", speedup=0.97, difference=2e-7, reason="it is 0.97 times as fast here")
UNTRIED = Acceleration(name="attention.flash_attn", reason="flash_attn is not installed")


def test_each_is_a_row_with_its_figures_and_why_it_is_off() -> None:
    fleet = ListMembersResponse(members=[worker("w0", KEPT, SLOW), worker("w1", UNTRIED)])
    with StringIO() as file:
        Console(file=file, width=200).print(accelerations_table(fleet_from(fleet)).table)
        text = file.getvalue()
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["w0"], ["w1"])]
    assert rows == [
        ["w0", "kernels.geglu", "yes", "1.23", "1.5e-03"],
        ["w0", "graphs", "no", "0.97", "2.0e-07", "it", "is", "0.97", "times", "as", "fast", "here"],
        ["w1", "attention.flash_attn", "no", "flash_attn", "is", "not", "installed"],
    ]


def test_what_engines_took_to_start_is_a_column_when_it_is_asked_for() -> None:
    slow, silent = worker("w0"), worker("w1")
    slow.load.start_s = 123.45
    fleet = ListMembersResponse(members=[slow, silent])
    for starts, cells in ((True, ["start", "123.5 s", ""]), (False, ["since", "0 s", "0 s"])):
        last = fleet_table(fleet_from(fleet), starts=starts).table.columns[-1]
        assert [str(last.header), *map(str, last.cells)] == cells


def test_a_worker_that_starts_says_how_far_it_is() -> None:
    starting = worker("w0")
    starting.load.starting.MergeFrom(
        StartProgress(stage="loading unet", done_bytes=3_100_000_000, total_bytes=5_140_000_000)
    )
    serves = fleet_table(fleet_from(ListMembersResponse(members=[starting]))).table.columns[3]
    assert list(map(str, serves.cells)) == ["starting: loading unet, 3.1 of 5.1 GB"]


def test_doctor_names_what_a_worker_computes_by_and_warns_of_one_that_kept_nothing() -> None:
    tried = [worker("w0", KEPT, SLOW), worker("w1", SLOW, UNTRIED), worker("w2")]
    kept, none = _check_accelerations(map(member_from, tried))
    assert kept.what == "w0 on cuda:0 uses kernels.geglu (1.23 x); 1 more are off"
    assert "w1 on cuda:0 uses none of 2 tested accelerations" in none.what
    assert none.todo == "bottega fleet -v says why."


def controlnet_server(*hosted: Hosted, left_out: Mapping[str, str]) -> Member:
    items = [LeftOut(kind="controlnet", name=name, reason=reason) for name, reason in left_out.items()]
    registration = Registration(kind="controlnet", name="controlnet-0")
    return Member(registration=registration, load=Load(hosted=hosted, left_out=items))


def test_what_is_left_out_and_what_fits_no_model_stands_below_the_table() -> None:
    drawing = worker("w0")
    drawing.registration.models.add(name="sdxl", base="4/8 2048+1280")
    bases = {"canny": "4/8 2048+1280", "sd15": "x"}
    nets = [Hosted(kind="controlnet", name=name, base=base) for name, base in bases.items()]
    server = controlnet_server(*nets, left_out={"depth": "it has no config.json"})
    fleet = ListMembersResponse(members=[drawing, server])
    assert str(fleet_table(fleet_from(fleet)).table.caption).splitlines() == [
        "0 waiting in the queue",
        "controlnet-0 does not serve depth: it has no config.json",
        "controlnet-0 does not serve sd15: it fits no served model: its shapes are x, theirs 4/8 2048+1280",
    ]


def test_doctor_warns_of_what_a_service_leaves_out() -> None:
    server = controlnet_server(left_out={"depth": "it has no config.json"})
    (result,) = _check_left_out(fleet_from(ListMembersResponse(members=[worker("w0"), server])))
    assert (result.level, result.what) == (Level.WARN, "controlnet-0 does not serve depth: it has no config.json")


def test_without_a_worker_nothing_is_said_to_fit_no_model() -> None:
    net = Hosted(kind="controlnet", name="canny", base="x")
    assert left_out_of(fleet_from(ListMembersResponse(members=[controlnet_server(net, left_out={})]))) == []
