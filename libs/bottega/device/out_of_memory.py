"""Recognizes errors which mean that a device or the host is out of memory."""

from __future__ import annotations

import torch

# Messages of libraries below torch, which torch raises as plain errors: of cuBLAS and cuDNN, of CUDA where torch's
# allocator is not involved (pinned memory, kernels that are loaded at their first use, graphs), of Triton's launches,
# and of the host. Source: aten/src/ATen/cuda/Exceptions.h, cudnn's status names, c10/cuda/CUDAException.cpp,
# c10/cuda/driver_api.h, triton/backends/nvidia/driver.c, c10/core/impl/alloc_cpu.cpp.
_MESSAGES = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "can't allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory was short, so that a smaller batch may succeed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)
