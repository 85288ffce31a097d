"""The variables of the environment that reach a worker: what it computes by, and none of the user's secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_NAMES: Final = {
    "CC",
    "CXX",
    "DYLD_LIBRARY_PATH",
    "LANG",
    "LANGUAGE",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "TZ",
}
_PREFIXES: Final = (
    "ATEN_",
    "BARNRAISE_",
    "BNB_",
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "DNNL_",
    "GLOO_",
    "GOMP_",
    "GPU_",
    "HIP_",
    "HSA_",
    "KMP_",
    "LC_",
    "MALLOC_",
    "MIOPEN_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTORCH_",
    "ROCM_",
    "ROCR_",
    "TORCH",
    "TRITON_",
)
_SECRETS: Final = ("AUTH", "CREDENTIAL", "KEY", "PASS", "SECRET", "TOKEN")  # NVIDIA_API_KEY, for one


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that a worker gets."""
    return {
        name: value
        for name, value in environment.items()
        if (name in _NAMES or name.startswith(_PREFIXES)) and not any(word in name for word in _SECRETS)
    }
