"""The environment of the tests and of every process that they start."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """Set what is not set yet. Torch, Triton and others read it when they are first imported."""
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # The last bits of a result depend on the number of threads; the tests' own should not depend on the machine. More
    # of them cost a sixth more processor time (measured); files for which their number matters say it.
    environment.setdefault("OMP_NUM_THREADS", "1")
    # As engines have it: the reference in the tests' process must compute the same last bits wherever its weights lie.
    environment.setdefault("MKL_CBWR", "AUTO,STRICT")
    # Kernels run on the CPU then. `pytest -m gpu` compiles them.
    if "gpu" not in sys.argv:
        environment.setdefault("TRITON_INTERPRET", "1")
    # Nothing is downloaded at run time; a test that tries fails at once.
    environment.setdefault("HF_HUB_OFFLINE", "1")
