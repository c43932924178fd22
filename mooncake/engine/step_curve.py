"""How long steps take here, and so how many prompt tokens fit beside decodes without delaying their users.

Pure: measured steps in, a budget out. It knows neither sequences nor clocks.
"""

from __future__ import annotations

DECAY = 0.8  # of earlier measurements, at each new one


class StepCurve:
    """A step's time: that of its decodes, by their number, plus a cost per prompt token."""

    def __init__(self, limit_ms: float, block_tokens: int, most_tokens: int) -> None:
        """``limit_ms`` is the longest a step should take while others wait for their next token."""
        self._limit_ms = limit_ms
        self._block_tokens = block_tokens
        self._most_tokens = most_tokens
        self._decode_ms: dict[int, float] = {}
        self._token_ms = 0.0

    def note(self, num_decodes: int, num_prompt_tokens: int, elapsed_ms: float) -> None:
        if num_prompt_tokens == 0:
            self._decode_ms[num_decodes] = _mixed(self._decode_ms.get(num_decodes), elapsed_ms)
            return
        beside_ms = self._alone_ms(num_decodes)
        token_ms = max(elapsed_ms - beside_ms, 0.0) / num_prompt_tokens
        self._token_ms = _mixed(self._token_ms or None, token_ms)

    def budget(self, num_decodes: int) -> int:
        """Prompt tokens of the next step: whole blocks, at least one; the maximum when nobody waits."""
        if num_decodes == 0 or not self._token_ms:
            return self._most_tokens if num_decodes == 0 else min(self._most_tokens, self._block_tokens)
        left_ms = self._limit_ms - self._alone_ms(num_decodes)
        blocks = int(max(left_ms, 0.0) / self._token_ms) // self._block_tokens
        return min(max(blocks, 1) * self._block_tokens, self._most_tokens)

    def _alone_ms(self, num_decodes: int) -> float:
        """That of the nearest measured number."""
        if not num_decodes or not self._decode_ms:
            return 0.0
        nearest = min(self._decode_ms, key=lambda count: abs(count - num_decodes))
        return self._decode_ms[nearest]


def _mixed(known: float | None, new: float) -> float:
    return new if known is None else DECAY * known + (1 - DECAY) * new
