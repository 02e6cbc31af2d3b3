"""The pages that a forked process has written to are found, and copied ahead in the next one."""

from __future__ import annotations

import json
import subprocess
import sys

from elaunch.agent.forkserver import written_pages
from tests.harness import DEADLINE_S

# A process forks one that writes to every second page of its memory, and then one that copies these pages ahead. Prints
# how many pages were found in that memory, how many page faults the second one's writes to them took, without and with
# the copies, and whether its memory is the same but for its writes.
_PROGRAM = """
import json, mmap, os, resource, sys
from elaunch.agent.forkserver import written_pages
PAGES = 1000
memory = mmap.mmap(-1, PAGES * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:] = b"elaunch " * (PAGES * 512)
def write():
    for page in range(0, PAGES, 2):
        memory[page * 4096] = 1
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
told_r, told_w = os.pipe()
end_r, end_w = os.pipe()
first = os.fork()
if not first:
    os.close(end_w)
    write()
    os.write(told_w, b"!")
    os.read(end_r, 1)
    os._exit(0)
os.read(told_r, 1)
written = written_pages.written_by(first)
def second(pages):
    pid = os.fork()
    if not pid:
        written_pages.copy(pages)
        is_same = memory[:] == b"elaunch " * (PAGES * 512)
        before = faults()
        write()
        os.write(told_w, json.dumps([faults() - before, is_same]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return json.loads(os.read(told_r, 100))
results = [len(written), second([]), second(written)]
os.close(end_w)
os.waitpid(first, 0)
print(json.dumps(results))
"""


def test_a_process_that_waits_has_copies_of_the_pages_that_a_worker_wrote_to() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=180, check=True)

    found, (faults_without, _), (faults_with, is_same) = json.loads(done.stdout)
    assert is_same
    assert found >= 500
    assert faults_without >= 500
    assert faults_with < 50


def test_a_process_that_is_gone_has_written_to_no_page() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(DEADLINE_S)

    assert written_pages.written_by(gone.pid) == []
