"""Pairs of nodes that do not reach each other: when they are avoided, and for how long."""

from __future__ import annotations

from conductor.dispatch.broken_pairs import AVOIDED_S, MAX_PAIRS, BrokenPairs

P0, P1, D0, D1 = 1, 2, 11, 12


def test_a_pair_is_avoided_after_two_failures_in_a_row_and_tried_again_later() -> None:
    pairs = BrokenPairs()
    assert not pairs.failed((P0, D0), 100.0) and not pairs.avoids((P0, D0), 100.0)
    assert pairs.failed((P0, D0), 101.0), "that is news"
    assert pairs.avoids((P0, D0), 101.0 + AVOIDED_S - 0.1)
    assert not pairs.avoids((P0, D1), 101.0) and not pairs.avoids((P1, D0), 101.0)
    assert not pairs.avoids((P0, D0), 101.0 + AVOIDED_S)
    assert not pairs.failed((P0, D0), 120.0), "no news, and one failure is enough"
    assert pairs.avoids((P0, D0), 120.1)


def test_the_longer_a_cut_lasts_the_fewer_requests_find_out() -> None:
    pairs, tried_at = BrokenPairs(), []
    pairs.failed((P0, D0), 0.0)
    for second in range(600):
        if not pairs.avoids((P0, D0), second):
            tried_at.append(second)
            for _ in range(8):  # that began together, and find out one after the other
                pairs.failed((P0, D0), second)
    assert tried_at == [0, 10, 30, 70, *range(130, 600, 60)]


def test_a_hand_off_that_works_ends_it() -> None:
    pairs = BrokenPairs()
    pairs.failed((P0, D0), 0.0)
    pairs.worked((P0, D0))
    assert not pairs.failed((P0, D0), 1.0)
    assert pairs.failed((P0, D0), 2.0)
    pairs.worked((P0, D0))
    assert not pairs.avoids((P0, D0), 2.0)


def test_nothing_is_kept_of_nodes_that_are_gone_and_no_more_than_so_much_of_others() -> None:
    pairs = BrokenPairs()
    for pair in ((P0, D0), (P0, D1), (P1, D0)):
        pairs.failed(pair, 0.0)
        pairs.failed(pair, 0.0)
    pairs.gone(D0)
    assert not pairs.avoids((P0, D0), 0.0) and not pairs.avoids((P1, D0), 0.0) and pairs.avoids((P0, D1), 0.0)
    for other in range(MAX_PAIRS):
        pairs.failed((P1, 100 + other), 0.0)
    assert not pairs.avoids((P0, D1), 0.0)
