"""Number formats of a model's weights, activations and KV, from what was configured and what the processor supports.

Decided once, before anything is loaded, and the same everywhere. Must not import torch, and imports numpy only if key
scales are configured, because every command reads the configuration.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mooncake.errors import ConfigError

if TYPE_CHECKING:
    from mooncake.key_scales import KeyScales

DTYPES = ("auto", "float32", "bfloat16")
KV_FORMATS = ("float32", "bfloat16", "int8")
KV_DTYPES = ("auto", *KV_FORMATS)
WEIGHTS = ("auto", "plain", "stored", "stored_a8", "int8", "w8a8")

Coding = Literal["", "int8", "w8a8"]
"""How a linear layer is computed: "": as its weights; "int8": int8 weights; "w8a8": int8 weights and activations."""

KeptGroups = Literal["", "exact", "a8"]
"""How codes in groups stored in the checkpoint are used: "": dequantised; "exact": multiplied as the values they stand
for; "a8": multiplied as codes, with int8 activations."""

_CODINGS: dict[str, Coding] = {"int8": "int8", "w8a8": "w8a8"}
_BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a model's weights are held and multiplied. Plain data, which other processes that compute get as JSON."""

    dtype: str  # "float32" | "bfloat16": of values
    coding: Coding = ""  # of weights that the checkpoint has as values; "": as ``dtype`` says
    codes: Coding = ""  # how int8 codes stored in the checkpoint are used; "": dequantised
    keeps_groups: KeptGroups = ""

    def __str__(self) -> str:
        others = self.coding or self.dtype
        return f"{self.codes} as stored, others {others}" if self.codes else others

    @property
    def groups(self) -> str:
        """How codes in groups change results; exact ones do not."""
        return "groups-a8" if self.keeps_groups == "a8" else ""


FLOAT32 = WeightFormat("float32")


@dataclass(frozen=True, slots=True)
class Precision:
    weights: WeightFormat
    kv_dtype: str  # "float32" | "bfloat16" | "int8": of the paged cache
    key_scales: KeyScales | None = None  # for key channels, applied before quantising

    def identity(self, weights_digest: str) -> str:
        """Distinguishes KV of this precision from that of the same weights in another; part of the cache's
        fingerprint."""
        of_keys = f"keys-{self.key_scales.digest}" if self.key_scales else ""
        own = f"own-{self.weights.codes}" if self.weights.codes else ""
        parts = (self.weights.coding, own, self.weights.groups, of_keys)
        return "+".join([weights_digest, *filter(None, parts)])


def resolve_precision(
    dtype: str,
    kv_dtype: str = "auto",
    weights: str = "auto",
    devices: Collection[str] = ("cpu",),
    key_scales: str = "",
    stored: Coding = "",
) -> Precision:
    """``dtype`` "auto": bfloat16 if all ``devices`` multiply it natively, else float32. ``kv_dtype`` "auto": same as
    ``dtype``. ``weights`` "plain": as ``dtype``. "auto": the same, but int8 codes stored in the checkpoint are used in
    the products they were made for (``stored``: ``Checkpoint.coding``) if all devices can, and for float32 on CPUs
    codes in groups stay codes in memory, which does not change results. "stored": like "auto", but keeps codes in
    groups for any ``dtype``; "stored_a8": multiplies them with int8 activations. ``key_scales``: a file of ``mooncake
    key-scales``, for int8 pages. Raises ConfigError for unknown values, and if a device lacks the kernels."""
    for name, value, known in (
        ("dtype", dtype, DTYPES),
        ("kv_dtype", kv_dtype, KV_DTYPES),
        ("weights", weights, WEIGHTS),
    ):
        if value not in known:
            raise ConfigError(f"model.{name} must be one of {', '.join(known)}, got {value!r}")
    on_cpus, scales = all(device == "cpu" for device in devices), None
    if weights.startswith("stored") and not on_cpus:
        raise ConfigError(f'model.weights="{weights}" is for CPUs; GPUs have values: model.weights="auto"')
    if dtype == "auto":
        has_it = "cpu" not in devices or has_native_bf16()  # all GPUs that we compile for have
        dtype = "bfloat16" if has_it else "float32"
    if key_scales and kv_dtype != "int8":
        raise ConfigError(f"model.key_scales is for model.kv_dtype=int8, not for {kv_dtype}")
    if key_scales:
        from mooncake.key_scales import load_key_scales

        scales = load_key_scales(key_scales)
    own, kept = _own_codes(weights, stored, on_cpus), _kept_groups(weights, dtype, on_cpus)
    held = WeightFormat(dtype, _CODINGS.get(weights, ""), own, kept)
    return Precision(held, dtype if kv_dtype == "auto" else kv_dtype, scales)


def _kept_groups(weights: str, dtype: str, on_cpus: bool) -> KeptGroups:
    if weights == "stored_a8":
        return "a8"
    return "exact" if weights == "stored" or (weights == "auto" and dtype == "float32" and on_cpus) else ""


def _own_codes(weights: str, stored: Coding, on_cpus: bool) -> Coding:
    """Codes made for quantised activations also work with plain ones; the reverse has not been tested for the
    checkpoint."""
    if weights in ("auto", "stored", "stored_a8"):
        return stored if stored == "w8a8" or on_cpus else ""
    if weights == "w8a8":
        return "w8a8" if stored == "w8a8" else ""
    return "int8" if weights == "int8" and stored else ""


def check_device(name: str, device: str) -> None:
    """Raises ConfigError for an impossible device, naming the setting; whether it exists is checked later."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f'{name} must be "cpu", "cuda" or "cuda:N", got {device!r}')


def has_native_bf16() -> bool:
    """Whether this machine's processor multiplies bfloat16."""
    return not _BF16_FEATURES.isdisjoint(cpu_features())


@functools.cache
def cpu_features() -> frozenset[str]:
    """Names of instruction-set extensions as Linux prints them; empty where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith(("flags", "Features"))), "").split()[2:])
