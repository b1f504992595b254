"""With the environment of an engine, the last bits of a product do not depend on where its operands lie in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from bottega.process import engine_environment

_TIMEOUT_S = 120.0
# Prints the number of results of each product, over all addresses of weights and inputs modulo 64 bytes.
_PRODUCTS = """
import json, torch

def at(offset, tensor):
    memory = torch.empty(tensor.nbytes + 64, dtype=torch.uint8)
    begin = (offset - memory.data_ptr()) % 64
    return memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

def results(rows, features):
    inputs, weight = torch.randn(rows, features), torch.randn(96, features)
    offsets = range(0, 64, 4)
    made = [torch.nn.functional.linear(at(0, inputs), at(offset, weight)) for offset in offsets]
    made += [torch.nn.functional.linear(at(offset, inputs), at(0, weight)) for offset in offsets]
    return len({result.numpy().tobytes() for result in made})

print(json.dumps({rows: results(rows, 200) for rows in (1, 2, 3, 4, 24)}))
"""


def test_the_last_bits_of_a_product_do_not_depend_on_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKL_CBWR")
    ran = subprocess.run(
        [sys.executable, "-c", _PRODUCTS],
        env={**os.environ, **engine_environment(exclusive_cores=False)},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == dict.fromkeys(("1", "2", "3", "4", "24"), 1)


def test_an_operator_s_own_choice_of_kernels_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert engine_environment(exclusive_cores=False)["MKL_CBWR"] == "COMPATIBLE"
