"""A thousand random orders of what can happen to an engine: every future ends, and every token is accounted for."""

import concurrent.futures
import threading
import time

import jax
import numpy as np
import pytest
from engine_cases import count_live, text_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import BANNED, CONFIG, POLICY, tiny_params

import flowgrpo as fg
from flowgrpo.generate.engine import Engine

pytestmark = pytest.mark.slow

SMALL = {"slots": 3, "slot_length": 32, "chunk": 8, "steps": 4, "banned": BANNED, "text_of": text_of}
PARAMS = [tiny_params(0), tiny_params(1)]
ACTIONS = ["submit", "submit", "submit", "late", "cancel", "swap", "wait"]
LONG = 120.0  # seconds that nothing here may take


def short_requests() -> list[fg.Request]:
    """Some share a prompt, some have a stop string, a stop id, or what was sampled in an earlier turn."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, CONFIG.v, 12).tolist()
    return [
        fg.Request(
            prompt[: 3 * (i % 4)] + rng.integers(1, CONFIG.v, 1 + i % 3).tolist(),
            jax.random.key(i),
            1 + 3 * i % 11,
            stop_ids=(7, 8) if i % 2 else (),
            stop=("ab", "é") if i % 3 == 0 else (),
        )
        for i in range(12)
    ]


REQUESTS = short_requests()


@pytest.fixture(scope="module")
def alone():
    """What each request gets by itself, from either weights."""
    results = []
    for version, params in enumerate(PARAMS):
        with Engine(POLICY, params, **SMALL, version=version) as engine:
            results.append([engine.generate([request])[0] for request in REQUESTS])
    return results


@pytest.fixture(scope="module")
def shared():
    with Engine(POLICY, PARAMS[0], **SMALL) as engine:
        counts = []
        count_live(engine, counts)
        yield engine, counts


def act(engine, steps) -> list:
    """Do what the steps say; returns (number of the request, whether it has a deadline, its future)."""
    asked = []
    for action, number in steps:
        if action == "submit":
            asked.append((number, False, engine.submit(REQUESTS[number])))
        elif action == "late":
            asked.append((number, True, engine.submit(REQUESTS[number]._replace(deadline=0.001 * (number % 4)))))
        elif action == "cancel" and asked:
            asked[number % len(asked)][2].cancel()
        elif action == "swap":
            engine.swap(PARAMS[number % 2], number % 2)
        elif action == "wait":
            time.sleep(0.0003 * number)
    return asked


def check(asked, alone, closed: bool) -> int:
    """Each future is cancelled, or has what its request gets alone, as far as it came; returns the tokens of all."""
    delivered = 0
    for number, late, future in asked:
        if future.cancelled():
            continue
        got, reasons = future.result(timeout=0), {"stop", "length"}
        reasons |= ({"timeout"} if late else set()) | ({"cancelled"} if closed else set())
        assert got.finish_reason in reasons
        size = len(got.tokens)
        assert size == len(got.logp) == len(got.version) == len(got.margin)
        delivered += size
        if len(set(got.version)) == 1:
            expected = alone[got.version[0]][number]
            assert (list(got.tokens), list(got.logp)) == (expected.tokens[:size], expected.logp[:size])
            if got.finish_reason in ("stop", "length"):
                assert (size, got.finish_reason) == (len(expected.tokens), expected.finish_reason)
    return delivered


STEPS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, len(REQUESTS) - 1)), max_size=30)


@settings(max_examples=1000)
@given(STEPS, st.integers(0, 7))
def test_random_orders_lose_nothing_and_hang_nowhere(shared, alone, steps, ending):
    """One engine through most of them; every eighth is closed while its requests are under way."""
    closed = ending == 0
    if closed:
        engine, counts = Engine(POLICY, PARAMS[0], **SMALL), []
        count_live(engine, counts)
    else:
        engine, counts = shared
    before, lost = sum(counts), engine.lost
    asked = act(engine, steps)
    if closed:
        engine.close()
    done = concurrent.futures.wait([future for *_, future in asked], timeout=LONG)
    assert not done.not_done
    if not closed:
        # What is answered after all others: the engine has nothing left to account for.
        asked.append((0, False, engine.submit(REQUESTS[0])))
        asked[-1][2].result(timeout=LONG)
    delivered = check(asked, alone, closed)
    engine.lost.check()
    assert sum(counts) - before == delivered + engine.lost.generated - lost.generated


def test_a_thread_that_fails_answers_every_future():
    """Weights that can't be used come while requests are decoding, queued, or not yet submitted."""
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        engine = Engine(POLICY, PARAMS[0], **SMALL)
        futures = [engine.submit(request._replace(max_tokens=16)) for request in REQUESTS]
        engine.swap({}, 1)
        futures += [engine.submit(request) for request in REQUESTS]
        failed = [future.exception(timeout=LONG) for future in futures]
        assert isinstance(failed[-1], KeyError)
        assert {type(error) for error in failed} <= {KeyError, type(None)}
        with pytest.raises(KeyError):
            engine.generate(REQUESTS[:1])
        with pytest.raises(fg.BadInput, match="the engine is closed"):
            engine.swap(PARAMS[0], 2)
        engine.close()
        assert engine.lost.check().generated >= 0
    finally:
        threading.excepthook = hook


def test_a_running_request_can_be_cancelled():
    with Engine(POLICY, PARAMS[0], **{**SMALL, "slots": 1, "steps": 1, "slot_length": 4096}) as engine:
        counts = []
        count_live(engine, counts)
        long = engine.submit(fg.Request([1, 2, 3], jax.random.key(0), 4000))
        while sum(counts) < 3:
            time.sleep(0.001)
        assert long.cancel()
        assert len(engine.submit(REQUESTS[0]).result(timeout=LONG).tokens) > 0
        assert 3 <= engine.lost.check().fates[fg.Fate.DROPPED_CANCELLED] < 4000


def test_a_callback_may_submit_and_close():
    engine = Engine(POLICY, PARAMS[0], **SMALL)
    second = []
    first = engine.submit(REQUESTS[1])
    first.add_done_callback(lambda _: second.append(engine.submit(REQUESTS[2])))
    first.result(timeout=LONG)
    while not second:
        time.sleep(0.001)
    second[0].add_done_callback(lambda _: engine.close())
    assert len(second[0].result(timeout=LONG).tokens) > 0
    engine.close()
    with pytest.raises(fg.BadInput, match="the engine is closed"):
        engine.submit(REQUESTS[0])


def test_none_is_run_if_one_is_bad(shared):
    engine, counts = shared
    before = sum(counts)
    with pytest.raises(fg.BadInput, match="needs at least one token"):
        engine.generate([REQUESTS[0], REQUESTS[1]._replace(tokens=[])])
    assert sum(counts) == before
