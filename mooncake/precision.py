"""Which number formats a model's weights, activations and KV have, from what was asked for and what the processor has.

Decided once, before anything is loaded, and the same everywhere: it must not import torch, and numpy only for who has
factors for keys, because every command reads the configuration.
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
WEIGHTS = ("auto", "plain", "stored", "int8", "w8a8")

Coding = Literal["", "int8", "w8a8"]
"""Of a linear layer: as its weights are; int8 weights; int8 weights and activations."""

_CODINGS: dict[str, Coding] = {"auto": "", "plain": "", "stored": "", "int8": "int8", "w8a8": "w8a8"}
_BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True, slots=True)
class Precision:
    dtype: str  # "float32" | "bfloat16": of the weights
    kv_dtype: str  # "float32" | "bfloat16" | "int8": of the paged cache
    coding: Coding  # "": weights as ``dtype`` says; "int8": int8 weights; "w8a8": int8 weights and activations
    key_scales: KeyScales | None = None  # for the channels of keys, before they are coded
    codes: Coding = ""  # how int8 codes that the checkpoint has itself are used; "": as the values they stand for
    keeps_groups: bool = False  # codes in groups that the checkpoint has itself stay codes until they are multiplied

    @property
    def weights(self) -> str:
        """For who reads a log."""
        others = self.coding or self.dtype
        return f"{self.codes} as stored, others {others}" if self.codes else others

    def identity(self, weights_digest: str) -> str:
        """What tells KV of this precision from KV of the same weights in another; for the cache's fingerprint."""
        of_keys = f"keys-{self.key_scales.digest}" if self.key_scales else ""
        own = f"own-{self.codes}" if self.codes else ""
        return "+".join([weights_digest, *filter(None, (self.coding, own, of_keys))])


def resolve_precision(
    dtype: str,
    kv_dtype: str = "auto",
    weights: str = "auto",
    devices: Collection[str] = ("cpu",),
    key_scales: str = "",
    stored: Coding = "",
) -> Precision:
    """``dtype`` "auto": bfloat16 where all ``devices`` multiply it natively, else float32. ``kv_dtype`` "auto": as
    ``dtype``. ``weights`` "plain": as ``dtype``; "auto": so too, but int8 codes that the checkpoint has itself are
    taken as they are, for the products they were made for (``stored``: ``Checkpoint.coding``), where all devices can;
    "stored": and codes in groups stay codes in memory, which changes no result; "auto" does that for float32 on CPUs.
    ``key_scales``: a file of ``mooncake key-scales``, for int8 pages. Raises ConfigError for anything unknown, and for
    what one of the devices has no kernels for."""
    for name, value, known in (
        ("dtype", dtype, DTYPES),
        ("kv_dtype", kv_dtype, KV_DTYPES),
        ("weights", weights, WEIGHTS),
    ):
        if value not in known:
            raise ConfigError(f"model.{name} must be one of {', '.join(known)}, got {value!r}")
    on_cpus, scales = all(device == "cpu" for device in devices), None
    if weights == "int8" and not on_cpus:
        raise ConfigError('model.weights="int8" is for CPUs; on a GPU, model.weights="w8a8" has its kernels')
    if weights == "stored" and not on_cpus:
        raise ConfigError('model.weights="stored" is for CPUs; GPUs have values: model.weights="auto"')
    if dtype == "auto":
        has_it = "cpu" not in devices or has_native_bf16()  # all GPUs that we compile for have
        dtype = "bfloat16" if has_it else "float32"
    if key_scales and kv_dtype != "int8":
        raise ConfigError(f"model.key_scales is for model.kv_dtype=int8, not for {kv_dtype}")
    if key_scales:
        from mooncake.key_scales import load_key_scales

        scales = load_key_scales(key_scales)
    return Precision(
        dtype,
        dtype if kv_dtype == "auto" else kv_dtype,
        _CODINGS[weights],
        scales,
        _own_codes(weights, stored, on_cpus),
        keeps_groups=weights == "stored" or (weights == "auto" and dtype == "float32" and on_cpus),
    )


def _own_codes(weights: str, stored: Coding, on_cpus: bool) -> Coding:
    """Codes made to meet coded activations may meet plain ones; the reverse nobody has tried out for the checkpoint."""
    if weights in ("auto", "stored"):
        return stored if stored == "w8a8" or on_cpus else ""
    if weights == "w8a8":
        return "w8a8" if stored == "w8a8" else ""
    return "int8" if weights == "int8" and stored else ""


def check_device(name: str, device: str) -> None:
    """Raises ConfigError for one that cannot be, by the name of the setting; whether it is here shows later."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f'{name} must be "cpu", "cuda" or "cuda:N", got {device!r}')


def has_native_bf16() -> bool:
    """Of this machine's processor."""
    return not _BF16_FEATURES.isdisjoint(cpu_features())


@functools.cache
def cpu_features() -> frozenset[str]:
    """Names of instruction-set extensions as Linux prints them; empty where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith(("flags", "Features"))), "").split()[2:])
