"""Facts that need a GPU, in one rank: NCCL alone, its flight recorder, bfloat16, a compiled kernel, NVML.

Prints one line: `facts` and a JSON object.
"""

import json
import os
import pickle
import time

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.nn.parallel import DistributedDataParallel

COLLECTIVES = 5

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
began_s = time.monotonic()
torch.cuda.set_device(device)
torch.zeros(1, device=device)
torch.cuda.synchronize()
context_s = time.monotonic() - began_s

began_s = time.monotonic()
dist.init_process_group("nccl")
values = torch.arange(1 << 20, dtype=torch.bfloat16, device=device) % 7
expected = values.clone()
dist.all_reduce(values)
torch.cuda.synchronize()
first_all_reduce_s = time.monotonic() - began_s
# Alone, a rank keeps what it has.
assert torch.equal(values, expected)
for _ in range(COLLECTIVES - 1):
    dist.all_reduce(values)
torch.cuda.synchronize()

recorder = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
recorded = pickle.loads(recorder()) if recorder else {}
names = [entry["profiling_name"] for entry in recorded.get("entries", [])]
seen = sum(name == "nccl:all_reduce" for name in names)
assert seen == COLLECTIVES, f"the flight recorder has {seen} of {COLLECTIVES} all-reduces: {names}"

model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)).to(device)
inputs = torch.randn(64, 256, device=device)
ddp = DistributedDataParallel(model, device_ids=[device.index])
with torch.autocast("cuda", dtype=torch.bfloat16):
    eager = ddp(inputs)
    began_s = time.monotonic()
    compiled = torch.compile(model)(inputs)
    torch.cuda.synchronize()
    compile_s = time.monotonic() - began_s
assert eager.dtype is torch.bfloat16
# bfloat16 has eight bits.
assert torch.allclose(eager, compiled, atol=0.02, rtol=0.02)
eager.float().square().mean().backward()
assert all(parameter.grad is not None for parameter in model.parameters())

management = {}
try:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(device.index)
    management["driver"] = pynvml.nvmlSystemGetDriverVersion()
    management["sm_clock_mhz"] = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    management["power_w"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    management["processes"] = len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
except Exception as error:
    # A missing library, driver or right is a fact too.
    management["nvml"] = f"{type(error).__name__}: {error}"

properties = torch.cuda.get_device_properties(device)
record = {
    "gpu": properties.name,
    "gpus": torch.cuda.device_count(),
    "memory_gb": round(properties.total_memory / 1e9, 1),
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, nccl.version())),  # type: ignore[no-untyped-call]
    "context_s": round(context_s, 3),
    "first_all_reduce_s": round(first_all_reduce_s, 3),
    "compile_s": round(compile_s, 2),
    "flight_recorder": seen,
    **management,
}
print("facts", json.dumps(record), flush=True)
dist.destroy_process_group()
