"""Each tenant's share of a store's DRAM: its bytes, its quota, and its readable blocks in order of use.

Pure, and without a clock. It knows neither slots nor which of a tenant's blocks may be dropped.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from kvstore.index.slots import Slot
from mooncake.types import BlockKey


class Tenants:
    """``tenant_bytes`` limits what one tenant may store (0: no limit)."""

    def __init__(self, tenant_bytes: int) -> None:
        self.tenant_bytes = tenant_bytes
        self._usage: Counter[str] = Counter()  # bytes of each tenant, readable or being written
        self._blocks: dict[str, OrderedDict[BlockKey, None]] = {}  # readable blocks, least recently used first

    @property
    def usage(self) -> dict[str, int]:
        return dict(+self._usage)

    def fits(self, tenant: str, nbytes: int) -> bool:
        """Whether this many more bytes fit its quota."""
        return not self.tenant_bytes or self._usage[tenant] + nbytes <= self.tenant_bytes

    def charge(self, tenant: str, nbytes: int) -> None:
        self._usage[tenant] += nbytes

    def credit(self, tenant: str, nbytes: int) -> None:
        self._usage[tenant] -= nbytes
        if not self._usage[tenant]:
            del self._usage[tenant]

    def add(self, tenant: str, key: BlockKey) -> None:
        """A block became readable."""
        self._blocks.setdefault(tenant, OrderedDict())[key] = None

    def use(self, tenant: str, key: BlockKey) -> None:
        self._blocks[tenant].move_to_end(key)

    def remove(self, tenant: str, key: BlockKey) -> None:
        """A block is no longer readable."""
        del self._blocks[tenant][key]
        if not self._blocks[tenant]:
            del self._blocks[tenant]

    def blocks_of(self, tenant: str) -> list[BlockKey]:
        """Its readable blocks, least recently used first."""
        return list(self._blocks.get(tenant, ()))

    def blocks(self) -> Iterator[BlockKey]:
        """Readable blocks of all tenants, tenant by tenant, least recently used first."""
        for keys in self._blocks.values():
            yield from keys

    def check(self, present: Iterable[Slot], readable: Iterable[Slot]) -> None:
        """Raises AssertionError when the accounts do not match these slots."""
        usage: Counter[str] = Counter()
        for slot in present:
            usage[slot.tenant] += slot.length
        assert +self._usage == +usage
        listed = {(tenant, key) for tenant, keys in self._blocks.items() for key in keys}
        assert listed == {(slot.tenant, slot.name.key) for slot in readable}
