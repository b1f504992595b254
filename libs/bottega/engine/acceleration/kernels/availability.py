"""Whether Triton kernels can run on a model's device."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from bottega.model.model import Model

# Triton supports Volta and newer. Older devices lack the half-precision tensor cores that it uses.
_LEAST_CAPABILITY = (7, 0)
_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def unavailable(model: Model) -> str:
    """Return why kernels cannot run, as one sentence; "" if they can."""
    if model.device.type != "cuda":
        return f"kernels need a CUDA device, and the model is on {model.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if find_spec("bottega.kernels") is None:
        return "bottega-kernels is not installed"
    capability = torch.cuda.get_device_capability(model.device)
    if capability < _LEAST_CAPABILITY:
        return f"the device has compute capability {capability[0]}.{capability[1]}, and kernels need 7.0"
    if model.dtype not in _DTYPES:
        return f"kernels do not support {model.dtype_name}"
    return ""
