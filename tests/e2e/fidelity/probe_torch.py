"""What a program finds after `import torch`, with torch preloaded and without.

Collects the facts of probe.py (in the same folder) again, and adds those of torch and numpy.
"""

import os
import sys
import time

# What is known to differ: docs/fidelity.md has it.
DIFFERENCES = {}
# CPU time: on a busy host the wall time is chance.
START_S = time.process_time()

import numpy
import torch
import torch.distributed

DIFFERENCES["import took"] = time.process_time() - START_S

import probe  # isort: skip
import probe_process  # isort: skip

FACTS = {}
UNLIKE = {}


def fact(look):
    FACTS[look.__name__] = look
    return look


def unlike(look):
    UNLIKE[look.__name__] = look
    return look


@fact
def torch_threads():
    return [torch.get_num_threads(), torch.get_num_interop_threads()]


@fact
def torch_parallel_info():
    return torch.__config__.parallel_info().splitlines()


@fact
def torch_build():
    return [torch.__config__.show(), torch.backends.cpu.get_cpu_capability()]


@fact
def torch_defaults():
    return {
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "grad": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()],
        "deterministic": [torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode()],
        "precision": [torch.get_float32_matmul_precision(), torch.is_warn_always_enabled()],
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "mkldnn": [torch.backends.mkldnn.is_available(), torch.backends.mkldnn.flags.__name__],
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "denormal": torch.tensor(1e-310, dtype=torch.float64).mul(1).item(),
        "print": str(torch.tensor([1 / 3, 1e10])),
    }


@fact
def torch_cuda():
    return [torch.cuda.is_initialized(), torch.cuda.is_available(), torch.cuda._is_in_bad_fork()]


@fact
def torch_distributed():
    debug = torch.distributed.get_debug_level()
    return [torch.distributed.is_available(), torch.distributed.is_initialized(), str(debug)]


@fact
def torch_loggers():
    import logging

    names = sorted(name for name in logging.root.manager.loggerDict if name.startswith("torch"))
    loggers = [logging.getLogger(name) for name in names]
    return [[g.name, g.level, g.propagate, g.disabled, [type(h).__name__ for h in g.handlers]] for g in loggers]


@fact
def torch_variables():
    return {
        name: value for name, value in os.environ.items() if name.startswith(("TORCH", "PYTORCH", "KMP", "OPENBLAS"))
    }


@fact
def blas_threads():
    """numpy's OpenBLAS, as it says itself."""
    import ctypes

    libraries = {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line}
    found = []
    for library in sorted(libraries):
        loaded = ctypes.CDLL(library)
        names = (f"{a}openblas_get_num_threads{b}" for a in ("scipy_", "") for b in ("64_", ""))
        found += [getattr(loaded, name)() for name in names if hasattr(loaded, name)]
    return found


def busy_threads(work, ticks_min=15):
    """How many threads of this process work while `work` is called again and again. Only one rank measures.

    The measure is the threads' own CPU time, not the clock: on a busy machine a process may wait for long.
    """
    if os.environ.get("RANK") == "1":
        return None
    work()
    before = _ticks()
    used = [0]
    while max(used) < ticks_min:
        work()
        used = [ticks - before.get(thread, 0) for thread, ticks in _ticks().items()]
    return sum(ticks > 0.2 * max(used) for ticks in used)


def _ticks():
    """User time by thread, in the kernel's ticks."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        found[thread] = int(open(f"/proc/self/task/{thread}/stat").read().rpartition(")")[2].split()[11])
    return found


@fact
def threads_that_work_for_a_torch_matmul():
    a = torch.ones(700, 700)
    return busy_threads(lambda: a @ a)


@fact
def threads_that_work_for_a_torch_loop():
    a = torch.ones(3_000_000)
    return busy_threads(lambda: torch.sin(a))


@fact
def threads_that_work_for_a_numpy_matmul():
    a = numpy.ones((700, 700), dtype=numpy.float32)
    return busy_threads(lambda: a @ a)


@fact
def threads_that_work_for_autograd():
    a = torch.ones(700, 700, requires_grad=True)
    return busy_threads(lambda: (a @ a).sum().backward())


@fact
def seeded_numbers():
    torch.manual_seed(5)
    numpy.random.seed(5)
    generator = torch.Generator().manual_seed(6)
    drawn = [torch.rand(2).tolist(), numpy.random.rand(2).tolist(), torch.rand(2, generator=generator).tolist()]
    return [drawn, numpy.random.default_rng(7).random(), torch.nn.Linear(2, 2).weight.tolist(), torch.initial_seed()]


@fact
def torch_compiler_settings():
    """Comes after the facts of `import torch` alone. Importing the compiler takes a fresh interpreter a second."""
    if "--compiler" not in sys.argv:
        return None
    start_s = time.process_time()
    import torch._dynamo

    DIFFERENCES["import took"] += time.process_time() - start_s
    import torch._inductor.config

    settings = {**torch._dynamo.config.get_config_copy(), **torch._inductor.config.get_config_copy()}
    sets = {name: sorted(value, key=str) for name, value in settings.items() if isinstance(value, (set, frozenset))}
    return {name: repr(value).split(" at 0x")[0] for name, value in {**settings, **sets}.items()}


def differences():
    return {**DIFFERENCES, "cache folder": "TORCHINDUCTOR_CACHE_DIR" in os.environ}


@unlike
def torch_seed():
    return torch.initial_seed()


@unlike
def torch_number():
    return torch.rand(1).item()


@unlike
def numpy_number():
    return float(numpy.random.rand())


@unlike
def numpy_state():
    return numpy.random.get_state()[1].tolist()


@unlike
def numpy_generator_number():
    return float(numpy.random.default_rng().random())


@unlike
def dropout():
    return torch.nn.functional.dropout(torch.ones(200)).tolist()


if __name__ == "__main__":
    assert "torch" in sys.modules
    # Draw random numbers before any fact sets a seed.
    probe.write_record(
        [*UNLIKE.values(), *probe_process.FACTS.values(), *probe.FACTS.values(), *FACTS.values(), differences]
    )
