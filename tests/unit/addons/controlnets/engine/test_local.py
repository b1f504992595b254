"""ControlNets loaded by a thread beside sessions that run: who waits for what, what fails, what memory comes back."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from bottega.addons.controlnets.engine import ControlNetCache, ControlNetLease, LoadedControlNet
from bottega.errors import ControlNetNotFound, ControlNetUnusable, Draining, TooLarge
from bottega.model.model import Model
from tests.samples.controlnets import Gate, shelf_of

NAMES = ("edges", "depth", "layout")
WEIGHTS = "diffusion_pytorch_model.safetensors"
WAIT_S = 20.0

Shelves = Callable[..., AbstractContextManager[ControlNetCache]]


def nets(hold: ControlNetLease) -> tuple[LoadedControlNet, ...]:
    return hold.values.result(WAIT_S)


def test_a_loan_has_its_controlnets_in_the_order_asked_for(shelves: Shelves) -> None:
    with shelves() as shelf:
        hold = shelf.borrow(["depth", "edges", "depth"])
        assert [net.name for net in nets(hold)] == ["depth", "edges", "depth"]
        assert nets(hold)[0] is nets(hold)[2] is nets(shelf.borrow(["depth"]))[0]
        assert (shelf.counts.hits, shelf.counts.misses, shelf.counts.loads) == (1, 3, 2)
        assert shelf.popularity == {"depth": 3, "edges": 1}
        assert sorted(shelf.loaded) == ["depth", "edges"]


def test_while_one_is_loaded_the_others_are_there_at_once(shelves: Shelves) -> None:
    gate = Gate()
    with shelves(load=lambda source, device: gated(gate, source, device)) as shelf:
        nets(shelf.borrow(["edges"]))
        slow = shelf.borrow(["depth"])
        assert gate.waiting.wait(WAIT_S)
        for _ in range(3):
            quick = shelf.borrow(["edges"])
            assert quick.values.done()
            shelf.give_back(quick)
        assert not slow.values.done()
        gate.open()
        assert nets(slow)[0].name == "depth"


def gated(gate: Gate, source: Any, device: torch.device) -> LoadedControlNet:
    """Only depth waits for the gate."""
    if source.name != "depth":
        gate = Gate()
        gate.open()
    return gate(source, device)


def test_what_is_let_go_leaves_memory(shelves: Shelves, size_bytes: int) -> None:
    with shelves(budget_bytes=size_bytes) as shelf:
        hold = shelf.borrow(["edges"])
        gone = weakref.ref(nets(hold)[0].network)
        shelf.give_back(hold)
        del hold
        nets(shelf.borrow(["depth"]))
        gc.collect()
        assert gone() is None


def test_what_can_never_be_there_is_refused_by_name(shelves: Shelves, size_bytes: int) -> None:
    with shelves(budget_bytes=2 * size_bytes) as shelf:
        with pytest.raises(ControlNetNotFound, match="'scribble'") as caught:
            shelf.borrow(["edges", "scribble"])
        assert caught.value.metadata == {"served": "depth, edges, layout"}
        with pytest.raises(TooLarge, match="edges, depth, layout take"):
            shelf.borrow(NAMES)
        assert len(nets(shelf.borrow(["edges", "edges", "depth"]))) == 3


def test_a_load_that_fails_is_told_to_those_who_wait_for_it_and_can_be_asked_for_again(
    model: Model, folders: dict[str, Path], tmp_path: Path
) -> None:
    mine = {name: Path(shutil.copytree(folder, tmp_path / name)) for name, folder in folders.items()}
    with shelf_of(model, mine) as shelf:
        (mine["depth"] / WEIGHTS).rename(tmp_path / "away")
        failing, other = shelf.borrow(["depth", "edges"]), shelf.borrow(["edges"])
        with pytest.raises(ControlNetUnusable, match="ControlNet depth"):
            nets(failing)
        assert nets(other)[0].name == "edges"
        (tmp_path / "away").rename(mine["depth"] / WEIGHTS)
        assert nets(shelf.borrow(["depth"]))[0].name == "depth"
        assert (shelf.counts.failures, shelf.counts.loads) == (1, 2)
        shelf.give_back(failing)  # harmless


def test_closing_fails_those_who_wait_and_ends_the_thread(shelves: Shelves) -> None:
    gate = Gate()
    with shelves(load=gate) as shelf:
        hold = shelf.borrow(["edges"])
        assert gate.waiting.wait(WAIT_S)
        threading.Timer(0.1, gate.open).start()
        shelf.close()
        with pytest.raises(Draining):
            nets(hold)
        with pytest.raises(Draining):
            shelf.borrow(["edges"])
        assert "ControlNet loads" not in {thread.name for thread in threading.enumerate()}
