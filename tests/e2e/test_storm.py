"""Many faults at once under load: nodes are killed, paused, cut off and fed rotten bytes, and no answer is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from storm import play

SEED = 1  # of the storm that is played here; `python tests/support/storm.py --seed 2 --count 10` plays others


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(400)
async def test_after_a_storm_every_answer_was_right_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    report = await play(SEED, seconds=40, folder=tmp_path)
    assert not report.wrong, str(report)
    assert report.outcomes["answered"] > 100, str(report)
