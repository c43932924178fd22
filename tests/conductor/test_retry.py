"""Failed attempts of a request: which of them count, and which nodes the next one avoids."""

from __future__ import annotations

from conductor.dispatch.retry import Failure, Retries

P0, P1, D0, D1 = 1, 2, 11, 12
PREFILL, DECODE = frozenset({P0, P1}), frozenset({D0, D1})


def failed(*nodes: int, lost: int = 0, leaving: int = 0, was_never_accepted: bool = False) -> Failure:
    return Failure(
        frozenset(nodes),
        lost=frozenset({lost} - {0}),
        leaving=frozenset({leaving} - {0}),
        was_never_accepted=was_never_accepted,
    )


def test_the_number_of_retries_is_limited() -> None:
    retries = Retries(max_failures=2)
    assert retries.learn(failed(P0, D0))
    assert retries.learn(failed(P1, D1))
    assert not retries.learn(failed(P0, D0))
    assert not Retries(max_failures=0).learn(failed(P0, D0))


def test_no_node_is_excluded_before_a_failure() -> None:
    assert Retries(1).excluded([PREFILL, DECODE]) == set()


def test_both_nodes_of_a_failed_pair_are_avoided() -> None:
    retries = Retries(1)
    retries.learn(failed(P0, D0))
    assert retries.excluded([PREFILL, DECODE]) == {P0, D0}


def test_failed_nodes_are_used_again_when_they_are_all_of_their_role() -> None:
    retries = Retries(1)
    retries.learn(failed(P0, D0))
    assert retries.excluded([frozenset({P0}), DECODE]) == {D0}
    assert retries.excluded([frozenset({P0}), frozenset({D0})]) == set()
    assert retries.excluded([frozenset(), frozenset()]) == set()


def test_an_unreachable_node_is_not_used_again_even_if_it_is_the_only_one() -> None:
    retries = Retries(1)
    retries.learn(failed(P0, D0, lost=D0))
    assert retries.excluded([PREFILL, frozenset({D0})]) == {D0}


def test_a_node_is_not_avoided_for_the_sake_of_one_that_is_dead() -> None:
    retries = Retries(2)
    retries.learn(failed(P0, D0, lost=D0))
    retries.learn(failed(P0, D1))
    assert retries.excluded([PREFILL, DECODE]) == {P0, D0}, "d1 failed, and is all that is alive of its role"


def test_a_loss_does_not_clear_the_other_node_of_the_failure_before() -> None:
    retries = Retries(2)
    retries.learn(failed(P0, D0))
    retries.learn(failed(P1, D0, lost=D0))
    assert retries.excluded([PREFILL, DECODE]) == {P0, D0}, "p0 may have been the reason, p1 was not"


def test_a_node_with_a_new_heartbeat_is_used_when_there_is_no_other() -> None:
    retries = Retries(1)
    retries.learn(failed(P0, D0, lost=D0))
    retries.revive(frozenset({P0, D0}))
    assert retries.excluded([PREFILL, frozenset({D0})]) == set()
    assert retries.excluded([PREFILL, DECODE]) == {D0}, "it may beat where nobody can reach it"


def test_a_node_gone_before_the_call_costs_no_retry_but_only_once() -> None:
    retries = Retries(max_failures=0)
    gone = failed(P0, D0, lost=D0, was_never_accepted=True)
    assert retries.learn(gone)
    assert retries.has_failed, "all the same it is no new request"
    retries.revive(DECODE)  # it beats where nobody can reach it
    assert not retries.learn(gone)


def test_a_node_that_dies_during_the_call_costs_a_retry() -> None:
    assert not Retries(max_failures=0).learn(failed(P0, D0, lost=D0))


def test_several_nodes_gone_before_their_calls_cost_no_retry() -> None:
    retries = Retries(max_failures=0)
    for node in (D0, D1, 13, 14):
        assert retries.learn(failed(P0, node, lost=node, was_never_accepted=True))
    assert retries.count == 0


def test_a_loss_that_the_other_node_reported_first_is_counted_once() -> None:
    retries = Retries(max_failures=1)
    assert retries.learn(failed(P0, D0)), "the prefill node says that the hand-off failed"
    assert retries.learn(failed(P0, D0, lost=D0)), "because this one was dying"
    assert retries.count == 1


def test_a_draining_node_costs_no_retry_but_only_once() -> None:
    retries = Retries(max_failures=0)
    assert retries.learn(failed(P0, D0, leaving=D0))
    assert retries.learn(failed(P0, D1, leaving=D1)), "another one"
    assert not retries.learn(failed(P0, D0, leaving=D0)), "the same one again"


def test_the_incarnation_that_follows_is_another_node() -> None:
    retries = Retries(max_failures=0)
    retries.learn(failed(P0, D0, lost=D0, was_never_accepted=True))
    restarted = 1000 + D0
    assert retries.excluded([PREFILL, frozenset({restarted})]) == {D0}
    assert retries.learn(failed(P0, restarted, lost=restarted, was_never_accepted=True))
