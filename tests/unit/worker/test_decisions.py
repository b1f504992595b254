"""What an attempt decides reaches the gateway and the next attempt's engine, whatever decisions there are."""

from __future__ import annotations

from dataclasses import fields

import pytest

from bottega.diffusion.engine.decisions import NO_DECISIONS, Decisions
from bottega.v1.worker_pb2 import AttemptDecisions
from bottega.worker.engine.messages import decisions_message, decisions_of


def test_the_engine_and_the_contract_have_the_same_decisions() -> None:
    assert {each.name for each in fields(Decisions)} == set(AttemptDecisions.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("step", [None, 0, 7])
def test_decisions_come_back_to_an_engine_as_they_were(step: int | None) -> None:
    decided = Decisions(loras_step=step)
    assert decisions_of(AttemptDecisions.FromString(decisions_message(decided).SerializeToString())) == decided
    assert decided.or_else(NO_DECISIONS) == NO_DECISIONS.or_else(decided) == decided
    assert Decisions(loras_step=1).or_else(decided) == Decisions(loras_step=1)
