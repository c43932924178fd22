"""The conductor starts from a calibration file; an invalid file is an error of one sentence."""

from pathlib import Path

import pytest

from conductor.placement.calibration import calibration_toml, read_calibration
from conductor.placement.cost import CostModel, DecodeCost, PrefillCost, StartCosts, TransferCost
from mooncake.errors import ConfigError

START = StartCosts(
    PrefillCost(4.0, 0.5, 2e-4, is_known=True),
    DecodeCost(20.0, 0.3, 5e-4, is_known=True),
    TransferCost(0.4, 1e-6, is_known=True),
)


def test_a_written_calibration_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "curve.toml"
    file.write_text(calibration_toml("here", START, "a test"))
    found = read_calibration(file)
    assert found == START
    costs = CostModel(found)
    assert costs.prefill("p0").ms(1000, 0) == pytest.approx(START.prefill.ms(1000, 0), rel=0.01)


@pytest.mark.parametrize("text", ["", "curves = 3", "[curves.a]\nspeed = 1", "nonsense ="])
def test_another_file_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "curve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="mooncake calibrate writes one"):
        read_calibration(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_calibration(tmp_path / "none.toml")
