"""Bookings on a node, load that it reports beyond them, and that nothing is left over."""

from __future__ import annotations

import pytest

from conductor.accounts import Account, Ticket
from conductor.registry import NodeLoad


def ticket(tokens: int = 100, ms: float = 50.0, **more: float) -> Ticket:
    return Ticket("p0", "d0", tokens, ms, context_tokens=2 * tokens, **more)


def test_prompts_are_computed_one_after_the_other() -> None:
    account, first, second = Account(), ticket(ms=50.0), ticket(ms=30.0)
    account.add_prefill(first, now=1.0)
    account.add_prefill(second, now=2.0)
    assert (account.prefill_tokens, account.prefill_ms, account.busy_since) == (200, 80.0, 1.0)
    account.remove_prefill(first, now=3.0)
    assert (account.prefill_ms, account.busy_since) == (30.0, 3.0), "the second one begins"


def test_one_that_gives_up_in_the_queue_does_not_change_when_the_first_began() -> None:
    account, first, second = Account(), ticket(), ticket()
    account.add_prefill(first, now=1.0)
    account.add_prefill(second, now=2.0)
    account.remove_prefill(second, now=3.0)
    assert account.busy_since == 1.0
    account.remove_prefill(first, now=4.0)
    assert account.is_empty


def test_sums_of_milliseconds_end_at_nothing_however_they_were_rounded() -> None:
    account, tickets = Account(), [ticket(ms=0.1, source_bytes=0.1) for _ in range(10)]
    for one in tickets:
        account.add_prefill(one, now=0.0)
        account.add_read(one, now=0.0, ssd_byte_ms=0.0)
    for one in tickets:
        account.remove_prefill(one, now=0.0)
        account.remove_read(one)
    assert (account.prefill_ms, account.sending_bytes) == (0.0, 0.0)
    assert account.is_empty


def test_what_a_node_reports_beyond_what_it_was_given_is_foreign() -> None:
    account = Account()
    account.add_prefill(ticket(tokens=100), now=0.0)
    account.add_decode(ticket(tokens=100))
    assert account.hear(NodeLoad(running=3, waiting_tokens=170, context_tokens=500))
    assert (account.foreign_tokens, account.foreign_decodes, account.foreign_context) == (70, 2, 300)
    assert account.hear(NodeLoad()), "it has not heard of ours yet"
    assert (account.foreign_tokens, account.foreign_decodes, account.foreign_context) == (0, 0, 0)


def test_a_heartbeat_that_says_nothing_new_is_nothing_new() -> None:
    account = Account(blocks=(10, 10))
    load = NodeLoad(running=1, blocks_total=10, blocks_free=8, blocks_cached=2)
    assert account.hear(load)
    assert not account.hear(load)
    account.add_decode(ticket(blocks=4))
    assert account.hear(load), "one of its own sequences is ours, and the blocks promised since are in its numbers"
    assert (account.foreign_decodes, account.unseen_blocks) == (0, 0)


def test_of_a_node_whose_blocks_nobody_looks_at_they_are_no_news() -> None:
    account = Account()
    account.add_prefill(ticket(tokens=100), now=0.0)
    assert not account.hear(NodeLoad(waiting_tokens=100, blocks_total=10, blocks_free=3))
    assert not account.hear(NodeLoad(waiting_tokens=60, blocks_total=10, blocks_free=5))


def test_reads_of_an_ssd_take_turns_and_those_of_dram_do_not() -> None:
    account = Account()
    account.add_read(ticket(source_bytes=5e6), now=1.0, ssd_byte_ms=1e-6)
    assert (account.sending_flows, account.ssd_ready_at_ms) == (1, 0.0)
    for ready_at_ms in (1003.0, 1006.0):
        account.add_read(ticket(source_bytes=5e6, ssd_bytes=3e6), now=1.0, ssd_byte_ms=1e-6)
        assert account.ssd_ready_at_ms == pytest.approx(ready_at_ms)
    account.add_read(ticket(source_bytes=5e6, ssd_bytes=3e6), now=2.0, ssd_byte_ms=1e-6)
    assert account.ssd_ready_at_ms == pytest.approx(2003.0), "what was promised has been read by then"


def test_a_node_that_is_gone_keeps_what_is_open_on_it_and_nothing_of_what_it_said() -> None:
    account, open_one = Account(), ticket(blocks=4)
    account.add_decode(open_one)
    account.hear(NodeLoad(running=5, waiting_tokens=10))
    account.forget_reports()
    assert (account.decodes, account.foreign_decodes, account.foreign_tokens, account.unseen_blocks) == (1, 0, 0, 0)
    assert not account.is_empty
    account.remove_decode(open_one)
    assert account.is_empty
