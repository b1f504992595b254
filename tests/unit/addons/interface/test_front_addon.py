"""The add-ons of a worker's front: those of the manifest, and what they write into parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bottega import kinds
from bottega.addons.interface import front_addon
from bottega.addons.interface.front_addon import FrontAddOn, load_front_addons
from bottega.errors import ConfigError
from bottega.manifest import read_services
from bottega.v1.activations_pb2 import EditDecision
from bottega.v1.cache_pb2 import CacheDecision, CacheStart
from bottega.v1.generation_pb2 import FIDELITY_BALANCED, GenerationSpec, Lora
from bottega.v1.lora_pb2 import LoraDecision
from bottega.v1.worker_pb2 import RunAttemptRequest

ENTRY, RECORDING = "3e" * 16, "5b" * 16


def _front(kind: str) -> FrontAddOn:
    return next(addon for addon in load_front_addons() if addon.kind == kind)


def _pinned(
    kind: str, spec: GenerationSpec, index: int | None, decision: bytes | None = None, ordered: bool = True
) -> bool:
    """Whether the add-on has changed the spec."""
    before = spec.SerializeToString()
    _front(kind).pin(spec, index, RunAttemptRequest(addons={kind: b""} if ordered else {}), decision)
    return spec.SerializeToString() != before


def test_a_front_has_the_add_ons_of_the_manifest() -> None:
    assert {addon.kind for addon in load_front_addons()} == {kinds.LORAS, kinds.CACHE, kinds.ACTIVATIONS}


@pytest.mark.parametrize("name", ["builtins:object", "bottega.kinds:none"])
def test_what_is_no_front_add_on_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    wrong = replace(read_services()[0], front_add_on=name)
    monkeypatch.setattr(front_addon, "read_services", lambda: (wrong,))
    with pytest.raises(ConfigError, match=name):
        load_front_addons()


def test_the_first_step_of_loras_is_in_the_parameters_of_all_pictures() -> None:
    for index in (None, 1):
        spec = GenerationSpec(loras=[Lora(name="ink")])
        assert not _pinned(kinds.LORAS, spec, index)
        assert _pinned(kinds.LORAS, spec, index, LoraDecision(step=3).SerializeToString())
        assert spec.loras[0].from_step == 3


def test_loras_that_were_there_before_the_first_step_are_pinned_to_it() -> None:
    decision = LoraDecision(step=0).SerializeToString()
    assert decision == b"", "a message of default values has no bytes, and is a decision nevertheless"
    spec = GenerationSpec(loras=[Lora(name="ink")])
    assert _pinned(kinds.LORAS, spec, 0, decision)
    assert spec.loras[0].HasField("from_step")


def test_a_start_is_in_the_parameters_of_its_picture_alone() -> None:
    decision = CacheDecision(starts=[CacheStart(), CacheStart(entry=ENTRY, step=5)]).SerializeToString()
    spec = GenerationSpec(prompt="a big red star on a blue field", fidelity=FIDELITY_BALANCED, num_inference_steps=20)
    assert not _pinned(kinds.CACHE, spec, None, decision)
    assert not _pinned(kinds.CACHE, spec, 1, decision, ordered=False)
    assert _pinned(kinds.CACHE, spec, 1, decision)
    assert spec.techniques.cache_entry == f"{ENTRY}@5"


def test_a_recording_is_in_the_parameters_of_its_picture_alone() -> None:
    decision = EditDecision(recording=RECORDING).SerializeToString()
    spec = GenerationSpec(fidelity=FIDELITY_BALANCED, keep_unmasked=True)
    assert not _pinned(kinds.ACTIVATIONS, spec, None, decision)
    assert _pinned(kinds.ACTIVATIONS, spec, 0, decision)
    assert spec.techniques.recording == RECORDING
