"""Random orders of what can happen to an engine: every future ends, and every token is accounted for."""

import concurrent.futures
import queue
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest
from engine_cases import SETTINGS, as_tuple, bits, count_live, detokenize, on_stretch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONFIG, POLICY, tiny_params

import flowgrpo as fg
from flowgrpo.generate.engine import Engine

pytestmark = pytest.mark.slow

SMALL = replace(SETTINGS, slots=3, slot_length=32, chunk=8, steps=4)
PARAMS = [tiny_params(0), tiny_params(1)]
ACTIONS = ["submit", "submit", "submit", "late", "cancel", "update_weights", "wait"]
LONG = 600.0  # seconds that nothing here may take


def short_requests() -> list[fg.contracts.Request]:
    """Some share a prompt, some have a stop string or a stop id."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, CONFIG.v, 12).tolist()
    return [
        fg.contracts.Request(
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
    """Complete each request by itself, with either weights -> bits by version and number of the request."""
    results = []
    for version, params in enumerate(PARAMS):
        with Engine(POLICY, params, SMALL, version=version, detokenize=detokenize) as engine:
            results.append(bits(engine.generate([request])[0] for request in REQUESTS))
    return results


@pytest.fixture(scope="module")
def shared():
    with Engine(POLICY, PARAMS[0], SMALL, detokenize=detokenize) as engine:
        yield engine, count_live(engine)


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
        elif action == "update_weights":
            engine.update_weights(PARAMS[number % 2], number % 2)
        elif action == "wait":
            concurrent.futures.wait([future for *_, future in asked], timeout=0.0003 * number)
    return asked


def check(asked, alone, closed: bool) -> int:
    """Each future is cancelled, or has what its request gets alone, as far as it came; returns the tokens of all."""
    delivered = 0
    for number, late, future in asked:
        if future.cancelled():
            continue
        got, ended = future.result(timeout=0), ("stop", "length")
        assert got.finish_reason in (*ended, *["timeout"] * late, *["cancelled"] * closed)
        size = len(got.tokens)
        delivered += size
        if len(set(got.version)) == 1:
            expected = alone[got.version[0]][number]
            assert as_tuple(got)[:3] == tuple(column[:size] for column in expected[:3])
            assert got.finish_reason not in ended or as_tuple(got) == expected
    return delivered


STEPS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, len(REQUESTS) - 1)), max_size=30)


@settings(max_examples=150)
@given(STEPS, st.integers(0, 7))
def test_random_interleavings_lose_nothing_and_never_hang(shared, alone, steps, ending):
    """One engine through most of them; every eighth is closed while its requests are under way."""
    closed = ending == 0
    engine, counts = shared
    if closed:
        engine = Engine(POLICY, PARAMS[0], SMALL, detokenize=detokenize)
        counts = count_live(engine)
    before, lost = sum(counts), engine.lost
    asked = act(engine, steps)
    if closed:
        engine.close()
    assert not concurrent.futures.wait([future for *_, future in asked], timeout=LONG).not_done
    if not closed:
        # What is answered after all others: the engine has nothing left to account for.
        asked.append((0, False, engine.submit(REQUESTS[0])))
        asked[-1][2].result(timeout=LONG)
    delivered = check(asked, alone, closed)
    engine.lost.check()
    assert sum(counts) - before == delivered + engine.lost.generated - lost.generated


def test_a_failed_engine_resolves_every_future(monkeypatch):
    """Weights that can't be used come while requests are decoding, queued, or not yet submitted."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    engine = Engine(POLICY, PARAMS[0], SMALL, detokenize=detokenize)
    futures = [engine.submit(request._replace(max_tokens=16)) for request in REQUESTS]
    engine.update_weights({}, 1)
    futures += [engine.submit(request) for request in REQUESTS]
    failed = [future.exception(timeout=LONG) for future in futures]
    assert isinstance(failed[-1], KeyError)
    assert {type(error) for error in failed} <= {KeyError, type(None)}
    with pytest.raises(KeyError):
        engine.generate(REQUESTS[:1])
    with pytest.raises(fg.BadInput, match="the engine is closed"):
        engine.update_weights(PARAMS[0], 2)
    engine.close()
    assert engine.lost.check().generated >= 0


def test_a_callback_may_submit_and_close_but_not_release():
    engine, errors = Engine(POLICY, PARAMS[0], SMALL, detokenize=detokenize), queue.Queue()

    def call(_):
        try:
            engine.release()
        except fg.BadInput as error:
            errors.put(str(error))
        second = engine.submit(REQUESTS[2])
        second.add_done_callback(lambda future: (engine.close(), errors.put(future)))

    hold = threading.Event()  # so that the callback is there before the answer, and the engine's thread calls it
    on_stretch(engine, lambda *_: hold.wait(LONG))
    engine.submit(REQUESTS[1]).add_done_callback(call)
    hold.set()
    assert "would wait for itself" in errors.get(timeout=LONG)
    assert len(errors.get(timeout=LONG).result().tokens) > 0
    engine.close()
    assert engine.release() == 0
    with pytest.raises(fg.BadInput, match="the engine is closed"):
        engine.submit(REQUESTS[0])


def test_no_request_runs_if_one_is_invalid(shared):
    engine, counts = shared
    before = sum(counts)
    with pytest.raises(fg.BadInput, match="needs at least one token"):
        engine.generate([REQUESTS[0], REQUESTS[1]._replace(tokens=[])])
    assert sum(counts) == before
