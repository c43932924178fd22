"""A prefill node whose steps take 21 times as long as usual, and 0.3 s more, from SIGUSR1 to SIGUSR2. The rest is the
real node.

python slow_prefill_node.py --config FILE --set node.id=NAME
"""

from __future__ import annotations

import signal
import time
from collections import deque
from statistics import median
from typing import ClassVar

import mooncake.engine.hosting.host
from mooncake.app.cluster.role_main import run_role
from mooncake.engine.hosting.node_hook import NodeHook
from mooncake.engine.step_plan import StepPlan
from prefill_node.node import PrefillNode


class SlowHook(NodeHook):
    is_slow = False
    usual_s: ClassVar[deque[float]] = deque(maxlen=64)

    def end_step(self, plan: StepPlan) -> None:
        if self.is_slow:
            time.sleep(20 * median(self.usual_s) + 0.3)
        else:
            self.usual_s.append(time.monotonic() - self._started_s)
        super().end_step(plan)


def _set_slow(signum: int, _: object) -> None:
    SlowHook.is_slow = signum == signal.SIGUSR1


if __name__ == "__main__":
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _set_slow)
    mooncake.engine.hosting.host.NodeHook = SlowHook  # type: ignore[misc]
    run_role("prefill", PrefillNode)
