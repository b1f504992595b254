"""A service that is no part of Bottega; tests/service/client/test_up.py runs it with the suite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bottega.engine.engine import Engine
from bottega.engine.events import JobDecided
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.v1.fleet_pb2 import ServiceAddress
from tests.added_service.calls import messages
from tests.added_service.engine_add_on import ColourEngineAddOn
from tests.added_service.service_spec import KIND
from tests.support.manual_engine import ManualEngine, load

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MANIFEST = HERE / "services.txt"
SPEC = ResolvedSpec(prompt="a red star", num_inference_steps=2, width=64, height=64)


def test_a_later_attempt_keeps_to_the_store_of_the_first() -> None:
    addon = ColourEngineAddOn()
    engine = ManualEngine(Engine(load(), EngineLimits(), addons=[addon]))
    named = {KIND: messages.ColourOrder(names=["red"]).SerializeToString()}
    order = EngineOrder(key="first", spec=SPEC, addons=named)
    first = engine.submit(order)
    engine.turn()
    assert not first.events, "it waits for a store"
    addon.set_services([ServiceAddress(kind=KIND, name=name) for name in ("north", "south")])
    engine.run()
    (decided,) = first.all(JobDecided)
    assert messages.ColourDecision.FromString(decided.decisions[KIND]).store == "north"
    addon.set_services([ServiceAddress(kind=KIND, name="south")])
    again = replace(order, key="again", decisions=decided.decisions)
    assert engine.draw(again).all(JobDecided) == [replace(decided, key="again")]


def test_nothing_but_its_package_and_a_manifest_knows_it() -> None:
    known = [
        path
        for top in ("deploy", "libs", "protos", "services")
        for path in (ROOT / top).rglob("*")
        if path.suffix in {".py", ".proto", ".txt", ".yaml", ".service", ".template"} and "egg-info" not in str(path)
        if "added_service" in (text := path.read_text(encoding="utf-8")) or f'"{KIND}"' in text
    ]
    assert known == []
    assert MANIFEST.read_text() == "tests.added_service.service_spec\n", "one line"
