"""The load of the cluster, sampled at intervals."""

from __future__ import annotations

from dataclasses import dataclass, field

from mooncake.app.sim.machines.sim_machines import SimMachines


@dataclass(slots=True)
class Timeline:
    """One entry per sample; values are means over machines."""

    at_s: list[float] = field(default_factory=list)
    prefill_load: list[float] = field(default_factory=list)  # share of prefill machines that are computing
    queued: list[float] = field(default_factory=list)  # waiting prompts per prefill machine
    batch: list[float] = field(default_factory=list)  # sequences per decode machine, over 64
    step_ms: list[float] = field(default_factory=list)  # of decode machines with a batch

    def sample(self, machines: SimMachines, now: float) -> None:
        num_prefill, num_decode = max(len(machines.prefill), 1), max(len(machines.decode), 1)
        running = [machine for machine in machines.decode.values() if machine.running]
        self.at_s.append(now)
        self.prefill_load.append(sum(m.running is not None for m in machines.prefill.values()) / num_prefill)
        self.queued.append(sum(len(m.queue) for m in machines.prefill.values()) / num_prefill)
        self.batch.append(sum(len(m.running) for m in running) / num_decode / 64)
        self.step_ms.append(sum(m.step_ms for m in running) / max(len(running), 1))
