"""GGUF models in several files, as ``llama-gguf-split`` and converters write them: NAME-00001-of-00003.gguf and so on.

The first part has all metadata; each has some of the tensors, with their bytes. Any part opens the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from mooncake.errors import ModelError
from mooncake.gguf.file import GGUF, GGUFFile, TensorInfo, Value

_NUMBER, _COUNT, _NUM_TENSORS = "split.no", "split.count", "split.tensors.count"
_NAME = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def open_gguf(path: Path) -> GGUF:
    """The model of which this file is all or a part. Raises ModelError, in one sentence that names the file which is
    missing, broken, or no part of this model."""
    file = GGUFFile(path)
    count = _integer(file, _COUNT)
    return file if count is None or count < 2 else SplitGGUF(file, count)


def name_of(path: Path) -> str:
    """The name of the model in this file, which all its parts share."""
    match = _NAME.fullmatch(path.name)
    return match["name"] if match else path.stem


class SplitGGUF:
    """All parts of a model, open. ``path`` is the first one's."""

    def __init__(self, given: GGUFFile, count: int) -> None:
        """``given`` is any of the ``count`` parts. Raises ModelError."""
        self._parts = tuple(_open_parts(given, count))
        self.path = self._parts[0].path
        self._where = _where(self._parts)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: part.tensors[name] for name, part in self._where.items()}
        )

    @property
    def files(self) -> tuple[GGUFFile, ...]:
        return self._parts

    def get(self, key: str) -> Value | None:
        return self._parts[0].get(key)

    def tensor_bytes(self, tensor: TensorInfo) -> memoryview:
        return self._where[tensor.name].tensor_bytes(tensor)


def _open_parts(given: GGUFFile, count: int) -> Iterator[GGUFFile]:
    match = _NAME.fullmatch(given.path.name)
    if match is None or int(match["count"]) != count:
        raise ModelError(
            f"{given.path} is one of {count} parts of a model, and is not named like one: the others are found by "
            f"names like {'NAME' if match is None else match['name']}-00001-of-{count:05d}.gguf"
        )
    for number in range(1, count + 1):
        path = given.path.with_name(f"{match['name']}-{number:05d}-of-{count:05d}.gguf")
        if not path.exists():
            raise ModelError(f"{path} is missing: {given.path.name} is one of {count} parts of a model")
        part = given if path == given.path else GGUFFile(path)
        _check(part, number, given, count)
        yield part


def _check(part: GGUFFile, number: int, given: GGUFFile, count: int) -> None:
    """Raises ModelError if ``part`` does not say that it is this one of the parts of ``given``'s model."""
    if (own_count := _integer(part, _COUNT)) != count:
        what = "no part of a model" if not own_count else f"a part of a model in {own_count} parts"
        raise ModelError(f"{part.path} is {what}, and {given.path.name} of one in {count}")
    own = _integer(part, _NUMBER)
    if own != number - 1:
        what = "does not say which part it is" if own is None else f"holds part {own + 1}"
        raise ModelError(f"{part.path} {what}, and is named as part {number} of {count}")
    if _integer(part, _NUM_TENSORS) != _integer(given, _NUM_TENSORS):
        raise ModelError(
            f"{part.path} is a part of another model than {given.path.name}: they differ in {_NUM_TENSORS}"
        )


def _where(parts: tuple[GGUFFile, ...]) -> dict[str, GGUFFile]:
    """The part that holds each tensor."""
    where: dict[str, GGUFFile] = {}
    for part in parts:
        for name in part.tensors:
            if name in where:
                what = f"{part.path} holds {name}, as {where[name].path.name} does"
                raise ModelError(f"{what}: they are not parts of the same model")
            where[name] = part
    expected = _integer(parts[0], _NUM_TENSORS)
    if expected is not None and len(where) != expected:
        raise ModelError(
            f"{parts[0].path} says that the model has {expected} tensors, and its {len(parts)} parts hold "
            f"{len(where)}: one of them is a part of another model"
        )
    return where


def _integer(file: GGUFFile, key: str) -> int | None:
    """Raises ModelError for a value of another type."""
    value = file.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ModelError(f"{file.path}: {key} must be one integer")
    return value
