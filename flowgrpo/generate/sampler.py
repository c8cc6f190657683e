"""Sample and score tokens with one forward function.

A token is drawn by one uniform number from its request's key, by inverting the cumulative distribution in a fixed
order of the vocabulary. Its log-probability is that under the distribution it was drawn from, and `logprobs` scores
tokens later under the same one, so that the ratio of an unchanged policy is 1 (F7):

    pi(token) = softmax(logits / temperature)   without banned tokens; renormalised over the recorded
                                                support if top-k, top-p or min-p cut it

That banned tokens have no probability is part of this definition: if theirs would be m, every other token's
log-probability is higher by -log(1 - m) than in an engine that bans nothing (3e-4 if m is 3e-4).

A row feeds the token that it sampled last, so `prefill` takes a prompt without its last token, and the cache of a turn
that ended can be appended to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import Bool, Float, Int

from flowgrpo.contracts import Cache, Params, Policy, Scores
from flowgrpo.types import AnyArray, BadInput, PrefixTree

MAX_TOP_K = 64
COLUMNS = 512  # into which the vocabulary is folded when a token is drawn
MAX_LOGITS = 1 << 24  # of the tokens that are scored together, some 64 MB in float32
MIN_CHUNK = 256  # tokens scored together; with fewer, a product is bound by reading the unembedding


class Sampling(NamedTuple):
    """Sampling settings of each row; the last three act only if the support is recorded."""

    temperature: AnyArray  # r
    top_k: AnyArray  # r: number of the likeliest tokens, at most MAX_TOP_K
    top_p: AnyArray  # r: probability of the smallest set of likeliest tokens
    min_p: AnyArray  # r: lowest probability, as a fraction of the largest


def make_sampling(rows: int, *, temperature=1.0, top_k=MAX_TOP_K, top_p=1.0, min_p=0.0) -> Sampling:
    """Settings of `rows` rows, the same for every row."""
    temperature_r, top_p_r, min_p_r = (jnp.full(rows, x, jnp.float32) for x in (temperature, top_p, min_p))
    return Sampling(temperature_r, jnp.full(rows, top_k, jnp.int32), top_p_r, min_p_r)


class DecodeState(struct.PyTreeNode):
    """State of decoding: everything that a row needs to continue."""

    cache: Cache
    token: Int[Array, "r"]  # sampled or given last, not yet in the cache
    key: Array  # r: of the request
    count: Int[Array, "r"]  # tokens sampled under that key
    budget: Int[Array, "r"]  # tokens that may still be sampled
    active: Bool[Array, "r"]


class SampledTokens(struct.PyTreeNode):
    """Tokens of a stretch of decoding, step by step (axis u); `live` marks the rows that sampled at a step."""

    token: Int[Array, "u r"]
    logp_sampled: Float[Array, "u r"]
    live: Bool[Array, "u r"]
    support: Int[Array, "u r k"] | None  # ids that the token was drawn from, then -1; None: from the whole vocabulary


# One token --------------------------------------------------------------------------------------------


def apply_temperature(logits: AnyArray, temperature: AnyArray, banned: tuple[int, ...]) -> Array:
    """Logits over the temperature in float32, -inf for banned tokens: [... v], [...] -> [... v]."""
    scaled = jnp.asarray(logits).astype(jnp.float32) / jnp.asarray(temperature)[..., None]
    if not banned:
        return scaled
    # A mask, not a scatter: the gradient of that would be a constant of all logits, which XLA folds.
    return jnp.where(np.isin(np.arange(scaled.shape[-1]), banned), -jnp.inf, scaled)


def recorded_support(scaled_rv: Array, settings: Sampling, width: int) -> Array:
    """Ids that remain after top-k, top-p and min-p, most likely first, then -1 -> [r width]."""
    top_rk, id_rk = jax.lax.top_k(scaled_rv, width)
    p_rk = jnp.exp(top_rk - jax.nn.logsumexp(scaled_rv, axis=-1)[:, None])
    before_rk = jnp.cumsum(p_rk, axis=-1) - p_rk
    rank_rk = jnp.arange(width)[None, :]
    remains_rk = (rank_rk < settings.top_k[:, None]) & (before_rk < settings.top_p[:, None])
    remains_rk &= (p_rk >= settings.min_p[:, None] * p_rk[:, :1]) & (p_rk > 0)
    return jnp.where(remains_rk | (rank_rk == 0), id_rk, -1)


def cuts_support(settings: Any) -> Any:
    """Whether the settings of a request, or of each row, leave tokens out."""
    return (settings.top_p < 1) | (settings.min_p > 0) | (settings.top_k < MAX_TOP_K)


def draw_token(
    logits_rv: Array,
    uniform_r: Array,
    settings: Sampling,
    live_r: Array,
    *,
    banned: tuple[int, ...],
    width: int,
    mixed: bool = False,
) -> SampledTokens:
    """Draw a token for each row by its uniform number, without the axis u.

    `width` is the size of the recorded support, 0 for the whole vocabulary. With `mixed`, rows whose settings cut
    nothing draw from the whole vocabulary too, and record -1.
    """
    scaled_rv = apply_temperature(logits_rv, settings.temperature, banned)
    if width == 0:
        return SampledTokens(*_inverse_cdf(scaled_rv, uniform_r), live_r, None)
    if not mixed:
        return SampledTokens(*_draw_from_support(scaled_rv, uniform_r, settings, width, live_r))
    # Outside of the branch, so that a row's bits don't depend on the other rows (E3).
    token_r, logp_r = _inverse_cdf(scaled_rv, uniform_r)
    cuts_r = cuts_support(settings) & live_r
    uncut = (token_r, logp_r, live_r, jnp.full((len(token_r), width), -1, token_r.dtype))
    cut = jax.lax.cond(
        cuts_r.any(),
        lambda _: _draw_from_support(scaled_rv, uniform_r, settings, width, live_r),
        lambda uncut: uncut,
        uncut,
    )
    select = partial(jax.tree.map, lambda x, y: jnp.where(cuts_r.reshape(-1, *(1,) * (x.ndim - 1)), x, y))
    return SampledTokens(*select(cut, uncut))


def _draw_from_support(scaled_rv: Array, uniform_r: Array, settings: Sampling, width: int, live_r: Array) -> tuple:
    """The fields of `SampledTokens`, drawn from the support of each row."""
    support_rk = recorded_support(scaled_rv, settings, width)
    index_r, logp_r = _inverse_cdf(_gather_support(scaled_rv, support_rk), uniform_r)
    token_r = jnp.take_along_axis(support_rk, index_r[:, None], axis=-1)[:, 0]
    return token_r, logp_r, live_r, support_rk


def _gather_support(scaled: Array, support: Array) -> Array:
    """Logits of the support, -inf for its padding: [c v], [c k] -> [c k]."""
    return jnp.where(support >= 0, jnp.take_along_axis(scaled, jnp.maximum(support, 0), axis=-1), -jnp.inf)


def _inverse_cdf(logits_rv: Array, uniform_r: Array) -> tuple[Array, Array]:
    """(index, log-probability) of the entry at which the cumulative probability passes the uniform number.

    The vocabulary is folded to b rows and w columns (entry b w + c is in column c; the padding of the last row is
    impossible), and summed column by column: first whole columns, then the entries of the one that is hit. So every
    entry is read in a few vectorised passes.
    """
    width = min(COLUMNS, logits_rv.shape[1])
    padding = -logits_rv.shape[1] % width
    padded_rv = jnp.pad(logits_rv, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    x_rbw = padded_rv.reshape(len(logits_rv), -1, width)
    top_r = x_rbw.max(axis=(1, 2))
    weight_rbw = jnp.exp(x_rbw - top_r[:, None, None])
    column_rw = weight_rbw.sum(axis=1)
    end_rw = jnp.cumsum(column_rw, axis=-1)
    total_r = end_rw[:, -1]
    target_r = uniform_r * total_r
    column_r = jnp.argmax((end_rw > target_r[:, None]) & (column_rw > 0), axis=-1)
    weight_rb = jnp.take_along_axis(weight_rbw, column_r[:, None, None], axis=2)[:, :, 0]
    edge_rb = _pick(end_rw - column_rw, column_r)[:, None] + jnp.cumsum(weight_rb, axis=-1)
    # An entry of probability 0 has no interval and can't be hit. Rounding may leave the last edge of a column short
    # of its end; then it is the column's last possible entry.
    hit_rb = (edge_rb > target_r[:, None]) & (weight_rb > 0)
    last_r = weight_rb.shape[1] - 1 - jnp.argmax(jnp.flip(weight_rb > 0, axis=-1), axis=-1)
    entry_r = jnp.where(hit_rb.any(axis=-1), jnp.argmax(hit_rb, axis=-1), last_r)
    index_r = entry_r * x_rbw.shape[2] + column_r
    return index_r, _pick(logits_rv, index_r) - top_r - jnp.log(total_r)


def _pick(x: Array, index: Array) -> Array:
    """[c v], [c] -> [c]."""
    return jnp.take_along_axis(x, index[:, None], axis=-1)[:, 0]


def _entropy(logp: Array) -> Array:
    """Entropy of the distributions along the last axis; -inf is probability 0."""
    possible = jnp.isfinite(logp)
    finite = jnp.where(possible, logp, 0.0)
    return -jnp.sum(jnp.where(possible, jnp.exp(finite) * finite, 0.0), axis=-1)


def draw_margin(
    policy: Policy, params: Params, tokens: AnyArray, key: Array, count: int, *, temperature=1.0, banned=()
) -> Array:
    """Distance of the uniform number that drew the last token to the nearest edge of its interval: E3's near-ties.

    If it is tiny, rounding may give another token. The support is the whole vocabulary, and `count` tokens had been
    drawn under `key` before.
    """
    tokens_rs = jnp.asarray(tokens)[None]
    states = policy.hidden(params, tokens_rs[:, :-1], None, jnp.ones_like(tokens_rs[:, :-1]), None)[0]
    p_rv = jax.nn.softmax(apply_temperature(policy.unembed(params, states[:, -1]), jnp.full(1, temperature), banned))
    p_v, column_v = p_rv[0], jnp.arange(p_rv.shape[1]) % COLUMNS
    token, id_v = tokens_rs[0, -1], jnp.arange(len(p_v))
    # In the order of a draw: whole columns, then the entries above it in its own.
    earlier_v = (column_v < column_v[token]) | ((column_v == column_v[token]) & (id_v < token))
    edge = jnp.where(earlier_v, p_v, 0.0).sum()
    uniform = _uniform(key, jnp.int32(count))
    return jnp.maximum(jnp.minimum(uniform - edge, edge + p_v[token] - uniform), 0.0)


# Many tokens ------------------------------------------------------------------------------------------


def prefill(policy: Policy, params: Params, cache: Cache, tokens_rs: Array, real_rs: Array) -> Cache:
    """The cache with the `real` ones of these tokens appended, row by row."""
    return policy.hidden(params, tokens_rs, None, real_rs.astype(jnp.int32), cache)[1]


def start_rows(cache: Cache, token_r: Array, key_r: Array, budget_r: Array) -> DecodeState:
    """State of rows that will sample their first token after `token`."""
    return DecodeState(cache, token_r, key_r, jnp.zeros(len(token_r), jnp.int32), budget_r, budget_r > 0)


def decode(
    policy: Policy,
    params: Params,
    rows: DecodeState,
    settings: Sampling,
    stop_ids: Array,
    *,
    steps: int,
    leave: Array | bool = False,
    min_decode_batch: int | None = None,
    banned: tuple[int, ...] = (),
    width: int = 0,
    mixed: bool = False,
) -> tuple[DecodeState, SampledTokens]:
    """Sample up to `steps` tokens in every active row, and end early when none is left.

    A row ends with a token among its `stop_ids` [r m] (padded with -1), which is sampled and counts, or when its
    budget is used up.

    Args:
        policy: the model.
        params: its parameters.
        rows: the state of all rows.
        settings: how each row samples.
        stop_ids: [r m], padded with -1.
        steps: tokens a row at most.
        leave: whether the first row that ends ends the stretch, so that another can enter.
        min_decode_batch: once half of the rows have ended, the others continue in half the width, and so on down to
            this one; each width is compiled. None: always in the full width.
        banned: ids that are never sampled.
        width: size of the recorded support; 0 samples from the whole vocabulary.
        mixed: whether rows whose settings cut nothing sample from the whole vocabulary all the same.
    """
    params = params if policy.unstack_layers is None else policy.unstack_layers(params)  # here, and not in each step
    step = partial(_step, policy, params, banned=banned, width=width, mixed=mixed)
    if min_decode_batch is not None:
        return _decode_narrowing(
            step, jnp.int32(0), rows, settings, stop_ids, steps=steps, min_decode_batch=min_decode_batch, width=width
        )
    min_active = jnp.where(leave, rows.active.sum(dtype=jnp.int32), 1)
    return _decode_while(step, jnp.int32(0), rows, settings, stop_ids, min_active, steps, width)[1:]


def _decode_while(step, i: Array, rows: DecodeState, settings, stop_ids, min_active, steps: int, width: int) -> tuple:
    """Steps from number `i` on, while at least `min_active` rows are active -> (the next number, rows, sampled)."""

    def continues(carry) -> Array:
        active = carry[1].active.sum(dtype=jnp.int32)
        return (carry[0] < steps) & (active > 0) & (active >= min_active)

    shape = (steps, len(rows.token))
    zero_ids, zero_logp = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    support = jnp.full((*shape, width), -1, jnp.int32) if width else None
    start = (i, rows, SampledTokens(zero_ids, zero_logp, zero_ids > 0, support))
    return jax.lax.while_loop(continues, lambda carry: step(settings, stop_ids, carry), start)


def _decode_narrowing(
    step, i: Array, rows: DecodeState, settings, stop_ids, *, steps: int, min_decode_batch: int, width: int
) -> tuple:
    """Decode in all rows until half of them have ended, and then in the other half alone -> (rows, sampled)."""
    half = len(rows.token) // 2
    if half < min_decode_batch:
        return _decode_while(step, i, rows, settings, stop_ids, 1, steps, width)[1:]
    i, rows, sampled = _decode_while(step, i, rows, settings, stop_ids, half + 1, steps, width)
    index = jnp.argsort(~rows.active, stable=True)[:half]
    half_rows = take_rows(rows, index)
    settings, stop_ids = Sampling(*(jnp.asarray(x)[index] for x in settings)), jnp.asarray(stop_ids)[index]
    half_rows, half_sampled = _decode_narrowing(
        step, i, half_rows, settings, stop_ids, steps=steps, min_decode_batch=min_decode_batch, width=width
    )
    rows = put_rows(rows, index, half_rows)
    later_u = jnp.arange(steps) >= i
    sampled = jax.tree.map(
        lambda x, new: x.at[:, index].set(jnp.where(later_u.reshape(-1, *(1,) * (x.ndim - 1)), new, x[:, index])),
        sampled,
        half_sampled,
    )
    return rows, sampled


ROW_FIELDS = ("token", "key", "count", "budget", "active")  # of DecodeState, besides the cache


def take_rows(rows: DecodeState, index: Array) -> DecodeState:
    """The state of some rows alone."""
    cache = jax.tree.map(lambda x: x.take(index, row_axis(x)), rows.cache)
    return DecodeState(cache, **{name: getattr(rows, name)[index] for name in ROW_FIELDS})


def put_rows(rows: DecodeState, index: Array, taken: DecodeState) -> DecodeState:
    """The state of all rows, with the new state of those that `take_rows` took."""

    def put(x: Array, new: Array) -> Array:
        return x.at[:, index].set(new) if row_axis(x) else x.at[index].set(new)

    cache = jax.tree.map(put, rows.cache, taken.cache)
    return DecodeState(cache, **{name: getattr(rows, name).at[index].set(getattr(taken, name)) for name in ROW_FIELDS})


def row_axis(x: Array) -> int:
    """Axis of the rows in a part of a cache: 1, after the layers, if keys and values of all layers are stacked."""
    return 1 if x.ndim == 5 else 0


def feed(
    policy: Policy,
    params: Params,
    rows: DecodeState,
    tokens_rs: Array,
    real_rs: Array,
    settings: Sampling,
    stop_ids: Array,
    *,
    banned: tuple[int, ...] = (),
    width: int = 0,
) -> tuple[DecodeState, SampledTokens]:
    """Append given tokens (padding only after them) and sample the first token that follows, in one forward pass.

    Rows that are not active stay as they are. The sampled tokens have no axis u.
    """
    real_rs = real_rs & rows.active[:, None]
    states, cache = policy.hidden(params, tokens_rs, None, real_rs.astype(jnp.int32), rows.cache)
    last_r = jnp.maximum(real_rs.sum(axis=1, dtype=jnp.int32) - 1, 0)
    last_rd = jnp.take_along_axis(states, last_r[:, None, None], axis=1)[:, 0]
    return _sample_next(policy, params, rows.replace(cache=cache), last_rd, settings, stop_ids, banned, width)


def _step(policy, params, settings, stop_ids, carry, *, banned, width, mixed=False):
    """Feed each active row its last token, and sample the next."""
    i, rows, sampled = carry
    live_r = rows.active
    states, cache = policy.hidden(params, rows.token[:, None], None, live_r[:, None].astype(jnp.int32), rows.cache)
    rows = rows.replace(cache=cache)
    rows, new = _sample_next(policy, params, rows, states[:, 0], settings, stop_ids, banned, width, mixed)
    return i + 1, rows, jax.tree.map(lambda all_x, x: all_x.at[i].set(x), sampled, new)


def _sample_next(
    policy, params, rows: DecodeState, states_rd: Array, settings, stop_ids, banned, width, mixed=False
) -> tuple[DecodeState, SampledTokens]:
    """Sample a token from each active row's hidden state."""
    live_r = rows.active
    uniform_r = jax.vmap(_uniform)(rows.key, rows.count)
    options = {"banned": banned, "width": width, "mixed": mixed}
    sampled = draw_token(policy.unembed(params, states_rd), uniform_r, settings, live_r, **options)
    token_r = jnp.where(live_r, sampled.token, rows.token)
    spent_r = live_r.astype(jnp.int32)
    rows = rows.replace(
        token=token_r,
        count=rows.count + spent_r,
        budget=rows.budget - spent_r,
        active=live_r & (rows.budget > 1) & ~(token_r[:, None] == stop_ids).any(axis=1),
    )
    return rows, sampled.replace(token=token_r)


def _uniform(key: Array, count: Array) -> Array:
    return jax.random.uniform(jax.random.fold_in(key, count))


# Scoring ----------------------------------------------------------------------------------------------


def logprobs(
    policy: Policy,
    params: Params,
    tokens: AnyArray,
    positions: AnyArray | None = None,
    segments: AnyArray | None = None,
    *,
    temperature: AnyArray | float = 1.0,
    banned: tuple[int, ...] = (),
    support: Array | None = None,
    chunk: int = 256,
    tree: PrefixTree | None = None,
    wanted: AnyArray | None = None,
) -> Scores:
    """Log-probability and entropy of every token given those before it in its segment, both [r s].

    The first token of a segment and padding score 0. Logits are computed `chunk` tokens at a time, and again in the
    backward pass, never as a whole [r, s, v] (M4).

    Args:
        policy: the model.
        params: its parameters.
        tokens: [r s].
        positions: [r s], within a segment.
        segments: [r s], 0 for padding.
        temperature: at which the tokens were sampled.
        banned: ids that could not be sampled.
        support: [r s k] ids that each token was drawn from, then -1; a token without any scores 0.
        chunk: tokens whose logits are computed together at most.
        tree: of a `Batch`: every token of a segment is scored, given its context in the tree, so that shared prefixes
            are computed once (F10).
        wanted: [r s] tokens to score; others score 0, and their logits are not computed.
    """
    tokens = jnp.asarray(tokens)
    segments = jnp.ones(tokens.shape, jnp.int32) if segments is None else jnp.asarray(segments)
    settings: dict[str, Any] = {"temperature": temperature, "banned": banned, "support": support, "chunk": chunk}
    if tree is not None:
        real = (segments > 0) & (jnp.asarray(tree.predecessor) >= 0)  # nothing precedes a context's first token
        real = real if wanted is None else real & jnp.asarray(wanted)
        return score_next(policy, params, tree_states(policy, params, tree, real), tokens, real, **settings)
    states = policy.hidden(params, tokens, positions, segments, None)[0]
    return score_states(policy, params, states, tokens, segments, wanted=wanted, **settings)


def tree_states(policy: Policy, params: Params, tree: PrefixTree, real_rs: AnyArray) -> Array:
    """Hidden states [r s d] before each token of rows, from their trees; of tokens that are not real, any state."""
    if policy.hidden_tree is None:
        raise BadInput("the rows share prefixes, and this policy has no hidden_tree: pack plain rows")
    states_rud = policy.hidden_tree(params, tree.tokens, tree.positions, tree.ends)
    return before_tokens(states_rud, tree, real_rs)


def before_tokens(x_ru: Array, tree: PrefixTree, real_rs: AnyArray) -> Array:
    """Values of a tree's tokens [r u ...], at the token before each token of a row: [r s ...]."""
    after_rs = jnp.where(jnp.asarray(real_rs), jnp.asarray(tree.predecessor), 0)
    return jax.vmap(lambda x_u, after_s: x_u[after_s])(x_ru, after_rs)


def score_states(
    policy: Policy,
    params: Params,
    states: Array,
    tokens: AnyArray,
    segments: AnyArray,
    *,
    wanted: AnyArray | None = None,
    temperature: AnyArray | float = 1.0,
    banned: tuple[int, ...] = (),
    support: Array | None = None,
    chunk: int = 256,
) -> Scores:
    """Log-probability and entropy of every token, as `logprobs` computes them, from the hidden states [r s d]."""
    segments = jnp.asarray(segments)
    follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    if wanted is not None:
        follows &= jnp.asarray(wanted)[:, 1:]
    support = None if support is None else support[:, 1:]
    settings: dict[str, Any] = {"temperature": temperature, "banned": banned, "support": support, "chunk": chunk}
    scores = score_next(policy, params, states[:, :-1], jnp.asarray(tokens)[:, 1:], follows, **settings)
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (1, 0))), scores)


def score_next(
    policy: Policy,
    params: Params,
    states_rsd: Array,
    tokens_rs: AnyArray,
    real_rs: AnyArray,
    *,
    temperature: AnyArray | float = 1.0,
    banned: tuple[int, ...] = (),
    support: Array | None = None,
    chunk: int = 256,
) -> Scores:
    """Log-probability and entropy of the `real` tokens given the hidden states of the tokens before them; else 0."""
    # No gradient reaches the temperature.
    temperature = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    # If XLA shards the vocabulary, devices communicate within a chunk, and must all run the same number of them.
    skips = policy.sharded is None or policy.mesh.shape.get("tensor", 1) == 1
    score = partial(_score_rows, temperature=temperature, banned=banned, chunk=chunk, skips=skips)
    rows = (jnp.asarray(states_rsd), jnp.asarray(tokens_rs), jnp.asarray(real_rs), support)
    # Each device scores its own rows, so that the gradient of the unembedding is summed over them once.
    if policy.sharded is not None:
        return policy.sharded.over_rows(score, params, rows)
    return score(policy.unembed, params, rows)


def _score_rows(unembed, params, rows: tuple, *, temperature: Array, banned, chunk: int, skips: bool) -> Scores:
    """Scores [r s] of the real tokens of these rows, chunk by chunk; padding is sorted to the end and not computed."""
    states, tokens, real, support = rows
    # Tokens that aren't real fill up the last chunk, and their values must not reach the gradient.
    states, tokens = jnp.where(real[..., None], states, jnp.zeros((), states.dtype)), jnp.where(real, tokens, 0)
    chunk = min(_bounded_chunk(unembed, params, states, chunk), max(real.size, 1))
    order = jnp.argsort(~real.reshape(-1), stable=True)
    order = jnp.pad(order, (0, -len(order) % chunk))  # duplicates come after all real tokens, or are cut off
    chunks = len(order) // chunk
    trips = (real.sum(dtype=jnp.int32) + chunk - 1) // chunk if skips else jnp.int32(chunks)

    def to_chunks(x: Array) -> Array:
        """[r s ...] -> [chunks, chunk, ...], real tokens first."""
        return x.reshape(-1, *x.shape[2:])[order].reshape(chunks, chunk, *x.shape[2:])

    logits_of, weights = _used_weights(unembed, params, states)
    head = _Head(logits_of, tuple(banned))
    scores: Any = _score_chunks(
        head,
        weights,
        temperature,
        to_chunks(states),
        to_chunks(tokens),
        support if support is None else to_chunks(support),
        trips,
    )
    place = order[: real.size]
    flat = [jnp.zeros(real.size, x.dtype).at[place].set(x.reshape(-1)[: real.size]) for x in scores]
    return Scores(*(jnp.where(real, x.reshape(real.shape), 0.0) for x in flat))


def _used_weights(unembed, params, states: Array) -> tuple[Callable, list[Array]]:
    """`(logits_of, weights)` with `unembed(params, x) = logits_of(weights, x)`; `weights` are the leaves that it reads.

    So a chunk has gradients of these alone, and no zeros are summed for all the others.
    """
    leaves, tree = jax.tree.flatten(params)

    def of_leaves(*inputs):
        return unembed(jax.tree.unflatten(tree, inputs[:-1]), inputs[-1])

    traced = jax.make_jaxpr(of_leaves)(*leaves, jax.ShapeDtypeStruct((1, states.shape[-1]), states.dtype)).jaxpr
    variables = {id(variable) for equation in traced.eqns for variable in equation.invars}
    index = [i for i, variable in enumerate(traced.invars[:-1]) if id(variable) in variables]

    def logits_of(weights: list[Array], x: Array) -> Array:
        inputs: list[Any] = [None] * len(leaves)
        for i, weight in zip(index, weights, strict=True):
            inputs[i] = weight
        return of_leaves(*inputs, x)

    return logits_of, [leaves[i] for i in index]


@dataclass(frozen=True, eq=False)
class _Head:
    """Static part of the distribution of a token."""

    logits_of: Callable[[list[Array], Array], Array]  # (weights, states [c d]) -> [c v]
    banned: tuple[int, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score_chunks(head: _Head, weights, temperature, states, tokens, support, trips) -> tuple[Array, Array]:
    """Log-probability and entropy [chunks, chunk] of the first `trips` chunks; what comes after them is 0.

    With p the softmax of the logits l over the temperature t, e the one-hot vector of the token, H the entropy:

        d logp / d l = (e - p) / t          d H / d l = - p (log p + H) / t

    The backward pass computes a chunk's logits once more; two numbers a token are saved for it.
    """
    return _score_forward(head, weights, temperature, states, tokens, support, trips)[0]


def _score_forward(head: _Head, weights, temperature, states, tokens, support, trips) -> tuple:
    def add(i, scores: tuple) -> tuple:
        scaled = apply_temperature(
            head.logits_of(weights, states[i]), jnp.broadcast_to(temperature, tokens.shape[1:]), head.banned
        )
        chunk_scores = _score(scaled, tokens[i], None if support is None else support[i])
        return tuple(x.at[i].set(y) for x, y in zip(scores, chunk_scores, strict=True))

    scores = jax.lax.fori_loop(0, trips, add, (jnp.zeros(tokens.shape, jnp.float32),) * 3)
    return scores[:2], (weights, temperature, states, tokens, support, trips, *scores[1:])


def _score(scaled: Array, tokens: Array, support: Array | None) -> tuple[Array, Array, Array]:
    """Log-probability, entropy and log-sum-exp of one chunk: [c v], [c], [c k] -> three of [c]."""
    if support is None:
        top = scaled.max(axis=-1)
        exp = jnp.exp(scaled - top[:, None])
        total = exp.sum(axis=-1)
        logsumexp = top + jnp.log(total)
        below = jnp.where(exp > 0, scaled - top[:, None], 0.0)  # minus infinity is probability 0
        return _pick(scaled, tokens) - logsumexp, jnp.log(total) - (exp * below).sum(axis=-1) / total, logsumexp
    is_recorded = support[:, 0] >= 0
    logits = jnp.where(is_recorded[:, None], _gather_support(scaled, support), 0.0)
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    logp, entropy = _pick(scaled, tokens) - logsumexp, _entropy(logits - logsumexp[:, None])
    return jnp.where(is_recorded, logp, 0.0), jnp.where(is_recorded, entropy, 0.0), logsumexp


def _score_backward(head: _Head, saved: tuple, d_scores: tuple) -> tuple:
    perturbed, (weights, temperature, states, tokens, support, trips, entropy, logsumexp) = saved
    d_logp, d_entropy = (None if isinstance(x, SymbolicZero) else x for x in d_scores)
    index = [i for i, mark in enumerate(perturbed) if mark is not None]  # of the weights that have a gradient

    def logits_of(trained: list[Array], x: Array) -> Array:
        all_weights = list(weights)
        for i, value in zip(index, trained, strict=True):
            all_weights[i] = value
        return head.logits_of(all_weights, x)

    def logits_gradient(i, logits: Array) -> Array:
        temperature_c = jnp.broadcast_to(temperature, tokens.shape[1:])
        scaled, scale_vjp = jax.vjp(lambda x: apply_temperature(x, temperature_c, head.banned), logits)
        cotangents = [jnp.zeros(tokens.shape[1:]) if x is None else x[i] for x in (d_logp, d_entropy)]
        if support is not None:
            return scale_vjp(jax.vjp(lambda x: _score(x, tokens[i], support[i])[:2], scaled)[1](tuple(cotangents))[0])[
                0
            ]
        logp = scaled - logsumexp[i][:, None]
        p = jnp.exp(logp)
        is_token = jnp.arange(scaled.shape[-1])[None] == tokens[i][:, None]
        d_scaled = jnp.where(is_token, cotangents[0][:, None], 0.0) - p * cotangents[0][:, None]
        if d_entropy is not None:
            surplus = jnp.where(p > 0, logp, 0.0) + entropy[i][:, None]  # log p + H
            d_scaled -= p * surplus * cotangents[1][:, None]
        return scale_vjp(d_scaled)[0]

    def add(i, gradients: tuple) -> tuple:
        d_trained, d_states = gradients
        logits, logits_vjp = jax.vjp(logits_of, [weights[n] for n in index], states[i])
        d_chunk, d_state = logits_vjp(logits_gradient(i, logits))
        d_trained = [x + y.astype(jnp.float32) for x, y in zip(d_trained, d_chunk, strict=True)]
        return d_trained, d_states.at[i].set(d_state)

    start = [jnp.zeros(weights[n].shape, jnp.float32) for n in index], jnp.zeros(states.shape, states.dtype)
    d_trained, d_states = jax.lax.fori_loop(0, trips, add, start)
    d_weights: list[Array | None] = [None] * len(weights)
    for i, value in zip(index, d_trained, strict=True):
        d_weights[i] = value.astype(weights[i].dtype)
    return d_weights, None, d_states, None, None, None


def _score_perturbed(head: _Head, *inputs) -> tuple:
    """The forward pass of a gradient, which notes the weights that have one."""
    perturbed = [jnp.zeros(()) if weight.perturbed else None for weight in inputs[0]]
    values = jax.tree.map(lambda x: x.value, inputs, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    scores, saved = _score_forward(head, *values)
    return scores, (perturbed, saved)


_score_chunks.defvjp(_score_perturbed, _score_backward, symbolic_zeros=True)


def _bounded_chunk(unembed, params, states, chunk: int) -> int:
    """At most `chunk` tokens, and few enough for `MAX_LOGITS`: several copies of a chunk's logits are alive at once."""
    v = jax.eval_shape(unembed, params, jax.ShapeDtypeStruct((1, states.shape[-1]), states.dtype)).shape[-1]
    return min(chunk, max(MAX_LOGITS // v, MIN_CHUNK))
