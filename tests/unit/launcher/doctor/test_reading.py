"""What is read: from this machine, and from texts as the drivers' tools and the kernel write them."""

from __future__ import annotations

import ast
import shutil
import socket
import sys
from pathlib import Path

import psutil
import pytest

from elaunch.launcher.doctor.facts import GpuProcess
from elaunch.launcher.doctor.reading import gpus, host, network, programs
from elaunch.launcher.store.rendezvous_plan import RendezvousPlan
from tests.harness import REPOSITORY

# As `nvidia-smi --query-gpu=… --format=csv,noheader,nounits` writes it.
QUERY = [
    ["0", "GPU-aa", "NVIDIA H100 80GB HBM3", "570.86.15", "33", "1024", "81559", "0", "[N/A]"],
    ["1", "GPU-bb", "Tesla V100-SXM2-32GB", "570.86.15", "41", "0", "32768", "2", "Yes"],
]


def test_memory_and_limits_are_those_that_psutil_reads() -> None:
    memory, limits = host.read_memory(), host.read_limits()

    assert memory.total == psutil.virtual_memory().total
    assert abs(memory.available - psutil.virtual_memory().available) < 2 << 30
    assert limits.open_files == psutil.Process().rlimit(psutil.RLIMIT_NOFILE)[0]


def test_a_folder_is_tried_by_a_file_that_does_not_stay(tmp_path: Path) -> None:
    found = host.read_place("TMPDIR", str(tmp_path), writes=True)

    assert found.error == ""
    assert found.write_s is not None
    # Others write to this disk, too.
    assert abs(found.free - shutil.disk_usage(tmp_path).free) < 1 << 30
    assert list(tmp_path.iterdir()) == []


def test_of_a_folder_that_is_missing_the_nearest_above_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert host.nearest(str(tmp_path / "a" / "b")) == str(tmp_path)
    assert host.read_place("--log-dir", str(tmp_path / "a" / "b"), writes=True).error == ""
    assert "is a file" in host.read_place("--log-dir", str(tmp_path / "file" / "b"), writes=True).error


def test_the_kernel_tells_whether_something_keeps_the_clock() -> None:
    found = host.read_clock()

    assert found.is_synchronised is not None
    assert found.error_s is not None
    assert 0 <= found.error_s < 1000


def test_nvidia_smis_tables_become_gpus() -> None:
    used = [
        ["GPU-bb", "4711", "/usr/bin/python3", "2048"],
        ["GPU-bb", "12", "[Not Found]", "[N/A]"],
        ["GPU-bb", "[N/A]", "x", "1"],
    ]
    first, second = gpus.smi_gpus(QUERY, used, [["GPU-aa", "Yes", "No"]])

    assert (first.name, first.temperature_c, first.uncorrected) == ("NVIDIA H100 80GB HBM3", 33, 0)
    assert (first.pending, first.remap_failed, first.processes) == (True, False, ())
    assert (first.memory_used, first.memory_total) == (1 << 30, 81559 << 20)
    assert (second.uncorrected, second.pending, second.remap_failed) == (2, True, None)
    assert second.processes == (GpuProcess(4711, "python3", 2 << 30), GpuProcess(12, "[Not Found]"))


def test_xids_are_found_in_the_kernel_log() -> None:
    records = [
        b"6,1,1000000,-;eth0: link up\n",
        b"4,2,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n",
        b"4,3,6000000,-,caller=T12;NVRM: Xid (PCI:0000:5e:00): 31, pid=812, name=python, Ch 00000008\n",
        b"garbage \xff\n",
    ]

    found = gpus.xids(records, 65.0)

    assert [(each.age_s, each.bus, each.xid) for each in found] == [(60.0, "0000:3b:00", 79), (59.0, "0000:5e:00", 31)]


def test_a_kernel_log_that_cannot_be_read_is_no_failure(tmp_path: Path) -> None:
    assert not gpus.read_kernel_log(str(tmp_path / "missing")).is_readable


def test_each_name_of_nvml_is_one_of_its_package() -> None:
    nvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    text = (REPOSITORY / "launcher/doctor/reading/gpus.py").read_text()
    words = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    words |= {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    named = {str(word) for word in words if str(word).startswith(("nvmlDevice", "nvmlInit", "nvmlS", "NVML_"))}

    assert len(named) >= 12
    assert sorted(name for name in named if not hasattr(nvml, name)) == []


def test_an_rdma_port_has_the_state_that_the_kernel_says(tmp_path: Path) -> None:
    state = tmp_path / "mlx5_0" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("4: ACTIVE\n")

    assert gpus.read_rdma(tmp_path).ports == (("mlx5_0:1", "ACTIVE"),)


def test_a_port_that_is_in_use_is_told_from_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        found = network.read_ports(RendezvousPlan(), (port,))

    assert found.taken == (port,)
    assert network.read_ports(RendezvousPlan(), (port,)).taken == ()


def test_an_interpreter_without_torch_says_so(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)

    found = programs.read_torch(str(bare), uses_python=True, has_gpus=False, limit_s=30)

    assert found.error == "ModuleNotFoundError: No module named 'torch'"
    assert programs.read_torch("/missing", uses_python=True, has_gpus=False, limit_s=30).error


def test_a_program_that_answers_nonsense_in_torchs_place_is_no_traceback(tmp_path: Path) -> None:
    liar = tmp_path / "python"
    liar.write_text("#!/bin/sh\necho '[1, 2'\n")
    liar.chmod(0o755)

    assert "cannot be read" in programs.read_torch(str(liar), uses_python=True, has_gpus=False, limit_s=30).error


def test_py_spy_reads_the_stack_of_another_process() -> None:
    found = programs.read_stacks(20)

    assert found.tool, "py-spy is a dependency"
    assert found.error == ""


def test_the_date_of_http_is_read_to_the_second() -> None:
    assert network._seconds("Sun, 06 Nov 1994 08:49:37 GMT") == 784111777
