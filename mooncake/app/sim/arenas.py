"""Huge pages for Python objects: millions of small objects are visited in random order, and with small pages most
accesses miss the TLB: 2 to 4 % of the processor time (``tests/bench/results/simulate-huge-pages-2core-amx.json``).
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from mooncake.native import BuildFailed, load_module

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("arenas.cpp")


@functools.cache
def use_huge_pages() -> None:
    """Allocate Python's objects from huge pages from now on, as far as the system has them. Only for processes that
    simulate: freed memory goes back to Python, not to the system."""
    try:
        load_module("arenas", SOURCE).use_huge_pages()
    except BuildFailed as error:
        log.warning("simulating without huge pages, more slowly: %s", error)
