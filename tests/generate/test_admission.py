"""Who waits where more conversations than slots are under way: nobody loses a cache that is still needed (E3, A5)."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from engine_cases import SETTINGS, bits, detokenize, next_turn
from tiny_models import CONFIG, POLICY, tiny_params

import flowgrpo as fg
from flowgrpo.contracts import Conversation
from flowgrpo.generate import admission
from flowgrpo.generate.admission import Admission
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.kv_slots import Slot, TokenSpan
from flowgrpo.generate.requests import Job

SLOTS, TURNS = 4, 4
SMALL = replace(SETTINGS, slots=SLOTS)


@pytest.fixture(scope="module")
def shared():
    """An engine with the tokens that it was made to compute again."""
    with Engine(POLICY, tiny_params(0), SMALL, detokenize=detokenize) as engine:
        forced, force = [], engine.programs.force

        def counted(*arguments):
            forced.append(int(arguments[-1].sum()))
            return force(*arguments)

        engine.programs = engine.programs._replace(force=counted)
        yield engine, forced


@pytest.fixture
def held(monkeypatch):
    """Conversations of which none is given up: the time of a client on a busy machine is none of these tests'."""
    monkeypatch.setattr(Admission, "price", lambda *_: 60.0)


def openings(count: int) -> list[fg.contracts.Request]:
    """Two system prompts, each shared by every other conversation."""
    rng = np.random.default_rng(3)
    heads = [rng.integers(1, CONFIG.v, 20).tolist() for _ in range(2)]
    tails = [rng.integers(1, CONFIG.v, 5).tolist() for _ in range(count)]
    return [fg.contracts.Request(heads[i % 2] + tails[i], jax.random.key(i), 9) for i in range(count)]


def talk(engine, opening: fg.contracts.Request, *, hint: bool = True) -> list:
    """One conversation of some turns."""
    request, done, conversation = opening, [], Conversation() if hint else None
    for turn in range(TURNS):
        done += engine.generate([request._replace(conversation=conversation)])
        request = next_turn(request, done[-1], turn)
    if conversation is not None:
        conversation.over = True
    return bits(done)


def all_at_once(engine, requests, play=talk) -> list:
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(partial(play, engine), requests))


@pytest.mark.slow
@pytest.mark.usefixtures("held")
def test_three_conversations_a_slot_lose_no_cache(shared):
    engine, forced = shared
    whole = [talk(engine, opening) for opening in openings(3 * SLOTS)]
    forced.clear()
    assert all_at_once(engine, openings(3 * SLOTS)) == whole
    assert not sum(forced)
    assert engine.recomputed == (0, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("held")
def test_two_groups_over_one_engine_share_its_slots(shared):
    """As rollouts, or sessions beside a rollout, that know nothing of each other."""
    engine, forced = shared
    forced.clear()
    got = []
    groups = [threading.Thread(target=lambda: got.append(all_at_once(engine, openings(SLOTS)))) for _ in range(2)]
    for thread in groups:
        thread.start()
    for thread in groups:
        thread.join()
    assert got[0] == got[1]
    assert not sum(forced)


@pytest.mark.slow
def test_turns_in_rounds_find_the_remaining_caches(shared):
    """A loop of one's own, which says nothing of conversations: those that are held go first, whatever their order."""
    engine, forced = shared
    requests, again = openings(2 * SLOTS), []
    for turn in range(TURNS):
        forced.clear()
        done = engine.generate(requests)
        again.append(sum(map(bool, forced)))
        requests = [next_turn(request, completion, turn) for request, completion in zip(requests, done, strict=True)]
    assert max(again) <= SLOTS * TURNS  # of the conversations that were evicted: each turn of each a piece
    assert sum(again) < 2 * SLOTS * sum(range(TURNS))


@pytest.mark.slow
@pytest.mark.usefixtures("held")
def test_a_sub_agent_leaves_the_main_context_alone(shared):
    engine, forced = shared
    forced.clear()
    conversation = Conversation()
    main, other = openings(3)[0], openings(3)[2]  # which share a system prompt
    for turn in range(TURNS):
        done = engine.generate([main._replace(conversation=conversation)])[0]
        main = next_turn(main, done, turn)
        engine.generate([other._replace(conversation=conversation)])
    assert not sum(forced)
    conversation.over = True


@pytest.mark.slow
def test_paused_clients_keep_no_request_waiting_for_ever(shared, monkeypatch, caplog):
    """All slots are held by conversations that never go on; others get through, and what is lost is said once."""
    engine = shared[0]
    monkeypatch.setattr(admission, "MAX_HOLD_SECONDS", 0.2)
    monkeypatch.setattr("flowgrpo.generate.engine.LOST_TOKENS", 8)
    monkeypatch.setattr("flowgrpo.generate.engine.LOST_FRACTION", 0.0)
    idle = [request._replace(conversation=Conversation()) for request in openings(SLOTS)]
    done = engine.generate(idle)
    began = time.monotonic()
    engine.generate(openings(3 * SLOTS)[SLOTS:])
    assert time.monotonic() - began < 10
    before, again = engine.recomputed, []
    for _ in range(2):  # who comes back all the same is answered as ever
        later = [
            next_turn(request, completion, 1)._replace(conversation=request.conversation)
            for request, completion in zip(idle, done, strict=True)
        ]
        again.append(bits(engine.generate(later)))
    assert again[0] == again[1]
    assert engine.recomputed.requests - before.requests >= SLOTS
    assert sum("raise slots" in record.message for record in caplog.records) == 1


# The rules, by hand ---------------------------------------------------------------------------------------


def job_of(conversation: Conversation | None = None, sampled_from: int | None = None) -> Job:
    request = fg.contracts.Request([1, 2, 3, 4], None, 1, conversation=conversation)
    job = Job(request, None, (), [1, 2, 3, 4], [False] * 4)
    job.spans = [TokenSpan(0, 2, False)] if sampled_from is None else [TokenSpan(sampled_from, 3, True)]
    return job


def rules_of(count: int) -> tuple[Admission, list[Slot]]:
    slots = [Slot(spans=[TokenSpan(0, 10 * (i + 1), True)], used_at=i) for i in range(count)]
    rules = Admission(slots)
    rules.step_seconds = 0.01
    return rules, slots


def test_a_slot_is_held_for_the_cost_of_its_cache():
    rules, slots = rules_of(4)
    conversation = Conversation()
    rules.hold(slots[0], job_of(conversation), 100.0)
    assert slots[0].held_until == pytest.approx(100 + 10 * 0.01 * 4)  # ten steps of an engine of four slots
    assert rules.place(job_of(), [0], [9, 0, 0, 0], 100.1) is None
    assert rules.place(job_of(), [0, 2], [9, 0, 0, 0], 100.1) == 2
    assert rules.place(job_of(), [0], [0] * 4, 100.5) == 0
    assert rules.place_returning(job_of(conversation, 1), [0, 2], [3, 0, 3, 0], 100.1) == 0
    conversation.over = True
    assert rules.place(job_of(), [0], [0] * 4, 100.1) == 0
    rules.hold(slots[3], job_of(Conversation()), 100.0)
    rules.step_seconds = 60.0
    rules.hold(slots[3], job_of(Conversation()), 100.0)
    assert slots[3].held_until == 100 + admission.MAX_HOLD_SECONDS


def test_waiting_requests_may_evict_the_cheapest_slot():
    rules, slots = rules_of(3)
    rules.step_seconds = 0.1
    for slot in slots:
        rules.hold(slot, job_of(Conversation()), 100.0)
    rules.accrue(True, 100.0)
    rules.accrue(True, 100 + 0.9 / admission.EVICTION_FRACTION)
    assert rules.place(job_of(), [0, 1, 2], [0] * 3, 102.0) is None  # 0.9 of the second that slot 0 costs
    rules.accrue(True, 100 + 1.1 / admission.EVICTION_FRACTION)
    assert rules.place(job_of(), [0, 1, 2], [0] * 3, 102.0) == 0
    assert rules.place(job_of(), [1, 2], [0] * 3, 102.0) is None
    rules.accrue(False, 1000.0)
    rules.accrue(True, 1001.0)
    assert rules.place(job_of(), [1, 2], [0] * 3, 102.0) is None
