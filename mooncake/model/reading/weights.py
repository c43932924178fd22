"""Weights of a checkpoint as torch tensors with Hugging Face names, from any file format.

GGUF weights are dequantised once and stored as safetensors in the user's cache, so that all processes of a machine map
the same pages. The cache is optional: without space or permission, weights are dequantised on access. Its files have
checksums, because nothing else would notice zeros or a flipped bit there.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from mooncake.checkpoint import Checkpoint, GGUFCheckpoint, HFCheckpoint, weight_shapes
from mooncake.durable import rename_whole
from mooncake.errors import ModelError
from mooncake.families.llama import REARRANGED
from mooncake.families.registry import published_name
from mooncake.gguf.config import keeps_groups as of_kept_groups
from mooncake.kernels.grouped import GroupedCodes
from mooncake.kernels.reference import Codes
from mooncake.model.layers import Weights, WeightsOnDemand
from mooncake.model.reading.as_llama import as_llama
from mooncake.model.reading.dequantise import as_codes, as_groups, dequantised, experts_as_groups
from mooncake.model.reading.gguf_weights import KEPT_WIDE, gguf_weights
from mooncake.precision import Coding, KeptGroups
from mooncake.quantised import zero_biases

log = logging.getLogger(__name__)

MAX_CACHED_BYTES = 8 << 30  # for all models; the least recently used one is removed first
_STALE_PART_S = 3600  # after this long a partial file is abandoned
_CHECKSUM = "xxh3-64"  # in the metadata of a cached file: of the bytes of all weights, in the order of their names


def load_weights(checkpoint: Checkpoint, dtype: str, codes: Coding = "", keeps_groups: KeptGroups = "") -> Weights:
    """Every weight that the model needs, as ``torch.dtype`` ``dtype`` ("float32", "bfloat16", "float16"), on the CPU.

    With ``codes`` and ``keeps_groups`` (as in ``Precision``) the weights also give the codes stored in the checkpoint.

    Tensors are read-only mapped memory or, if they must be converted, created on access: do not write to them, and do
    not keep them longer than needed. Raises ModelError, in some cases only on access.
    """
    weights = _stored_weights(checkpoint, getattr(torch, dtype), codes, bool(keeps_groups))
    if keeps_groups == "a8" and isinstance(weights, WeightsOnDemand):
        weights = _meeting_codes(weights)
    return as_llama(weights, checkpoint.config) if checkpoint.config.architecture in REARRANGED else weights


def _meeting_codes(weights: WeightsOnDemand) -> WeightsOnDemand:
    """With all codes in groups as those that meet codes."""

    def codes(name: str) -> Codes | GroupedCodes | None:
        found = weights.codes(name)
        return found.meeting_codes() if isinstance(found, GroupedCodes) else found

    def experts(name: str) -> list[GroupedCodes] | None:
        found = weights.experts(name)
        return None if found is None else [each.meeting_codes() for each in found]

    return WeightsOnDemand(weights, weights.__getitem__, codes, experts, weights.as_stored)


def _stored_weights(checkpoint: Checkpoint, wanted: torch.dtype, codes: Coding, keeps_groups: bool) -> Weights:
    if isinstance(checkpoint, GGUFCheckpoint):
        if keeps_groups and of_kept_groups(checkpoint.file):
            return gguf_weights(checkpoint.file, checkpoint.config, weight_shapes(checkpoint.config), wanted)
        return _cached_gguf_weights(checkpoint, wanted)
    if isinstance(checkpoint, HFCheckpoint):
        return _safetensors_weights(checkpoint, wanted, codes, keeps_groups)
    raise ModelError(f"there are no weights to load for {checkpoint.name}")


def _safetensors_weights(checkpoint: HFCheckpoint, dtype: torch.dtype, codes: Coding, keeps_groups: bool) -> Weights:
    needed = weight_shapes(checkpoint.config)
    coded = {published_name(checkpoint.config.architecture, name): each for name, each in checkpoint.coded.items()}
    stored = _stored_tensors(checkpoint, needed)

    def make(name: str) -> torch.Tensor:
        if name in coded:
            return dequantised(coded[name], stored, dtype)
        return stored[name].to(torch.float32 if name.endswith(KEPT_WIDE) else dtype)

    def own_codes(name: str) -> Codes | GroupedCodes | None:
        weight = coded.get(name)
        if weight is None:
            return None
        if codes and weight.coding and (codes != "w8a8" or weight.coding == "w8a8"):
            return as_codes(weight, stored, codes, dtype)
        return as_groups(weight, stored, dtype) if keeps_groups else None

    def experts(name: str) -> list[GroupedCodes] | None:
        weight = coded.get(name)
        return experts_as_groups(weight, stored, dtype) if keeps_groups and weight is not None else None

    return WeightsOnDemand(needed, make, own_codes, experts, lambda name: None if name in coded else stored[name])


def _stored_tensors(checkpoint: HFCheckpoint, needed: Collection[str]) -> dict[str, torch.Tensor]:
    """By full name; parts of coded weights by their names in the files. Raises ModelError."""
    parts = {part for weight in checkpoint.coded.values() for part in weight.parts}
    spare = zero_biases(checkpoint.coded)
    stored: dict[str, torch.Tensor] = {}
    for shard in checkpoint.shards:
        for stored_name, tensor in _mapped(shard.path).items():
            name = published_name(checkpoint.config.architecture, stored_name)
            if stored_name in parts:
                stored[stored_name] = tensor
            elif name in needed:
                if not tensor.is_floating_point():
                    raise ModelError(f"{shard.path}: {name} is of the type {tensor.dtype}, which is not supported")
                stored[name] = tensor
            elif stored_name in spare and tensor.any():
                raise ModelError(f"{shard.path} has the weight {name}, which its configuration does not need")
    return stored


def _mapped(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights in {path}: {error}") from None


# GGUF


def _cached_gguf_weights(checkpoint: GGUFCheckpoint, dtype: torch.dtype) -> Weights:
    path = _cache_path(checkpoint, dtype)
    if path is not None and path.exists():
        try:
            if (weights := _intact(path, weight_shapes(checkpoint.config))) is not None:
                os.utime(path)
                return weights
        except (ModelError, OSError) as error:
            log.warning("the cached weights %s cannot be used: %s", path, error)
    shapes = weight_shapes(checkpoint.config)
    from_file = WeightsOnDemand(shapes, gguf_weights(checkpoint.file, checkpoint.config, shapes, dtype).__getitem__)
    num_bytes = dtype.itemsize * sum(math.prod(shape) for shape in shapes.values())
    if path is None or num_bytes > MAX_CACHED_BYTES:
        return from_file
    started = time.monotonic()
    dequantised = dict(from_file)
    log.info("dequantised %s in %.1f s", checkpoint.path.name, time.monotonic() - started)
    try:
        _store(dequantised, path, num_bytes)
        return _mapped(path)  # and free the private copy: processes share the mapped one
    except (OSError, SafetensorError, ModelError) as error:
        log.warning("weights are not cached in %s: %s", path.parent, error)
        return from_file


def _intact(path: Path, shapes: dict[str, tuple[int, ...]]) -> Weights | None:
    """The cached weights; None if they are of other shapes, or of a version that wrote no checksum. Raises ModelError,
    also for bytes that have changed."""
    weights = _mapped(path)
    if {name: tuple(tensor.shape) for name, tensor in weights.items()} != shapes:
        return None
    with safe_open(path, "pt") as file:
        expected = (file.metadata() or {}).get(_CHECKSUM)
    if expected is not None and expected != _checksum(weights):
        raise ModelError("their checksum does not match")
    return None if expected is None else weights


def _checksum(weights: Mapping[str, torch.Tensor]) -> str:
    whole = xxhash.xxh3_64()
    for name in sorted(weights):  # as they lie in the file
        whole.update(weights[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return whole.hexdigest()


def _cache_path(checkpoint: GGUFCheckpoint, dtype: torch.dtype) -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(base).expanduser() / "mooncake" / "weights"
    except RuntimeError:  # no home directory
        return None
    return folder / f"{checkpoint.digest}-{str(dtype).removeprefix('torch.')}.safetensors"


def _store(weights: dict[str, torch.Tensor], path: Path, num_bytes: int) -> None:
    """Write to a temporary file and rename it, so that no reader sees a partial one. Raises OSError,
    SafetensorError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _tidy(path.parent, MAX_CACHED_BYTES - num_bytes)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        save_file(weights, part, {_CHECKSUM: _checksum(weights)})
        rename_whole(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _tidy(folder: Path, keep_bytes: int) -> None:
    """Keep the most recently used models, up to ``keep_bytes``, and remove what dead writers left."""
    for file, size, _ in sorted(_files(folder, "*.safetensors"), key=lambda found: found[2], reverse=True):
        keep_bytes -= size
        if keep_bytes < 0:
            file.unlink(missing_ok=True)  # processes that have mapped it keep its pages
    for part, _, written_s in _files(folder, "*.part"):
        if time.time() - written_s > _STALE_PART_S:
            part.unlink(missing_ok=True)


def _files(folder: Path, pattern: str) -> Iterator[tuple[Path, int, float]]:
    """Each with its size and when it was last written; without those that another process has just removed."""
    for file in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            found = file.stat()
            yield file, found.st_size, found.st_mtime
