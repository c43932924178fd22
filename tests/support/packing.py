"""How much memory packing a model's weights takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_CODE = """
import re, sys
from pathlib import Path
from mooncake.checkpoint import open_checkpoint
from mooncake.kernels import choose_kernels
from mooncake.model.layers import WeightsOnDemand
from mooncake.model.llama import CausalLM
from mooncake.model.reading.weights import load_weights
def own_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
def told(name):
    most.append(own_bytes())
    return weights[name]
kernels, checkpoint = choose_kernels(), open_checkpoint(sys.argv[1])
most = [own_bytes()]
weights = load_weights(checkpoint, "bfloat16")
model = CausalLM(checkpoint.config, WeightsOnDemand(weights, told), kernels=kernels)
print(max(most) - most[0])
"""


def most_bytes_while_packing(folder: Path) -> int:
    """The most anonymous memory of a separate process that loads the model in bfloat16, measured whenever a weight is
    read. Freed memory is returned to the system, as large allocations of real models are."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", _CODE, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout)
