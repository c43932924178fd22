"""A process that chooses kernels and uses one: it prints what it is told, what it got, and the width of a result."""

from __future__ import annotations

import logging
import sys

import torch

from mooncake.kernels import choose_kernels


def main() -> None:
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(message)s")
    kernels = choose_kernels()
    print(type(kernels).__name__, kernels.silu_mul(torch.ones(1, 64)).shape[1])
