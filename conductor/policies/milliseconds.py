"""Our default: the pair with the least predicted milliseconds to the last token.

FAST'25 Algorithm 1 with both of its hand-set numbers gone. A prefix is worth what fetching it costs against computing
it, from whichever store is fastest now, and prefill and decode are chosen together, because the bytes between them
cost time too. So a node's queue counts as much as its cache, and the longest match does not herd.
"""

from __future__ import annotations

import numpy as np

from conductor.policies.pick import TIE_MS, least
from conductor.predict import FirstToken, decode_work_ms, first_token, keep_room, sent_bytes
from conductor.view import FASTEST, Choice, Floats, Question

MAX_ROWS = 16  # prefill nodes tried beyond the first one, the most promising first


def milliseconds(question: Question, rng: np.random.Generator) -> Choice:
    view = question.view
    first = first_token(question)
    ttft = first.ttft_ms
    if question.prefill_ok is not None:
        ttft = np.where(question.prefill_ok, ttft, np.inf)
    p = least(ttft, question.last_prefill)
    if not question.facts.needs_decode:
        return Choice(p, source=FASTEST)
    num_bytes = sent_bytes(question)
    work = keep_room(question, num_bytes, decode_work_ms(question))
    layers = question.shape.num_layers

    def row(p: int) -> Floats:
        """[D]: the total with prefill node p. Layers are sent while later ones compute; the last one cannot be."""
        sending = num_bytes * view.send_byte[p]
        sending += view.send_latency[p]
        total: Floats = np.maximum(sending - first.most_prefill_ms[p], sending * (1.0 / layers))
        total += work
        return total

    totals = row(p)
    d = int(totals.argmin())
    best = float(totals[d] + ttft[p])
    for other in _promising(question, first, ttft, num_bytes, best - float(work[work.argmin()]), p):
        others = row(other)
        d = int(others.argmin())
        if others[d] + ttft[other] < best - TIE_MS:
            p, totals, best = other, others, float(others[d] + ttft[other])
    d = least(totals, question.last_decode)
    return Choice(p, d, FASTEST)


def _promising(
    question: Question, first: FirstToken, ttft: Floats, num_bytes: Floats, limit: float, p: int
) -> list[int]:
    """Prefill nodes that might stay below ``limit`` before decode begins: none is better than with its fastest link and
    the fewest bytes. ``p`` is known already."""
    might = (ttft < limit - TIE_MS).nonzero()[0]
    if len(might) < 2:
        return []
    view = question.view
    sending = view.least_send_latency[might] + view.least_send_byte[might] * num_bytes[num_bytes.argmin()]
    bound = np.maximum(sending - first.most_prefill_ms[might], sending / question.shape.num_layers)
    bound += ttft[might]
    order = bound.argsort(kind="stable")[: MAX_ROWS + 1]
    return [int(might[at]) for at in order if bound[at] < limit - TIE_MS and might[at] != p]
