"""What ghz is told to call: every public method, requests that the contract knows, rates that can be judged."""

from __future__ import annotations

import re

import pytest
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass

from bottega.v1 import image_pb2
from load.gate import SLO, read_objectives
from tests.support.ghz_configurations import GHZ, PROFILES, configurations

# A job can be deleted once, and the other methods are called with it.
METHODS = {
    name: method
    for name, method in image_pb2.DESCRIPTOR.services_by_name["ImageService"].methods_by_name.items()
    if name != "DeleteJob"
}
# Of ghz's documentation of its options, as far as these files use them: ghz takes no notice of others.
KEYS = {"name", "tags", "call", "insecure", "data", "timeout", "total", "max-duration"}
RATE_KEYS = {
    "smoke": {"concurrency"},
    "steady": {"async", "rps"},
    "step": {
        "async",
        "load-schedule",
        "load-start",
        "load-step",
        "load-end",
        "load-step-duration",
        "load-max-duration",
    },
}


def seconds(text: str) -> int:
    """Of one of Go's durations as they are written here."""
    matched = re.fullmatch(r"(\d+)s", text)
    assert matched, text
    return int(matched[1])


@pytest.mark.parametrize("profile", PROFILES)
def test_every_public_method_is_called_and_has_bounds(profile: str) -> None:
    assert configurations(profile).keys() == set(METHODS) == read_objectives(SLO)[profile].keys()
    assert len(list((GHZ / profile).iterdir())) == len(METHODS)


@pytest.mark.parametrize("profile", PROFILES)
def test_what_is_sent_is_a_request_of_the_method(profile: str) -> None:
    for method, declared in METHODS.items():
        config = configurations(profile)[method]
        json_format.ParseDict(config["data"], GetMessageClass(declared.input_type)())
        assert config["call"] == f"{declared.containing_service.full_name}/{method}"
        assert config.keys() == KEYS | RATE_KEYS[profile]
        assert config["data"] == configurations("smoke")[method]["data"]
        assert (config["tags"], config["name"]) == ({"profile": profile}, f"{profile} {method}")


def test_a_run_is_as_long_as_its_rate_says_and_has_a_deadline() -> None:
    for method in METHODS:
        steady, step = configurations("steady")[method], configurations("step")[method]
        assert seconds(steady["max-duration"]) > steady["total"] / steady["rps"]
        rates = range(step["load-start"], step["load-end"] + 1, step["load-step"])
        assert rates[-1] == step["load-end"] > step["load-start"]
        assert step["total"] == sum(rates) * seconds(step["load-step-duration"])
        assert seconds(step["load-max-duration"]) == len(rates) * seconds(step["load-step-duration"])
        assert seconds(step["max-duration"]) > seconds(step["load-max-duration"])
