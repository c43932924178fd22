"""The longest gaps of an answer: from runs of steps, compared with single steps, in both languages."""

import numpy as np
import pytest

from mooncake.app.sim.machines.steps import StepRuns


@pytest.mark.parametrize("native", [True, False])
def test_the_longest_tenth_against_every_gap(native: bool) -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        runs, steps_ms = StepRuns(native), list[float]()
        for _ in range(int(rng.integers(1, 12))):
            first, growth, count = rng.uniform(20.0, 40.0), rng.uniform(0.0, 1e-6), int(rng.integers(1, 30))
            runs.begin(len(steps_ms), first, growth)
            steps_ms += [first + growth * at for at in range(count)]
        begin = int(rng.integers(len(steps_ms)))
        end = int(rng.integers(begin + 1, len(steps_ms) + 1))
        gaps = steps_ms[begin:end]
        waited_ms = rng.uniform(0.0, 50.0)
        lived_ms = sum(gaps) + waited_ms
        gaps[0] += waited_ms
        longest = sorted(gaps, reverse=True)[: -(-len(gaps) // 10)]
        assert runs.tail_ms(begin, end, lived_ms) == pytest.approx(np.mean(longest), rel=1e-6)
        runs.drop_before(begin)
        assert runs.tail_ms(begin, end, lived_ms) == pytest.approx(np.mean(longest), rel=1e-6)


def test_both_languages_agree_to_the_bit() -> None:
    rng = np.random.default_rng(6)
    both, step = [StepRuns(native) for native in (True, False)], 0
    for _ in range(300):
        first, growth = rng.uniform(20.0, 40.0), rng.uniform(0.0, 0.1)
        for runs in both:
            runs.begin(step, first, growth)
        step += int(rng.integers(0, 30))  # 0: the next run begins in this one's place
    for _ in range(300):
        begin = int(rng.integers(step))
        end = int(rng.integers(begin + 1, step + 1))
        lived_ms = rng.uniform(0.0, 80.0 * (end - begin))
        fast, slow = (runs.tail_ms(begin, end, lived_ms) for runs in both)
        assert fast == slow
