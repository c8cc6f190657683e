"""F10: shared prefixes of contexts are computed once, with the same results as separate contexts."""

from dataclasses import replace
from functools import cache, partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FULL, random_params
from tree_cases import Context, build_trees, plain_rows

import flowgrpo as fg
from flowgrpo.generate.sampler import before_tokens, logprobs
from flowgrpo.models import attention
from flowgrpo.models.attention import MaskSpec, attend
from flowgrpo.models.attention_kernels import flash
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.flash_attention import flash_rows
from flowgrpo.models.lora import LoraConfig, lora_policy

NEAR = DecoderConfig(
    v=97, d=24, h=4, k=4, e=6, f=20, windows=(5, None), ropes=(Rope(), Rope(kind="linear", factor=2.0))
)
PLAIN = DecoderConfig(v=11, d=16, h=4, k=2, e=8, f=16, windows=(None,), ropes=(Rope(),))
CONFIGS = {"full": FULL, "near": NEAR}  # grouped heads, norms, soft-caps and windows; a head for each, and near windows
ROWS, CONTEXTS, LONGEST, NODES, SLOTS = 2, 4, 20, 96, 90
TREE_BLOCK = 16  # so that a small tree has many blocks, some of which are masked out
CHUNK = 32


@st.composite
def forests(draw) -> list[list[Context]]:
    """Rows of contexts; each continues a part of an earlier one, and some are equal to another or its prefix."""
    rows = []
    for _ in range(ROWS):
        contexts: list[Context] = []
        for _ in range(CONTEXTS):
            earlier = draw(st.sampled_from([(), *(context.tokens for context in contexts)]))
            start = earlier[: draw(st.integers(0, len(earlier)))]
            fresh = draw(st.lists(st.integers(0, 3), max_size=LONGEST - len(start)))
            tokens = (*start, *fresh) or (1,)
            scored = draw(st.sets(st.integers(1, len(tokens) - 1))) if len(tokens) > 1 else ()
            contexts.append(Context(tokens, tuple(sorted(scored))))
        rows.append(contexts)
    return rows


@cache
def compiled(name: str):
    """(tree, rows, plain, weights) -> scores and gradients, by trees and by separate contexts, in small blocks."""
    policy, options = make_policy(CONFIGS[name]), {"temperature": 0.7, "banned": (5,), "chunk": CHUNK}

    def by_trees(params, trees, rows, weight_rs):
        scores = logprobs(policy, params, *rows, tree=trees, **options)
        return (weight_rs * (scores.logp + 0.1 * scores.entropy)).sum(), scores.logp

    def by_contexts(params, tokens, segments, weight_rs):
        scores = logprobs(policy, params, tokens, None, segments, **options)
        return (weight_rs * (scores.logp + 0.1 * scores.entropy)).sum(), scores.logp

    programs = [jax.jit(jax.value_and_grad(function, has_aux=True)) for function in (by_trees, by_contexts)]
    with mock.patch.object(attention, "TREE_BLOCK", TREE_BLOCK):
        trees = build_trees([[]] * ROWS, NODES, SLOTS)
        given_trees = (trees.tree, (trees.tokens, trees.positions, trees.segments), np.zeros((ROWS, SLOTS), np.float32))
        rows = np.zeros((ROWS * CONTEXTS, LONGEST), np.int32)
        params = random_params(CONFIGS[name])
        return (
            programs[0].lower(params, *given_trees).compile(),
            programs[1].lower(params, rows, rows, rows.astype(np.float32)).compile(),
        )


def scored(name: str, forest, spoil: float | None = None):
    """((loss, logp by entry), gradient) by trees and by separate contexts, with a random weight per scored token."""
    by_trees, by_contexts = compiled(name)
    params, trees = random_params(CONFIGS[name]), build_trees(forest, NODES, SLOTS)
    contexts = [context for row in forest for context in row]
    weight_rs, weight_cs = np.zeros((ROWS, SLOTS), np.float32), np.zeros((len(contexts), LONGEST), np.float32)
    places = [(r, slot, *entry) for r, entries in enumerate(trees.entries) for slot, entry in enumerate(entries)]
    for number, (r, slot, context, position) in enumerate(places):
        weight_rs[r, slot] = weight_cs[context, position] = np.cos(number) / len(places)
    if spoil is not None:  # padding may contain anything
        real_rs, real_ru = trees.segments > 0, trees.tree.ends > 0
        garbage = [np.where(real_ru, x, 10**6).astype(np.int32) for x in trees.tree[:2]]
        after_rs = np.where(real_rs, trees.tree.predecessor, 10**6).astype(np.int32)
        tree = trees.tree._replace(tokens=garbage[0], positions=garbage[1], predecessor=after_rs)
        trees = trees._replace(tree=tree, tokens=np.where(real_rs, trees.tokens, 10**6).astype(np.int32))
    rows = (trees.tokens, trees.positions, trees.segments)
    (loss, logp_rs), slopes = by_trees(params, trees.tree, rows, weight_rs)
    assert not np.asarray(logp_rs)[trees.segments == 0].any()
    (plain_loss, logp_cs), plain_slopes = by_contexts(params, *plain_rows(contexts, LONGEST), weight_cs)
    actual = [np.asarray(logp_rs)[r, slot] for r, slot, _, _ in places]
    expected = [np.asarray(logp_cs)[context, position] for _, _, context, position in places]
    return (actual, loss, slopes), (expected, plain_loss, plain_slopes)


def check_equal(ours, theirs):
    np.testing.assert_allclose(ours[0], theirs[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=0, atol=1e-5)
    for key, slope in theirs[2].items():
        bound = 1e-4 * float(jnp.abs(slope).max()) + 1e-7
        np.testing.assert_allclose(ours[2][key], slope, rtol=0, atol=bound, err_msg=key)


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=12)
@given(forests())
def test_F10_any_trie_of_contexts_scores_as_rows_apart(name, forest):
    """Log-probabilities to 1e-5, loss and gradient to float tolerance."""
    check_equal(*scored(name, forest))


SAME, LONG = Context((1, 2, 3, 4), (1, 3)), Context(tuple(range(1, 21)), (4, 19))
AWKWARD = {
    "alike, and one begins another": [[SAME, SAME, LONG, Context((1, 2), (1,))], [LONG, LONG, LONG, SAME]],
    "nothing shared, nothing scored": [[SAME, Context((7,), ()), Context((8, 9), ()), Context((2,), ())], [LONG] * 4],
}


@pytest.mark.parametrize("case", AWKWARD)
def test_F10_contexts_alike_or_within_another(case):
    check_equal(*scored("full", AWKWARD[case]))


@pytest.mark.usefixtures("nan_allowed")
def test_F6_F10_padding_of_a_tree_does_not_leak():
    forest = AWKWARD["alike, and one begins another"]
    clean, _ = scored("near", forest)
    dirty, _ = scored("near", forest, spoil=1e30)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


def test_F10_an_adapted_policy_reads_trees():
    lora = LoraConfig(rank=2, targets=("q", "v", "down"))
    policy = lora_policy(NEAR, lora)
    params = policy.init(jax.random.key(0))
    adapter = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), params.adapter)
    params = params._replace(adapter=adapter)
    trees = build_trees(AWKWARD["alike, and one begins another"], 24, 12)
    tree, real_rs = trees.tree, trees.segments > 0
    states_rud = jax.jit(policy.hidden_tree)(params, tree.tokens, tree.positions, tree.ends)
    before_rsd = before_tokens(states_rud, tree, real_rs)
    contexts = [context for row in AWKWARD["alike, and one begins another"] for context in row]
    apart_csd = jax.jit(policy.hidden)(params, plain_rows(contexts, LONGEST)[0])[0]
    for r, entries in enumerate(trees.entries):
        for slot, (context, position) in enumerate(entries):
            np.testing.assert_allclose(before_rsd[r, slot], apart_csd[context, position - 1], rtol=0, atol=2e-5)


def test_a_policy_without_trees_refuses_them():
    trees = build_trees([[SAME]], 8, 4)
    rows = (trees.tokens, trees.positions, trees.segments)
    with pytest.raises(fg.BadInput, match="the rows share prefixes, and this policy has no hidden_tree"):
        logprobs(make_policy(NEAR)._replace(hidden_tree=None), None, *rows, tree=trees.tree)


# Attention --------------------------------------------------------------------------------------------


def branching(groups: int, samples: int, shared: int, branch: int) -> MaskSpec:
    """A tree of groups that share a prefix, and samples that share a longer one."""
    group = shared + samples * branch
    ends, positions = [], []
    for _ in range(groups):
        start = len(ends)
        ends += [start + group] * shared
        positions += range(shared)
        for sample in range(samples):
            ends += [start + shared + (sample + 1) * branch] * branch
            positions += range(shared, shared + branch)
    numbers = jnp.arange(1, len(ends) + 1, dtype=jnp.int32)[None]
    position = jnp.asarray(positions, jnp.int32)[None]
    return MaskSpec(position, position, numbers, numbers, 1 << 20, jnp.asarray(ends, jnp.int32)[None])


@pytest.mark.slow
@pytest.mark.parametrize("window", [1 << 20, 6])
def test_F10_the_gpu_kernel_is_the_plain_formula_on_trees(window):
    """Forward and backward, with padding behind the tree that holds NaN."""
    mask = branching(groups=3, samples=3, shared=9, branch=8)._replace(window=jnp.int32(window))
    spare = {name: jnp.pad(x, ((0, 0), (0, 7))) for name, x in mask._asdict().items() if name != "window"}
    mask, real_s = mask._replace(**spare), spare["k_end"][0] > 0
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(1, heads, len(real_s), 8)), jnp.float32) for heads in (4, 2, 2)]

    def run(attend_fn, *arrays):
        out, backward = jax.vjp(lambda *arrays: attend_fn(*arrays, mask, PLAIN), *arrays)
        return out, *backward(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    expected = jax.jit(partial(run, attend))(*arrays)
    with jax.debug_nans(False):
        spoilt = [jnp.where(real_s[:, None], x, jnp.nan) for x in arrays]
        actual = jax.jit(partial(run, partial(flash_rows, interpret=True, block=32)))(*spoilt)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, jnp.where(real_s[:, None], theirs, 0.0), rtol=0, atol=3e-6)


@pytest.mark.slow
def test_F10_gpu_program_for_trees_has_kernel_and_no_full_mask():
    mask = branching(groups=4, samples=4, shared=64, branch=48)
    length = mask.q_position.shape[1]
    shapes = [jax.ShapeDtypeStruct((1, heads, length, 16), jnp.bfloat16) for heads in (4, 2, 2)]
    config = replace(PLAIN, e=16)
    step = jax.jit(jax.grad(lambda *arrays: flash(*arrays, mask, config).sum(), argnums=(0, 1, 2)))
    text = step.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text
    assert f"{length}x{length}x" not in text


def count_pairs(mask: MaskSpec) -> int:
    """Pairs of blocks that are computed."""
    arrays = (jnp.zeros((1, 1, 1, mask.q_position.shape[1], 1)),)
    queries = attention._query_blocks(arrays, mask, 16)
    keys = attention._key_blocks(arrays[0][:, 0], arrays[0][:, 0], mask, 16)
    return int(attention._visible_blocks(queries, keys, mask.window)[1].sum())


def test_blocks_of_other_branches_are_not_computed():
    """Exactly the pairs in which somebody sees something, of a tree, of packed segments and under a window."""
    tree = branching(groups=4, samples=4, shared=16, branch=32)
    numbers = jnp.arange(576)[None]
    segments = MaskSpec(numbers % 96, numbers % 96, numbers // 96 + 1, numbers // 96 + 1, 1 << 20)
    causal = MaskSpec(numbers, numbers, jnp.ones_like(numbers), jnp.ones_like(numbers), 1 << 20)
    for mask, most in ((tree, 100), (tree._replace(window=8), 80), (segments, 126), (causal, 666)):
        visible_pairs = attention.visible(*mask)[0].reshape(36, 16, 36, 16).any(axis=(1, 3)).sum()
        assert int(visible_pairs) <= count_pairs(mask) <= most


def test_F10_a_row_of_4096_tokens_has_no_full_mask():
    """Neither for the compiler of a CPU, forward and backward, nor for those of a TPU and a GPU."""
    mask = branching(groups=8, samples=8, shared=64, branch=56)
    shapes = [jax.ShapeDtypeStruct((1, heads, 4096, 8), jnp.float32) for heads in (4, 2, 2)]

    def loss(q, k, v):
        return attend(q, k, v, mask, PLAIN).sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    for platform in ("cpu", "tpu", "cuda"):
        text = step.trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
        assert "64x64x" in text
        assert "4096x4096" not in text
        assert text.count("stablehlo.dot_general") < 16  # in a loop, and not once for each pair
    # What is alive at once is a few times what comes in, and not an array of 64 MiB for each head.
    memory = step.lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 16 * sum(4 * np.prod(shape.shape) for shape in shapes)
