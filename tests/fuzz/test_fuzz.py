"""Bad input of every kind gets an exact answer, hurts nobody and gives nothing away. `make fuzz` is the long run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import cast

import grpc
import pytest

from tests.fuzz.calls import SERVICES, Outcome
from tests.fuzz.case import Case
from tests.fuzz.crowd import crowd
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.house import House, replay, running_house
from tests.fuzz.http_requests import fuzz_http
from tests.support.services import Services

# The first test starts a suite and sends the whole corpus.
pytestmark = pytest.mark.timeout(300)

REQUESTS = 12
# Of methods whose every good request is a process that imports.
FEW_REQUESTS = {"UploadLora": 4, "RegisterLora": 4, "AddControlNet": 4}
# Of each caller of a crowd; `make fuzz` sends all.
CROWD_CASES = 48


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with Services(tmp_path_factory.mktemp("fuzz")) as services, running_house(services) as house:
        yield house


def without_most_twins(cases: Iterable[Case]) -> Iterator[Case]:
    """Leave out most specs of SubmitJob and RunAttempt, which the rules of Generate's check. `make fuzz` sends all."""
    generated: set[str] = set()
    twins = 0
    for case in cases:
        if case.method == "Generate":
            generated.add(case.name)
        elif case.method in {"SubmitJob", "RunAttempt"} and case.name in generated:
            twins += 1
            if twins % 16:
                continue
        yield case


def test_every_field_at_its_limits_and_past_them_gets_the_exact_answer(house: House) -> None:
    wrong = replay(house, without_most_twins(house.corpus()))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("method", SERVICES)
def test_mutated_requests_are_answered_and_forgotten(house: House, method: str) -> None:
    requests = FEW_REQUESTS.get(method, REQUESTS)
    tally = fuzz(house, method, requests, seed=20)
    assert not tally.found, "\n".join(tally.found)
    assert tally.requests >= requests
    # A worker that draws what was asked before measures no blocks.
    valid = tally.accepted + (tally.codes[grpc.StatusCode.UNAVAILABLE] if method == "ProfileBlocks" else 0)
    assert 0 < valid < tally.requests, "requests that are all taken, or all refused, try nothing"
    assert not house.dead()


def test_bad_requests_of_several_callers_at_once_are_answered_as_any_may_be(house: House) -> None:
    found = crowd(house, callers=4, seed=1, most=CROWD_CASES)
    assert not found, "\n".join(found)
    assert not house.dead()


def test_random_requests_over_http_get_answers_in_openais_form_and_no_500(house: House) -> None:
    answers = fuzz_http(house.http.address, requests=8, seed=3)
    assert not answers.found, "\n".join(answers.found)
    assert answers.statuses[200], "requests that are all refused try nothing"
    assert not house.dead()


def test_nothing_was_an_error_of_ours(house: House) -> None:
    assert house.errors() == []
    assert house.engines_lost() == 0


def test_what_is_found_once_and_not_again_is_kept() -> None:
    answers = iter([Outcome(code=grpc.StatusCode.INTERNAL, text="it broke")])
    fine = Outcome(code=grpc.StatusCode.OK)
    caller = SimpleNamespace(call=lambda method, raw: next(answers, fine))
    house = cast("House", SimpleNamespace(caller=caller, dead=list, digest=""))
    (found,) = fuzz(house, "ListModels", 5, seed=1).found
    assert "INTERNAL: it broke" in found
