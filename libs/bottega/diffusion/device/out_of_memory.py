"""Whether an error says that a device, or the host, has no memory left."""

from __future__ import annotations

import torch

# What libraries below torch say of it, which torch raises as plain errors: of cuBLAS and cuDNN, of CUDA where torch's
# allocator is not asked (pinned memory, kernels that are loaded at their first use, graphs), of Triton's launches,
# of the host. Source: aten/src/ATen/cuda/Exceptions.h, cudnn's status names, c10/cuda/CUDAException.cpp,
# c10/cuda/driver_api.h, triton/backends/nvidia/driver.c, c10/core/impl/alloc_cpu.cpp.
_SAID = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "can't allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less work at once may go well where this failed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)
