"""Whether Triton's kernels can run for a model: where they cannot, the plain ways do all of it."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from bottega.diffusion.model.model import Model

# Triton compiles for Volta and newer; below, half precision has no tensor cores that its products need.
_LEAST_CAPABILITY = (7, 0)
_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def unavailable(model: Model) -> str:
    """Why they cannot, one sentence; empty where they can."""
    if model.device.type != "cuda":
        return f"kernels run on CUDA devices, and the model is on {model.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if find_spec("bottega.kernels") is None:
        return "bottega-kernels is not installed"
    capability = torch.cuda.get_device_capability(model.device)
    if capability < _LEAST_CAPABILITY:
        return f"the device has compute capability {capability[0]}.{capability[1]}, and kernels need 7.0"
    if model.dtype not in _DTYPES:
        return f"kernels know no {model.dtype_name}"
    return ""
