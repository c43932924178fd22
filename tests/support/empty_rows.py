"""What groups of layers waste where numbers of rows do not divide."""

from __future__ import annotations

from mooncake.page_groups import PageGroups


def num_empty_rows(groups: PageGroups) -> int:
    """In all pages of one block."""
    if not groups.places:
        return 0
    return groups.num_groups * groups.num_rows - sum(groups.rows or [1] * len(groups.places))
