"""What a service may say of itself and of its load: every bound at its limit and one past."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bottega import kinds
from bottega.gateway.fleet.validation import check_load, check_registration
from bottega.v1.fleet_pb2 import Load, Registration, RunningAttempt, StepTime, SwitchTime
from bottega.v1.hosted_pb2 import Hosted, ResidualProfile
from bottega.v1.image_pb2 import Model
from bottega.v1.worker_pb2 import AttemptId
from tests.samples.hosted_loras import applied, at_hand

NAN, INF = math.nan, math.inf
MODEL = {"name": "m"}
NET = {"name": "edges"}
PROFILE: Any = {"model_hash": "m", "num_inference_steps": 30, "similarity": 0.9}


def _nets(count: int) -> list[Hosted]:
    return [Hosted(kind=kinds.CONTROLNET, name=f"n{n}") for n in range(count)]


# Values that are taken, and that are not.
REGISTRATION: dict[str, tuple[list[Any], list[Any]]] = {
    "kind": (["a", "my-own", "x" * 32], ["", "Worker", "a b", "-a", "x" * 33]),
    "uses": ([[], [f"k{n}" for n in range(16)]], [["a", "a"], ["A"], [f"k{n}" for n in range(17)]]),
    "name": (["x" * 128], ["", "x" * 129]),
    "address": (["a:1", "x" * 254 + ":1", "[::1]:65535"], ["", "a:0", "a:65536", "x" * 255 + ":1", "unix:/run/x"]),
    "version": (["", "x" * 128], ["x" * 129]),
    "device": (["", "x" * 128], ["x" * 129]),
    "instance": (["x" * 16, "x" * 64], ["", "x" * 15, "x" * 65]),
    "models": ([[], [Model(name=f"m{n}") for n in range(256)]], [[Model(name=f"m{n}") for n in range(257)]]),
}
MODELS: dict[str, tuple[list[Any], list[Any]]] = {
    "name": (["x" * 200], ["", "x" * 201]),
    **dict.fromkeys(("model_hash", "dtype", "base"), (["", "x" * 128], ["x" * 129])),
    **dict.fromkeys(
        ("default_width", "default_height", "size_multiple", "vae_scale_factor"), ([0, 16_384], [-1, 16_385])
    ),
    "max_pixels": ([0, 2**63 - 1], [-1]),
    "default_steps": ([0, 200], [-1, 201]),
    "default_guidance_scale": ([0.0, 50.0], [-0.001, 50.001, NAN, INF]),
    "default_sampler": ([0, 4], [5, -1]),
    "workers": ([-1, 2**31 - 1], []),
}
LOADS: dict[str, tuple[list[Any], list[Any]]] = {
    "running": ([[RunningAttempt()] * 4096], [[RunningAttempt()] * 4097]),
    "step_times": ([[StepTime(seconds=NAN)] * 4096], [[StepTime()] * 4097]),
    "fixed_s": ([0.0, 1e308], [-0.001, NAN, INF, -INF]),
    "max_rows": ([0, 2**31 - 1], [-1]),
    "memory_bytes": ([0, 2**63 - 1], [-1]),
    "switch_times": (
        [[], [SwitchTime(kind="loras", seconds=1e308)]],
        [
            *([SwitchTime(kind=kind, seconds=s)] for kind, s in (("loras", NAN), ("loras", -1.0), ("no kind", 1.0))),
            [SwitchTime(kind="loras")] * 2,
            [SwitchTime(kind=f"k{n}") for n in range(17)],
        ],
    ),
    "hosted": (
        [_nets(1024), at_hand(*(f"{n:064x}" for n in range(1024))), [applied("a" * 64)] * 8],
        [
            _nets(1025),
            _nets(1) * 2,
            at_hand("a" * 64, "a" * 64),
            *(at_hand(digest) for digest in ("", "a" * 63, "a" * 65, "A" * 64)),
            [applied("a" * 64)] * 9,
            [applied("a" * 64, NAN)],
            [Hosted(kind="no kind", name="n")],
        ],
    ),
}
CONTROLNETS: dict[str, tuple[list[Any], list[Any]]] = {
    "name": (["x" * 200], ["", "x" * 201, "a b"]),
    **dict.fromkeys(("digest", "base"), (["", "x" * 128], ["x" * 129])),
    "size_bytes": ([0, 2**63 - 1], [-1]),
    **dict.fromkeys(("popularity", "sessions"), ([0, 2**31 - 1], [-1])),
    "state": ([0, 4], [5, -1]),
    "profiles": ([[ResidualProfile(**PROFILE)] * 16], [[ResidualProfile(**PROFILE)] * 17, [ResidualProfile()]]),
}


def _cases(bounds: dict[str, tuple[list[Any], list[Any]]], side: int) -> list[tuple[str, Any]]:
    return [(name, value) for name, sides in bounds.items() for value in sides[side]]


def _of_registration(**facts: Any) -> list[str]:
    whole = {"kind": kinds.WORKER, "name": "w", "address": "a:1", "instance": "x" * 32, **facts}
    return [violation.field for violation in check_registration(Registration(**whole))]


def _of_load(**facts: Any) -> list[str]:
    return [violation.field for violation in check_load(Load(**facts))]


@pytest.mark.parametrize(("name", "value"), _cases(REGISTRATION, 0))
def test_a_newcomer_at_a_bound_is_taken(name: str, value: Any) -> None:
    assert _of_registration(**{name: value}) == []


@pytest.mark.parametrize(("name", "value"), _cases(REGISTRATION, 1))
def test_a_newcomer_past_a_bound_is_refused(name: str, value: Any) -> None:
    assert _of_registration(**{name: value}) == [f"registration.{name}"]


@pytest.mark.parametrize(("name", "value"), _cases(MODELS, 0))
def test_a_model_at_a_bound_is_taken(name: str, value: Any) -> None:
    assert _of_registration(models=[Model(**MODEL | {name: value})]) == []


@pytest.mark.parametrize(("name", "value"), _cases(MODELS, 1))
def test_a_model_past_a_bound_is_refused(name: str, value: Any) -> None:
    assert _of_registration(models=[Model(**MODEL | {name: value})]) == ["registration.models"]


@pytest.mark.parametrize(("name", "value"), _cases(LOADS, 0))
def test_a_load_at_a_bound_is_taken(name: str, value: Any) -> None:
    assert _of_load(**{name: value}) == []


@pytest.mark.parametrize(("name", "value"), _cases(LOADS, 1))
def test_a_load_past_a_bound_is_refused(name: str, value: Any) -> None:
    assert _of_load(**{name: value}) == [f"load.{name}"]


@pytest.mark.parametrize(("characters", "refused"), [(128, []), (129, ["load.running"])])
def test_the_job_of_an_attempt_that_runs_has_an_id_of_128_characters_at_most(
    characters: int, refused: list[str]
) -> None:
    fine = RunningAttempt(attempt=AttemptId(job_id="job", number=1))
    long = RunningAttempt(attempt=AttemptId(job_id="x" * characters, number=-(2**31)), steps_left=-(2**31))
    assert _of_load(running=[fine, long]) == refused


@pytest.mark.parametrize(("name", "value"), _cases(CONTROLNETS, 0))
def test_a_hosted_controlnet_at_a_bound_is_taken(name: str, value: Any) -> None:
    assert _of_load(hosted=[Hosted(kind=kinds.CONTROLNET, **NET | {name: value})]) == []


@pytest.mark.parametrize(("name", "value"), _cases(CONTROLNETS, 1))
def test_a_hosted_controlnet_past_a_bound_is_refused(name: str, value: Any) -> None:
    assert _of_load(hosted=[Hosted(kind=kinds.CONTROLNET, **NET | {name: value})]) == ["load.hosted"]
