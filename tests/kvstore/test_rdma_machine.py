"""The tests of ``tests/rdma`` in a virtual machine with soft RoCE, for machines whose kernel has no RDMA.

``RDMA_VM`` names a program that runs a command where verbs work; by default one beside the checkout is looked for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.transfer.rdma.find import VerbsUnavailable, pyverbs
from kvstore.transfer.rdma.verbs import Device
from mooncake.checkpoint import open_checkpoint
from mooncake.model import load_model
from mooncake.precision import FLOAT32

ROOT = Path(__file__).parents[2]
TOOL = Path(os.environ.get("RDMA_VM") or ROOT.parent / "shared" / "rdma-vm" / "run-in-rdma-vm")
pytestmark = [pytest.mark.rdma, pytest.mark.slow]


def in_machine(*arguments: str, timeout_s: int, memory: str = "2G", model: str = "") -> str:
    """Output of pytest with these arguments. Skips when there is no such machine, or no need for one."""
    try:
        Device().close()
        pytest.skip("this machine has verbs itself: tests/rdma runs here")
    except VerbsUnavailable:
        pass
    if not TOOL.exists():
        pytest.skip("no verbs here, and no program to get a machine that has them (RDMA_VM)")
    try:
        pyverbs()
    except VerbsUnavailable as error:
        pytest.skip(str(error))
    # Torch's kernels: compiling ours takes minutes in there.
    environment = os.environ | {"CXX": "/none", "RDMA_TEST_MODEL": model}
    command = [str(TOOL), "--mem", memory, "--timeout", str(timeout_s), sys.executable, "-m", "pytest"]
    # A test that hangs fails in there, well before the machine's own end.
    options = ["-q", "-p", "no:cacheprovider", "--timeout", str(timeout_s - 120)]
    for _ in range(2):  # an emulated kernel whose timer got no time from a busy machine panics at boot
        run = subprocess.run(
            [*command, *options, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if run.returncode != 125:
            break
    else:
        pytest.skip(f"the machine does not start: {run.stderr.strip().splitlines()[-1:]}")
    if run.returncode == 124 and "FAILED" not in run.stdout:
        pytest.skip(f"the emulated machine is too slow here: no end within {timeout_s} s")
    assert run.returncode == 0, f"{run.stdout[-8000:]}\n{run.stderr[-2000:]}"
    return run.stdout


@pytest.mark.timeout(600)
def test_reads_writes_keys_queue_pairs_and_peers_over_verbs():
    output = in_machine("tests/rdma/test_rdma.py", timeout_s=540)
    assert " passed" in output and "skipped" not in output


@pytest.mark.timeout(900)
def test_a_real_models_hand_off_streams_over_verbs():
    load_model(open_checkpoint("smollm2"), FLOAT32, 128)  # leaves its weights where the machine need only map them
    output = in_machine("tests/rdma/test_rdma_handoff.py", memory="4G", model="smollm2", timeout_s=840)
    assert "1 passed" in output
