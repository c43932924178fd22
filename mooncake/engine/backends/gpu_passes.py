"""A step over several GPUs whose hook wants layers: what the first rank tells the others before each layer.

They hear whether the step goes on, what to copy out of the layers before, and after which copies in to go on. Only the
first rank has the engine's hook; it may abandon the step. This module does not know what a layer computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from mooncake.engine.cache.rank_mirror import RankCopies, RanksMirror
from mooncake.model.batch import LayerHook
from mooncake.model.parallel.ranks import StepAbandoned

_GO_ON, _ABANDON, _COPY_OUT = range(3)


class Messages(Protocol):
    """As a ``ranks.Group`` sends them, from the first rank to all others, in order."""

    def send(self, kind: int, *arrays: npt.NDArray[np.int64]) -> None: ...

    def receive(self) -> tuple[int, list[torch.Tensor]]: ...


class FirstPass:
    """The first rank's hook in a step by layers. Copies that the engine's hook asks for are told to the others at the
    next layer: they have then computed the one before, too."""

    wants_layers = True

    def __init__(self, group: Messages, hook: LayerHook, mirror: RanksMirror | None) -> None:
        self._group, self._hook, self._mirror = group, hook, mirror
        self.error: Exception | None = None  # of the hook

    def before_layer(self, layer: int) -> None:
        self._call(self._hook.before_layer, layer)
        self._tell()

    def after_layer(self, layer: int) -> None:
        self._call(self._hook.after_layer, layer)

    def end(self) -> None:
        """After the last layer."""
        self._tell()

    def _call(self, of_hook: Callable[[int], None], layer: int) -> None:
        """An error is kept for the next place where the others can be told."""
        if self.error is None:
            try:
                of_hook(layer)
            except Exception as error:
                self.error = error

    def _tell(self) -> None:
        """Raises StepAbandoned after an error of the hook."""
        to_order, copies = (0, []) if self._mirror is None else self._mirror.take()
        for request in copies:
            self._group.send(_COPY_OUT, request)
        self._group.send(_GO_ON if self.error is None else _ABANDON, np.array([to_order], np.int64))
        if self.error is not None:
            raise StepAbandoned


class OtherPass:
    """Another rank's: it does as the first one says before each layer."""

    wants_layers = True

    def __init__(self, group: Messages, copies: RankCopies | None) -> None:
        self._group, self._copies = group, copies

    def before_layer(self, layer: int) -> None:
        self.hear()

    def after_layer(self, layer: int) -> None:
        pass

    def hear(self) -> None:
        """Also after the last layer. Raises StepAbandoned."""
        kind, [told] = self._group.receive()
        while kind == _COPY_OUT:
            assert self._copies is not None, "the first rank has a mirror"
            self._copies.start(told.numpy())
            kind, [told] = self._group.receive()
        if kind == _ABANDON:
            raise StepAbandoned
        if self._copies is not None:
            self._copies.order(int(told))
