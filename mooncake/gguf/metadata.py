"""Typed look-ups in the metadata of a GGUF file. Knows neither families nor tensors."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.gguf.file import GGUF


class Metadata:
    """The keys below one architecture's prefix. Look-ups raise ModelError, in a sentence that names file and key, for a
    value of another type, and for a missing one without a default."""

    def __init__(self, file: GGUF, prefix: str) -> None:
        self.file = file
        self.prefix = prefix

    @property
    def source(self) -> str:
        return str(self.file.path)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "must be one integer")
        return value

    def uniform(self, key: str, default: int | None = None) -> int:
        """An integer that may be given once for each layer, as converters of models with layers of several kinds do;
        0 for layers that have no such thing."""
        given = self.get(key)
        if not isinstance(given, list):
            return self.integer(key, default)
        found = {value for value in given if value != 0}
        if len(found) != 1 or type(value := found.pop()) is not int:
            raise self.wrong(key, "must be the same integer for all layers")
        return value

    def of_layers(self, key: str, num_layers: int) -> list[int]:
        """An integer of each layer, given once or for each."""
        given = self.get(key)
        values = given if isinstance(given, list) else [self.integer(key)] * num_layers
        if len(values) != num_layers or not all(type(value) is int and value > 0 for value in values):
            raise self.wrong(key, f"must be a positive integer for each of {num_layers} layers")
        return values

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, "must be one number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0 that a model can be multiplied or divided by."""
        value = self.number(key, default)
        if not 0 < value < 1e6:
            raise self.wrong(key, f"must be a positive number, got {value}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "must be a string")
        return value

    def get(self, key: str) -> object:
        return self.file.get(f"{self.prefix}.{key}")

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def wrong(self, key: str, what: str) -> ModelError:
        return ModelError(f"{self.source}: {self.prefix}.{key} {what}")

    def _get(self, key: str, default: object) -> object:
        stored = self.get(key)
        value = default if stored is None else stored
        if value is None:
            raise ModelError(f"{self.source} lacks the metadata {self.prefix}.{key}")
        return value
