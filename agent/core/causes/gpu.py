"""Causes: GPUs, their driver, and CUDA."""

from __future__ import annotations

from elaunch.agent.core.causes.cause import CauseRule, Evidence, GpuErrors, Question, Values, regex

_CUDA = r"CUDA error: "
_BLOCKING = "run once with CUDA_LAUNCH_BLOCKING=1, which shows the Python line of the failing kernel"

# What NVIDIA's list of Xid errors calls a fault of the hardware, with its words (docs.nvidia.com/deploy/xid-errors).
_HARDWARE_XIDS = {
    "48": "double bit ECC error",
    "62": "internal micro-controller halt",
    "63": "row remapping or page retirement",
    "64": "row remapping or page retirement failed",
    "74": "NVLink error",
    "79": "the GPU has fallen off the bus",
    "92": "high rate of single bit ECC errors",
    "94": "contained ECC error",
    "95": "uncontained ECC error",
    "119": "GSP timeout",
    "120": "GSP error",
}
_XID = regex(r"Xid \((?P<where>[^)]*)\): (?P<xid>\d+)")


def _ask(_evidence: Evidence, _values: Values) -> tuple[Question, ...]:
    return (GpuErrors(),)


def _hardware(evidence: Evidence, _values: Values) -> Values | None:
    """The first error of the hardware among the driver's. Xids that a faulty program makes too say nothing."""
    for line in evidence.facts.gpu_errors:
        if (found := _XID.search(line)) is None:
            return {"error": line}
        if found["xid"] in _HARDWARE_XIDS:
            return {"error": f"Xid {found['xid']} on {found['where']}: {_HARDWARE_XIDS[found['xid']]}"}
    return None


RULES = (
    CauseRule(
        "a GPU or its link is faulty (Xid, ECC)",
        "take this node out of the job and have the GPU reset or replaced; nvidia-smi -q and the kernel log say more",
        pattern=regex(rf"{_CUDA}|NCCL error|CUBLAS_STATUS|CUDNN_STATUS|ncclSystemError|ncclUnhandledCudaError"),
        detail="the NVIDIA driver says: {error}",
        more=_hardware,
        asks=_ask,
    ),
    CauseRule(
        "uncorrectable ECC error",
        "take this node out of the job and have the GPU reset or replaced; nvidia-smi -q -d ECC shows its counters",
        pattern=regex(_CUDA + "uncorrectable ECC error"),
    ),
    CauseRule(
        "device-side assert",
        f"an index is out of range in a GPU kernel, most often a label or token id that is too large; {_BLOCKING}",
        pattern=regex(_CUDA + "device-side assert"),
    ),
    CauseRule(
        "illegal memory access in a kernel",
        f"a GPU kernel read or wrote outside of its memory; {_BLOCKING}; compute-sanitizer finds the access",
        pattern=regex(_CUDA + "(?:an illegal memory access|misaligned address|unspecified launch failure)"),
    ),
    CauseRule(
        "invalid device ordinal",
        "a rank chose a GPU that this node does not have: choose by LOCAL_RANK, not by RANK, and start as many workers"
        " as there are GPUs (--nproc-per-node gpu)",
        pattern=regex(_CUDA + "invalid device ordinal|Invalid device id"),
    ),
    CauseRule(
        "no kernel image for this GPU",
        "this build of torch, or of an extension, has no code for this GPU: install one that is built for it"
        " (torch.cuda.get_arch_list() and torch.cuda.get_device_capability() show both)",
        pattern=regex(_CUDA + "no kernel image"),
    ),
    CauseRule(
        "the driver is too old",
        "update the NVIDIA driver of this node, or install a torch that is built for an older CUDA",
        pattern=regex(
            r"NVIDIA driver on your system is too old|CUDA driver version is insufficient for CUDA runtime version"
        ),
    ),
    CauseRule(
        "no GPU to be seen",
        "this process sees no GPU: check nvidia-smi on this node, CUDA_VISIBLE_DEVICES, and that the container or the"
        " scheduler gives it GPUs (docker --gpus all, --gres=gpu:N)",
        pattern=regex(r"No CUDA GPUs are available|no CUDA-capable device is detected|Found no NVIDIA driver"),
    ),
    CauseRule(
        "torch has no CUDA",
        "this torch is built for CPUs only: install one with CUDA (pytorch.org/get-started)",
        pattern=regex(r"Torch not compiled with CUDA enabled"),
    ),
    CauseRule(
        "CUDA in a forked process",
        'CUDA cannot be used in a forked child: use multiprocessing_context="spawn" for the DataLoader, or keep CUDA'
        " out of the data set",
        pattern=regex(r"Cannot re-initialize CUDA in forked subprocess"),
    ),
    CauseRule(
        "the GPU is busy",
        "another process holds this GPU in exclusive mode: give each rank its own GPU, or end that process"
        " (nvidia-smi)",
        pattern=regex(r"CUDA-capable device\(s\) is/are busy or unavailable"),
    ),
    CauseRule(
        "cuBLAS or cuDNN cannot start",
        f"the GPU's memory is nearly full, or an earlier kernel has failed; {_BLOCKING}",
        pattern=regex(r"CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)"),
    ),
)
