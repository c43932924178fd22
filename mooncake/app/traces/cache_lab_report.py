"""The results of the cache lab as a Markdown page, each number beside the published one for the same trace.

Ours are compared with two analyses of the open Mooncake traces: the counts published with the traces (a prompt's blocks
are touched from the first on, and blocks may stay after their parents are evicted), and one that touches them from the
last on. It must not know how a policy works.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mooncake.app.traces.cache_lab import LAB_POLICIES, Rates, Rules

CLOSE = 0.005  # allowed difference under the same definition
_CONVERSATION, _SYNTHETIC = "conversation_trace", "synthetic_trace"
_COUNTED = (1_000, 10_000, 30_000, 50_000, 100_000)
_ANALYSED = (1_000, 3_000, 10_000, 30_000, 50_000)

PUBLISHED: dict[tuple[str, Rules], tuple[tuple[int, ...], dict[str, tuple[float, ...]]]] = {
    (_CONVERSATION, Rules.HEAD_FIRST): (
        _COUNTED,
        {
            "lru": (0.0445, 0.2112, 0.3257, 0.3546, 0.3637),
            "lfu": (0.0481, 0.1318, 0.2759, 0.3438, 0.3631),
            "length-aware": (0.0417, 0.0524, 0.1158, 0.1486, 0.2486),
        },
    ),
    (_SYNTHETIC, Rules.HEAD_FIRST): (
        _COUNTED,
        {
            "lru": (0.0825, 0.4235, 0.6242, 0.6396, 0.6396),
            "lfu": (0.0401, 0.3578, 0.6260, 0.6396, 0.6396),
            "length-aware": (0.0000, 0.0206, 0.2983, 0.6396, 0.6396),
        },
    ),
    (_CONVERSATION, Rules.TAIL_FIRST): (
        _ANALYSED,
        {
            "lru": (0.0445, 0.0653, 0.2116, 0.3257, 0.3546),
            "fifo": (0.0445, 0.0637, 0.1820, 0.2950, 0.3336),
            "lfu": (0.0481, 0.0750, 0.1322, 0.2761, 0.3438),
            "length-aware": (0.0504, 0.0669, 0.1123, 0.2028, 0.2602),
            "gdsf-flat": (0.0447, 0.0708, 0.2174, 0.3284, 0.3548),
            "s3-fifo": (0.0556, 0.0881, 0.1993, 0.2857, 0.3435),
            "arc": (0.0529, 0.0871, 0.2251, 0.3111, 0.3437),
            "workload-aware": (0.0580, 0.1196, 0.2297, 0.3364),
            "belady": (0.1804, 0.2910, 0.3664, 0.3664, 0.3664),
        },
    ),
    (_SYNTHETIC, Rules.TAIL_FIRST): (
        _ANALYSED,
        {
            "lru": (0.0841, 0.1906, 0.4239, 0.6242),
            "fifo": (0.0818, 0.1861, 0.4024, 0.5941),
            "lfu": (0.0416, 0.1294, 0.3608, 0.6260),
            "length-aware": (0.0192, 0.0489, 0.1866, 0.5068),
            "gdsf-flat": (0.0874, 0.1936, 0.4281, 0.6260),
            "s3-fifo": (0.0878, 0.1933, 0.4291, 0.6260),
            "arc": (0.0963, 0.1994, 0.4360, 0.6260),
            "workload-aware": (0.0638, 0.1942, 0.4349, 0.6231),
            "belady": (0.2641, 0.4424, 0.6158, 0.6396),
        },
    ),
}

DEFINITIONS = {
    "fifo": "storing a block with children again makes it the newest here, because it cannot be evicted before them",
    "length-aware": "of blocks read equally often ours evicts the one furthest from the start of its prompt, as the "
    "paper says; the trace's own counts keep that one",
    "arc": "ghosts are counted after the block that they make room for",
    "workload-aware": "another policy with the same idea (here a Gittins index per class): to be beaten, not matched",
    "belady": "knows the next read of each block and evicts first those never read again; the analysis keeps such "
    "blocks for a while, and is lower",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One result, and the published one if there is one."""

    policy: str
    capacity: int
    rates: Rates
    published: float | None

    def __str__(self) -> str:
        ours = f"{self.rates.block:.4f}"
        if self.published is None:
            return ours
        difference = round(self.rates.block, 4) - self.published
        mark = "" if abs(difference) <= CLOSE else " **≠**"
        return f"{ours} ({difference:+.4f}{mark})" if difference else f"{ours} (=)"


def cells(stem: str, rules: Rules, rates: Mapping[tuple[str, int], Rates]) -> list[Cell]:
    """In the order of policies and capacities."""
    sizes, rows = PUBLISHED.get((stem, rules), ((), {}))
    return [
        Cell(policy, size, rates[policy, size], dict(zip(sizes, rows.get(policy, ()), strict=False)).get(size))
        for policy, size in sorted(rates, key=lambda key: (LAB_POLICIES.index(key[0]), key[1]))
    ]


def markdown(title: str, table: Iterable[Cell]) -> str:
    """One row per policy, one column per capacity; in brackets the difference from the published result."""
    rows: dict[str, dict[int, Cell]] = {}
    for cell in table:
        rows.setdefault(cell.policy, {})[cell.capacity] = cell
    sizes = sorted({size for row in rows.values() for size in row})
    lines = [f"## {title}", "", "| blocks | " + " | ".join(f"{size:,}" for size in sizes) + " |"]
    lines.append("|---" * (len(sizes) + 1) + "|")
    for policy, row in rows.items():
        lines.append(f"| {policy} | " + " | ".join(str(row.get(size, "")) for size in sizes) + " |")
    far = {
        cell.policy
        for row in rows.values()
        for cell in row.values()
        if cell.published is not None and abs(round(cell.rates.block, 4) - cell.published) > CLOSE
    }
    lines += [
        "",
        *(f"- **{policy} ≠**: {DEFINITIONS.get(policy, 'not explained')}." for policy in LAB_POLICIES if policy in far),
    ]
    return "\n".join(lines) + "\n"
