"""Requests that enter together: each distinct piece once, and the bits that each has alone (E3)."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from engine_cases import SETTINGS, bits, detokenize, fill, next_turn
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONFIG, POLICY, tiny_params

import flowgrpo as fg
from flowgrpo.generate.cache_copy import copy_rows
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.kv_slots import split_spans
from flowgrpo.generate.prefill import FillPlan, make_batches
from flowgrpo.generate.requests import Job

SLOTS, CHUNK = 8, 16


def job_of(tokens, chosen=None) -> Job:
    chosen = [False] * len(tokens) if chosen is None else chosen
    request = fg.contracts.Request(tokens, jax.random.key(0), 1)
    return Job(request, None, (), list(tokens), list(chosen), spans=split_spans(chosen, chunk=CHUNK))


@st.composite
def tries(draw):
    """Contexts that begin as earlier ones do, up to anywhere; some of their tokens were sampled."""
    contexts: list[tuple[list[int], list[bool]]] = []
    for _ in range(draw(st.integers(1, SLOTS))):
        tokens, chosen = draw(st.sampled_from(contexts)) if contexts else ([], [])
        keep = draw(st.integers(0, len(tokens)))
        tokens, chosen = tokens[:keep], chosen[:keep]
        for _ in range(draw(st.integers(1, 3))):
            size = draw(st.integers(1, 24))
            tokens = tokens + draw(st.lists(st.integers(1, 3), min_size=size, max_size=size))
            chosen = chosen + [bool(chosen) and draw(st.booleans())] * size
        contexts.append((tokens[:100], chosen[:100]))
    return contexts


@settings(max_examples=60, deadline=None)
@given(tries(), st.integers(0, 99))
def test_E3_a_plan_fills_every_slot_and_computes_nothing_twice(contexts, seed):
    """The plan is carried out on lists of tokens, in slots that held some of the contexts in another order before."""
    rng = np.random.default_rng(seed)
    before = [contexts[i][0] if i < len(contexts) else [] for i in rng.permutation(SLOTS)]
    caches, planned, filling = [list(x) for x in before], [list(x) for x in before], FillPlan()
    slots = rng.permutation(SLOTS)[: len(contexts)]
    for slot, (tokens, chosen) in zip(slots, contexts, strict=True):
        job = job_of(tokens, chosen)
        # Whole pieces that a slot holds or will hold, whatever pieces it was made of.
        ends = [0, *(span.end for span in job.spans)]
        cached_r = [max(end for end in ends if cache[:end] == tokens[:end]) for cache in planned]
        filling.add(slot, job, cached_r, CHUNK)
        planned[slot] = tokens[:-1]
    computed: list[tuple] = []
    for copies, spans in filling.waves():
        for copy in copies:
            caches[copy.slot] = caches[copy.source][: copy.copied]
        prefills = [pair for pair in spans if not pair[1].stepwise]
        for batch in make_batches(prefills, chunk=CHUNK, slots=SLOTS):
            for slot, start, tokens_c, size in zip(*batch, strict=True):
                if slot < SLOTS:
                    assert len(caches[slot]) == start
                    caches[slot] += tokens_c[:size].tolist()
                    computed.append(tuple(caches[slot]))
        for forced, span in spans:
            if span.stepwise:
                assert len(caches[forced.slot]) == span.start
                caches[forced.slot] += forced.job.tokens[span.start : span.end]
    assert [caches[slot] for slot in slots] == [tokens[:-1] for tokens, _ in contexts]
    prefilled_once = [context for context in contexts if not any(context[1])]
    if len(prefilled_once) == len(contexts):
        assert len(set(computed)) == len(computed)


@pytest.mark.parametrize("stacked", [True, False])
def test_copies_in_order_leave_other_rows_alone(stacked):
    """As copies of lists do: chains, a row that keeps its beginning, and what is beyond the held tokens is not seen."""
    from flowgrpo.models.kv_cache import make_cache

    cache, rng = make_cache(5, 300, config=CONFIG, stacked=stacked), np.random.default_rng(0)
    cache = jax.tree.map(lambda x: jax.numpy.asarray(rng.integers(1, 9, x.shape), x.dtype), cache)
    source_n, target_n, held_n = np.array([[0, 1, 3, 2, 4], [1, 2, 3, 0, 4], [130, 129, 7, 3, 0]], np.int32)
    copied = jax.jit(copy_rows)(cache, source_n, target_n, held_n, 4)
    rows = list(range(5))
    for source, target in zip(source_n[:4], target_n[:4], strict=True):
        rows[target] = rows[source]
    assert copied.next.tolist()[:4] == [3, 130, 129, 7]
    for row, length in enumerate([3, 130, 129, 7, 384]):
        segments = np.asarray(copied.segments[row])
        np.testing.assert_array_equal(segments[:length], cache.segments[rows[row]][:length])
        assert row == 4 or not segments[length:].any()
    # Blocks of a layer that are arrays of their own are put together.
    whole = [
        [np.concatenate(layer, axis=2) if isinstance(layer, tuple) else layer for layer in x.values]
        for x in (cache, copied)
    ]
    for now, was in zip(whole[1], whole[0], strict=True):
        for row, length in enumerate([3, 130, 129, 7, 384]):
            np.testing.assert_array_equal(now[row, :, :length], was[rows[row], :, :length])


@pytest.mark.parametrize("stacked", [True, False])
def test_a_cache_of_one_head_is_copied_in_place(stacked):
    from flowgrpo.models.kv_cache import make_cache

    cache = make_cache(8, 300, config=replace(CONFIG, k=1), stacked=stacked)
    as_users_have_it = {"xla_cpu_use_fusion_emitters": True}
    with jax.debug_nans(False):  # under which nothing is donated
        lowered = jax.jit(copy_rows, donate_argnums=0).lower(cache, *np.zeros((3, 8), np.int32), 8)
        program = lowered.compile(as_users_have_it)
    assert not [line for line in program.as_text().splitlines() if " copy(" in line and "f32[" in line]


def family(count: int, seed: int) -> list[fg.contracts.Request]:
    """Prompts that share 40 tokens, in groups 20 more, and end apart."""
    rng = np.random.default_rng(seed)

    def ids(size: int) -> list[int]:
        return rng.integers(1, CONFIG.v, size).tolist()

    head = ids(40)
    groups = [head + ids(20) for _ in range(3)]
    return [fg.contracts.Request(groups[i % 3] + ids(i % 4), jax.random.key(i), 6) for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [1, True])
def test_E3_requests_admitted_together_have_the_bits_of_one_alone(unroll):
    """In any order, from empty slots, after a release in between and after new weights and back; and turns after."""
    from flowgrpo.models.decoder import make_policy

    policy = POLICY if unroll == 1 else make_policy(CONFIG, unroll=True)
    requests = family(SLOTS, 1)
    with Engine(policy, tiny_params(), replace(SETTINGS, slots=SLOTS), detokenize=detokenize) as engine:
        alone = []
        for request in requests:
            fill(engine)
            alone += engine.generate([request])
        for seed in range(3):
            order = np.random.default_rng(seed).permutation(SLOTS)
            [lambda: fill(engine), engine.release, lambda: engine.update_weights(tiny_params(), 0)][seed]()
            before = engine.prefilled
            together = engine.generate([requests[i] for i in order])
            assert bits(together) == bits([alone[i] for i in order])
            laid, computed = (now - was for now, was in zip(engine.prefilled, before, strict=True))
            assert laid == sum(len(request.tokens) - 1 for request in requests)
            # 32 tokens that all share, in whole pieces; those of a group and what is a request's own are the rest.
            assert computed == laid - sum(completion.reused for completion in together) < laid / 2
        turns = [next_turn(*pair, i) for i, pair in enumerate(zip(requests, alone, strict=True))]
        cached = engine.generate(turns)
        engine.release()
        assert bits(engine.generate(turns)) == bits(cached)
