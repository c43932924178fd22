"""Names of the array types that prefixes and placement exchange: one entry per node, slot or link."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Links = npt.NDArray[np.int32]
