"""GPU kernels run compiled where there is one, else in Triton's interpreter, chosen before they are imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
