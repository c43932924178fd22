"""The file that ``mooncake calibrate`` writes: step curves of one machine, as TOML that the simulator reads too.

``[curves.NAME]`` has the keys of the simulator's cluster files; ``[transfer]`` is what copying costs on this machine.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from conductor.placement.cost import DecodeCost, PrefillCost, StartCosts, TransferCost
from mooncake.errors import ConfigError


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds of a step: its fixed part, per token, per pair of tokens; for decode per sequence and context
    token."""

    prefill_step_ms: float = 0.0
    prefill_token_ms: float = 0.0
    prefill_pair_ms: float = 0.0
    prefix_ms: float = 0.0
    decode_step_ms: float = 0.0
    decode_sequence_ms: float = 0.0
    decode_context_ms: float = 0.0
    source: str = ""


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    latency_ms: float = 0.0
    gb_per_s: float = 0.0


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    curves: dict[str, Curve]
    transfer: Transfer = Transfer()


def read_calibration(path: Path) -> StartCosts:
    """The costs a conductor starts from. Raises ConfigError."""
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise ConfigError(f"cannot read the calibration {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a calibration: {error}; mooncake calibrate writes one") from None
    if not found.curves:
        raise ConfigError(f"{path} has no curve; mooncake calibrate writes one")
    curve = next(iter(found.curves.values()))
    prefill = (curve.prefill_step_ms, curve.prefill_token_ms, curve.prefill_pair_ms)
    decode = (curve.decode_step_ms, curve.decode_sequence_ms, curve.decode_context_ms)
    speed = found.transfer.gb_per_s
    return StartCosts(
        PrefillCost(*prefill, is_known=any(prefill)),
        DecodeCost(*decode, is_known=any(decode)),
        TransferCost(found.transfer.latency_ms, 1e-6 / speed if speed else 0.0, is_known=speed > 0.0),
    )


def calibration_toml(name: str, start: StartCosts, source: str) -> str:
    """``start`` as text that ``read_calibration`` reads."""
    prefill, decode, transfer = start.prefill, start.decode, start.transfer
    speed = 1e-6 / transfer.byte_ms if transfer.byte_ms else 0.0
    return f"""# Written by mooncake calibrate: {source}
[curves.{name}]
prefill_step_ms = {prefill.step_ms:.6g}
prefill_token_ms = {prefill.token_ms:.6g}
prefill_pair_ms = {prefill.pair_ms:.6g}
decode_step_ms = {decode.step_ms:.6g}
decode_sequence_ms = {decode.sequence_ms:.6g}
decode_context_ms = {decode.context_ms:.6g}
source = "{source}"

[transfer]
latency_ms = {transfer.latency_ms:.6g}
gb_per_s = {speed:.6g}
"""
