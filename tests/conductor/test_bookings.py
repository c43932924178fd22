"""Bookings on a node, load that it reports beyond them, and that nothing is left over."""

from __future__ import annotations

import pytest

from conductor.placement.bookings import Booking, NodeBookings
from conductor.registry import NodeLoad


def booking(tokens: int = 100, ms: float = 50.0, **more: float) -> Booking:
    return Booking("p0", "d0", tokens, ms, context_tokens=2 * tokens, **more)


def test_prompts_are_computed_in_order() -> None:
    booked, first, second = NodeBookings(), booking(ms=50.0), booking(ms=30.0)
    booked.add_prefill(first, now=1.0)
    booked.add_prefill(second, now=2.0)
    assert (booked.prefill_tokens, booked.prefill_ms, booked.busy_since) == (200, 80.0, 1.0)
    booked.remove_prefill(first, now=3.0)
    assert (booked.prefill_ms, booked.busy_since) == (30.0, 3.0), "the second one begins"


def test_a_cancelled_prompt_in_the_queue_does_not_restart_the_first_one() -> None:
    booked, first, second = NodeBookings(), booking(), booking()
    booked.add_prefill(first, now=1.0)
    booked.add_prefill(second, now=2.0)
    booked.remove_prefill(second, now=3.0)
    assert booked.busy_since == 1.0
    booked.remove_prefill(first, now=4.0)
    assert booked.is_empty


def test_sums_return_to_exactly_zero_despite_rounding() -> None:
    booked, bookings = NodeBookings(), [booking(ms=0.1) for _ in range(10)]
    for one in bookings:
        booked.add_prefill(one, now=0.0)
        booked.add_read(one, now=0.0, ssd_byte_ms=0.0)
    for one in bookings:
        booked.remove_prefill(one, now=0.0)
        booked.remove_read()
    assert (booked.prefill_ms, booked.sending_flows) == (0.0, 0)
    assert booked.is_empty


def test_load_reported_beyond_the_bookings_is_unbooked() -> None:
    booked = NodeBookings()
    booked.add_prefill(booking(tokens=100), now=0.0)
    booked.add_decode(booking(tokens=100))
    assert booked.reported(NodeLoad(running=3, waiting_tokens=170, context_tokens=500))
    assert (booked.unbooked_tokens, booked.unbooked_decodes, booked.unbooked_context) == (70, 2, 300)
    assert booked.reported(NodeLoad()), "it has not heard of ours yet"
    assert (booked.unbooked_tokens, booked.unbooked_decodes, booked.unbooked_context) == (0, 0, 0)


def test_an_unchanged_heartbeat_reports_no_change() -> None:
    booked = NodeBookings(viewed_blocks=(10, 10))
    load = NodeLoad(running=1, blocks_total=10, blocks_free=8, blocks_cached=2)
    assert booked.reported(load)
    assert not booked.reported(load)
    booked.add_decode(booking(blocks=4))
    assert booked.reported(load), "one of its own sequences is ours, and the blocks promised since are in its numbers"
    assert (booked.unbooked_decodes, booked.unreported_blocks) == (0, 0)


def test_block_counts_of_a_node_outside_the_decode_view_are_no_change() -> None:
    booked = NodeBookings()
    booked.add_prefill(booking(tokens=100), now=0.0)
    assert not booked.reported(NodeLoad(waiting_tokens=100, blocks_total=10, blocks_free=3))
    assert not booked.reported(NodeLoad(waiting_tokens=60, blocks_total=10, blocks_free=5))


def test_reads_of_an_ssd_take_turns_and_those_of_dram_do_not() -> None:
    booked = NodeBookings()
    booked.add_read(booking(), now=1.0, ssd_byte_ms=1e-6)
    assert (booked.sending_flows, booked.ssd_ready_at_ms) == (1, 0.0)
    for ready_at_ms in (1003.0, 1006.0):
        booked.add_read(booking(ssd_bytes=3e6), now=1.0, ssd_byte_ms=1e-6)
        assert booked.ssd_ready_at_ms == pytest.approx(ready_at_ms)
    booked.add_read(booking(ssd_bytes=3e6), now=2.0, ssd_byte_ms=1e-6)
    assert booked.ssd_ready_at_ms == pytest.approx(2003.0), "what was promised has been read by then"


def test_a_node_that_is_gone_keeps_open_bookings_but_no_reported_load() -> None:
    booked, open_one = NodeBookings(), booking(blocks=4)
    booked.add_decode(open_one)
    booked.reported(NodeLoad(running=5, waiting_tokens=10))
    booked.forget_reported()
    assert (booked.decodes, booked.unbooked_decodes, booked.unbooked_tokens, booked.unreported_blocks) == (1, 0, 0, 0)
    assert not booked.is_empty
    booked.remove_decode(open_one)
    assert booked.is_empty
