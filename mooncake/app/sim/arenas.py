"""Memory for millions of small objects that are visited in no order: in small pages the processor looks most of them up
in its page tables first. It knows nothing of what they are.
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
    """Python's objects that are made from now on lie in huge pages, as far as the system has them. For a process that
    only simulates: what it frees goes back to Python and not to the system."""
    try:
        load_module("arenas", SOURCE).use_huge_pages()
    except BuildFailed as error:
        log.warning("simulating in small pages, more slowly: %s", error)
