"""What `bottega fleet -v` says of starts, and it and doctor of the accelerations that workers have tried."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from bottega.client.checkup.gateway import _check_accelerations
from bottega.client.cli.fleet import accelerations_table, fleet_table
from bottega.v1.fleet_pb2 import Acceleration, ListMembersResponse, Load, Member, Registration


def worker(name: str, *found: Acceleration) -> Member:
    return Member(registration=Registration(kind="worker", name=name, device="cuda:0"), load=Load(accelerations=found))


KEPT = Acceleration(name="kernels.geglu", kept=True, speedup=1.234, difference=1.5e-3, tolerance=0.02)
SLOW = Acceleration(name="graphs", speedup=0.97, difference=2e-7, reason="it is 0.97 times as fast here")
UNTRIED = Acceleration(name="attention.flash_attn", reason="flash_attn is not installed")


def test_each_is_a_row_with_its_figures_and_why_it_is_off() -> None:
    fleet = ListMembersResponse(members=[worker("w0", KEPT, SLOW), worker("w1", UNTRIED)])
    with StringIO() as file:
        Console(file=file, width=200).print(accelerations_table(fleet).table)
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
        last = fleet_table(fleet, starts=starts).table.columns[-1]
        assert [str(last.header), *map(str, last.cells)] == cells


def test_doctor_names_what_a_worker_computes_by_and_warns_of_one_that_kept_nothing() -> None:
    kept, none = _check_accelerations([worker("w0", KEPT, SLOW), worker("w1", SLOW, UNTRIED), worker("w2")])
    assert kept.what == "w0 on cuda:0 computes by kernels.geglu (1.23 x); 1 more are off"
    assert "w1 on cuda:0 has kept none of 2" in none.what
    assert none.todo == "bottega fleet -v says why."
