"""Sample and score tokens with one forward function.

A token is drawn by one uniform number from its request's key: the token at which the cumulated probability
passes it, in a fixed order of the vocabulary. Its log-probability is that under the distribution it was drawn from, and
`logprobs` scores tokens later under the same one, so that the ratio of an unchanged policy is 1 (F7):

    pi(token) = softmax(logits / temperature)   without banned tokens; renormalised over the recorded
                                                kept set where top-k, top-p or min-p cut the support

What banned tokens would have is part of this definition: with a probability m of theirs, every other token's
log-probability is higher by -log(1 - m) than that of an engine which bans nothing (3e-4 where m is 3e-4).

A row feeds the token that it sampled last, so `prefill` takes a prompt without its last token, and the
cache of a turn that ended can be appended to.
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

MAX_KEPT = 64
COLUMNS = 512  # of the vocabulary, when a token is drawn
LOGITS = 1 << 24  # of the tokens that are scored together, some 64 MB in float32
LEAST_CHUNK = 256  # of these tokens, below which a product is bound by reading the unembedding


class Sampling(NamedTuple):
    """How tokens are drawn, row by row; the last three act only where kept sets are recorded."""

    temperature: AnyArray  # r
    top_k: AnyArray  # r: at most this many; at most MAX_KEPT
    top_p: AnyArray  # r: the smallest set with this probability
    min_p: AnyArray  # r: at least this share of the largest probability


def sampling(rows: int, *, temperature=1.0, top_k=MAX_KEPT, top_p=1.0, min_p=0.0) -> Sampling:
    """Make the settings of `rows` rows, the same for every row."""
    warm, mass, share = (jnp.full(rows, x, jnp.float32) for x in (temperature, top_p, min_p))
    return Sampling(warm, jnp.full(rows, top_k, jnp.int32), mass, share)


class Rows(struct.PyTreeNode):
    """The state of decoding: everything that a row needs to go on."""

    cache: Cache
    token: Int[Array, "r"]  # sampled or given last, not yet in the cache
    key: Array  # r: of the request
    count: Int[Array, "r"]  # tokens sampled under that key
    budget: Int[Array, "r"]  # tokens that may still be sampled
    active: Bool[Array, "r"]


class Sampled(struct.PyTreeNode):
    """Result of a stretch of decoding, step by step (axis u); `live` says which rows sampled at a step."""

    token: Int[Array, "u r"]
    logp_sampled: Float[Array, "u r"]
    live: Bool[Array, "u r"]
    kept: Int[Array, "u r k"] | None  # the recorded set, -1 where there are fewer


# One token --------------------------------------------------------------------------------------------


def cool(logits: AnyArray, temperature: AnyArray, banned: tuple[int, ...]) -> Array:
    """Logits over the temperature in float32, without tokens that can't be sampled: [... v], [...] -> [... v]."""
    cooled = jnp.asarray(logits).astype(jnp.float32) / jnp.asarray(temperature)[..., None]
    if not banned:
        return cooled
    # A mask, and no write at these places, whose gradient would be a constant of all logits that XLA folds.
    return jnp.where(np.isin(np.arange(cooled.shape[-1]), banned), -jnp.inf, cooled)


def kept_set(cooled_rv: Array, settings: Sampling, width: int) -> Array:
    """The ids that stay after top-k, top-p and min-p, most likely first, -1 for the rest -> [r width]."""
    top_rk, id_rk = jax.lax.top_k(cooled_rv, width)
    share_rk = jnp.exp(top_rk - jax.nn.logsumexp(cooled_rv, axis=-1)[:, None])
    before_rk = jnp.cumsum(share_rk, axis=-1) - share_rk
    rank_rk = jnp.arange(width)[None, :]
    stays_rk = (rank_rk < settings.top_k[:, None]) & (before_rk < settings.top_p[:, None])
    stays_rk &= (share_rk >= settings.min_p[:, None] * share_rk[:, :1]) & (share_rk > 0)
    return jnp.where(stays_rk | (rank_rk == 0), id_rk, -1)


def cuts_support(settings: Any) -> Any:
    """Whether these settings leave tokens out: of a request, or of each row."""
    return (settings.top_p < 1) | (settings.min_p > 0) | (settings.top_k < MAX_KEPT)


def draw_token(
    logits_rv: Array,
    uniform_r: Array,
    settings: Sampling,
    live_r: Array,
    *,
    banned: tuple[int, ...],
    width: int,
    mixed: bool = False,
) -> Sampled:
    """A token for each row by its uniform number, without the axis u; `width` 0 keeps full support.

    With `mixed` rows whose settings cut nothing keep it too, and record no set.
    """
    cooled_rv = cool(logits_rv, settings.temperature, banned)
    if width == 0:
        return Sampled(*_invert(cooled_rv, uniform_r), live_r, None)
    if not mixed:
        return Sampled(*_draw_kept(cooled_rv, uniform_r, settings, width, live_r))
    # Outside of the branch, so that a row's bits don't depend on what stands beside it (E3).
    token_r, logp_r = _invert(cooled_rv, uniform_r)
    cuts_r = cuts_support(settings) & live_r
    whole = (token_r, logp_r, live_r, jnp.full((len(token_r), width), -1, token_r.dtype))
    cut = jax.lax.cond(
        cuts_r.any(), lambda _: _draw_kept(cooled_rv, uniform_r, settings, width, live_r), lambda given: given, whole
    )
    pick = partial(jax.tree.map, lambda x, y: jnp.where(cuts_r.reshape(-1, *(1,) * (x.ndim - 1)), x, y))
    return Sampled(*pick(cut, whole))


def _draw_kept(cooled_rv: Array, uniform_r: Array, settings: Sampling, width: int, live_r: Array) -> tuple:
    """The fields of a `Sampled` that is drawn from the kept set of each row."""
    kept_rk = kept_set(cooled_rv, settings, width)
    index_r, logp_r = _invert(_among(cooled_rv, kept_rk), uniform_r)
    token_r = jnp.take_along_axis(kept_rk, index_r[:, None], axis=-1)[:, 0]
    return token_r, logp_r, live_r, kept_rk


def _among(cooled: Array, kept: Array) -> Array:
    """The logits of a kept set, minus infinity where it has fewer: [c v], [c k] -> [c k]."""
    return jnp.where(kept >= 0, jnp.take_along_axis(cooled, jnp.maximum(kept, 0), axis=-1), -jnp.inf)


def _invert(logits_rv: Array, uniform_r: Array) -> tuple[Array, Array]:
    """(index, log-probability) of the entry where the cumulated probability passes the number.

    The vocabulary is laid out in columns, b entries high and w wide, and cumulated column by column: first whole
    columns, then the entries of the one that is hit. So every entry is met in a few vectorised passes.
    """
    x_rbw = _columns(logits_rv)
    top_r = x_rbw.max(axis=(1, 2))
    weight_rbw = jnp.exp(x_rbw - top_r[:, None, None])
    column_rw = weight_rbw.sum(axis=1)
    end_rw = jnp.cumsum(column_rw, axis=-1)
    total_r = end_rw[:, -1]
    target_r = uniform_r * total_r
    column_r = jnp.argmax((end_rw > target_r[:, None]) & (column_rw > 0), axis=-1)
    weight_rb = jnp.take_along_axis(weight_rbw, column_r[:, None, None], axis=2)[:, :, 0]
    edge_rb = _pick(end_rw - column_rw, column_r)[:, None] + jnp.cumsum(weight_rb, axis=-1)
    # An entry of no probability has no interval and can't be hit. Rounding may leave the last edge of a column short
    # of its end, and then its last possible entry is meant.
    hit_rb = (edge_rb > target_r[:, None]) & (weight_rb > 0)
    last_r = weight_rb.shape[1] - 1 - jnp.argmax(jnp.flip(weight_rb > 0, axis=-1), axis=-1)
    entry_r = jnp.where(hit_rb.any(axis=-1), jnp.argmax(hit_rb, axis=-1), last_r)
    index_r = entry_r * x_rbw.shape[2] + column_r
    return index_r, _pick(logits_rv, index_r) - top_r - jnp.log(total_r)


def _columns(x_rv: Array) -> Array:
    """[r v] -> [r b w]: entry b w + c is in column c; what is missing in the last row is impossible."""
    width = min(COLUMNS, x_rv.shape[1])
    short = -x_rv.shape[1] % width
    return jnp.pad(x_rv, ((0, 0), (0, short)), constant_values=-jnp.inf).reshape(len(x_rv), -1, width)


def _pick(x: Array, index: Array) -> Array:
    """[c v], [c] -> [c]."""
    return jnp.take_along_axis(x, index[:, None], axis=-1)[:, 0]


def _entropy(logp: Array) -> Array:
    """Entropy of the distributions along the last axis; -inf is probability 0."""
    possible = jnp.isfinite(logp)
    finite = jnp.where(possible, logp, 0.0)
    return -jnp.sum(jnp.where(possible, jnp.exp(finite) * finite, 0.0), axis=-1)


def margin(
    policy: Policy, params: Params, tokens: AnyArray, key: Array, count: int, *, temperature=1.0, banned=()
) -> Array:
    """Measure how near the draw of the last of these tokens was to giving another one: E3's near-ties.

    It is the distance of the uniform number to the nearest edge of the token's interval, under full support. `count`
    tokens had been drawn under `key` before it.
    """
    tokens_rs = jnp.asarray(tokens)[None]
    states = policy.hidden(params, tokens_rs[:, :-1], None, jnp.ones_like(tokens_rs[:, :-1]), None)[0]
    share_rv = jax.nn.softmax(cool(policy.unembed(params, states[:, -1]), jnp.full(1, temperature), banned))
    share_v, column_v = share_rv[0], jnp.arange(share_rv.shape[1]) % COLUMNS
    token, before_v = tokens_rs[0, -1], jnp.arange(len(share_v))
    # In the order of a draw: whole columns, then the entries above it in its own.
    earlier_v = (column_v < column_v[token]) | ((column_v == column_v[token]) & (before_v < token))
    edge = jnp.where(earlier_v, share_v, 0.0).sum()
    uniform = _uniform(key, jnp.int32(count))
    return jnp.maximum(jnp.minimum(uniform - edge, edge + share_v[token] - uniform), 0.0)


# Many tokens ------------------------------------------------------------------------------------------


def prefill(policy: Policy, params: Params, cache: Cache, tokens_rs: Array, real_rs: Array) -> Cache:
    """The cache with these tokens appended, row by row, where they are `real`."""
    return policy.hidden(params, tokens_rs, None, real_rs.astype(jnp.int32), cache)[1]


def start_rows(cache: Cache, token_r: Array, key_r: Array, budget_r: Array) -> Rows:
    """Rows that are about to sample their first token after `token`."""
    return Rows(cache, token_r, key_r, jnp.zeros(len(token_r), jnp.int32), budget_r, budget_r > 0)


def decode(
    policy: Policy,
    params: Params,
    rows: Rows,
    settings: Sampling,
    stop_ids: Array,
    *,
    steps: int,
    leave: Array | bool = False,
    narrowest: int | None = None,
    banned: tuple[int, ...] = (),
    width: int = 0,
    mixed: bool = False,
) -> tuple[Rows, Sampled]:
    """Sample up to `steps` tokens in every active row, ending early when none is left.

    A row ends with a token among its `stop_ids` [r m] (padded with -1), which is sampled and counts, or when its
    budget is used up. With `leave` the first row that ends ends the stretch, so that another can enter. With
    `narrowest` the rows that are left when half of them have ended go on in half the width, and so on down to that
    width, each of which is compiled. `width` is the size of the recorded sets, 0 for full support, which with `mixed`
    the rows have whose settings cut nothing.
    """
    laid = params if policy.unstack_layers is None else policy.unstack_layers(params)  # here, and not in each step
    step = partial(_step, policy, laid, banned=banned, width=width, mixed=mixed)
    if narrowest is not None:
        return _narrowing(step, jnp.int32(0), rows, settings, stop_ids, steps=steps, narrowest=narrowest, width=width)
    wanted = jnp.where(leave, rows.active.sum(dtype=jnp.int32), 1)
    return _while_active(step, jnp.int32(0), rows, settings, stop_ids, wanted, steps, width)[1:]


def _while_active(step, i: Array, rows: Rows, settings, stop_ids, wanted, steps: int, width: int) -> tuple:
    """Steps from number `i` on, while at least so many rows are active -> (the next number, rows, sampled)."""

    def going(carry) -> Array:
        active = carry[1].active.sum(dtype=jnp.int32)
        return (carry[0] < steps) & (active > 0) & (active >= wanted)

    start = (i, rows, _no_tokens(steps, len(rows.token), width))
    return jax.lax.while_loop(going, lambda carry: step(settings, stop_ids, carry), start)


def _narrowing(step, i: Array, rows: Rows, settings, stop_ids, *, steps: int, narrowest: int, width: int) -> tuple:
    """Steps in all rows until half of them have ended, and then in the other half alone -> (rows, sampled)."""
    half = len(rows.token) // 2
    if half < narrowest:
        return _while_active(step, i, rows, settings, stop_ids, 1, steps, width)[1:]
    i, rows, sampled = _while_active(step, i, rows, settings, stop_ids, half + 1, steps, width)
    left = jnp.argsort(~rows.active, stable=True)[:half]
    own = take_rows(rows, left)
    settings, stop_ids = Sampling(*(jnp.asarray(x)[left] for x in settings)), jnp.asarray(stop_ids)[left]
    own, more = _narrowing(step, i, own, settings, stop_ids, steps=steps, narrowest=narrowest, width=width)
    rows = put_rows(rows, left, own)
    later_u = jnp.arange(steps) >= i
    sampled = jax.tree.map(
        lambda x, now: x.at[:, left].set(jnp.where(later_u.reshape(-1, *(1,) * (x.ndim - 1)), now, x[:, left])),
        sampled,
        more,
    )
    return rows, sampled


EACH = ("token", "key", "count", "budget", "active")  # of a row, beside its cache


def take_rows(rows: Rows, index: Array) -> Rows:
    """Take some rows apart."""
    cache = jax.tree.map(lambda x: x.take(index, row_axis(x)), rows.cache)
    return Rows(cache, **{name: getattr(rows, name)[index] for name in EACH})


def put_rows(rows: Rows, index: Array, own: Rows) -> Rows:
    """Put rows that `take_rows` took in their places again."""
    cache = jax.tree.map(partial(_put, index=index), rows.cache, own.cache)
    return Rows(cache, **{name: getattr(rows, name).at[index].set(getattr(own, name)) for name in EACH})


def row_axis(x: Array) -> int:
    """Find the axis of the rows in a part of a cache: after the layers, where keys and values of all are stacked."""
    return 1 if x.ndim == 5 else 0


def _put(x: Array, own: Array, *, index: Array) -> Array:
    return x.at[:, index].set(own) if row_axis(x) else x.at[index].set(own)


def _no_tokens(steps: int, rows: int, width: int) -> Sampled:
    nothing, zero = jnp.zeros((steps, rows), jnp.int32), jnp.zeros((steps, rows), jnp.float32)
    kept = jnp.full((steps, rows, width), -1, jnp.int32) if width else None
    return Sampled(nothing, zero, nothing > 0, kept)


def feed(
    policy: Policy,
    params: Params,
    rows: Rows,
    tokens_rs: Array,
    real_rs: Array,
    settings: Sampling,
    stop_ids: Array,
    *,
    banned: tuple[int, ...] = (),
    width: int = 0,
) -> tuple[Rows, Sampled]:
    """Append given tokens (padding only after them) and sample the first token that follows, in one forward pass.

    Rows that are not active stay as they are. What comes back has no axis u.
    """
    real_rs = real_rs & rows.active[:, None]
    states, cache = policy.hidden(params, tokens_rs, None, real_rs.astype(jnp.int32), rows.cache)
    last_r = jnp.maximum(real_rs.sum(axis=1, dtype=jnp.int32) - 1, 0)
    last_rd = jnp.take_along_axis(states, last_r[:, None, None], axis=1)[:, 0]
    return _choose(policy, params, rows.replace(cache=cache), last_rd, settings, stop_ids, banned, width)


def _step(policy, params, settings, stop_ids, carry, *, banned, width, mixed=False):
    """Feed each active row its last token, draw the next."""
    i, rows, sampled = carry
    live_r = rows.active
    states, cache = policy.hidden(params, rows.token[:, None], None, live_r[:, None].astype(jnp.int32), rows.cache)
    rows = rows.replace(cache=cache)
    rows, now = _choose(policy, params, rows, states[:, 0], settings, stop_ids, banned, width, mixed)
    return i + 1, rows, jax.tree.map(lambda all_x, x: all_x.at[i].set(x), sampled, now)


def _choose(
    policy, params, rows: Rows, states_rd: Array, settings, stop_ids, banned, width, mixed=False
) -> tuple[Rows, Sampled]:
    """Draw a token from each active row's hidden state."""
    live_r = rows.active
    uniform_r = jax.vmap(_uniform)(rows.key, rows.count)
    how = {"banned": banned, "width": width, "mixed": mixed}
    drawn = draw_token(policy.unembed(params, states_rd), uniform_r, settings, live_r, **how)
    token_r = jnp.where(live_r, drawn.token, rows.token)
    spent_r = live_r.astype(jnp.int32)
    rows = rows.replace(
        token=token_r,
        count=rows.count + spent_r,
        budget=rows.budget - spent_r,
        active=live_r & (rows.budget > 1) & ~(token_r[:, None] == stop_ids).any(axis=1),
    )
    return rows, drawn.replace(token=token_r)


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
    kept: Array | None = None,
    chunk: int = 256,
    tree: PrefixTree | None = None,
    wanted: AnyArray | None = None,
) -> Scores:
    """Log-probability and entropy of every token given those before it in its segment, both [r s].

    The first token of a segment and padding score 0, and so does what is not `wanted` [r s], whose logits are not
    computed. `kept` [r s k] holds recorded sets; then a token without one scores 0 too. The vocabulary is met `chunk`
    tokens at a time, and again in the backward pass, never as a whole [r, s, v] (M4). With the `tree` of a `Batch`,
    every token of a segment is scored, given its context in the tree: what contexts begin with alike is computed
    once (F10).
    """
    tokens = jnp.asarray(tokens)
    segments = jnp.ones(tokens.shape, jnp.int32) if segments is None else jnp.asarray(segments)
    settings: dict[str, Any] = {"temperature": temperature, "banned": banned, "kept": kept, "chunk": chunk}
    if tree is not None:
        real = (segments > 0) & (jnp.asarray(tree.after) >= 0)  # before a context's first token nothing stands
        real = real if wanted is None else real & jnp.asarray(wanted)
        return score_next(policy, params, tree_states(policy, params, tree, real), tokens, real, **settings)
    states = policy.hidden(params, tokens, positions, segments, None)[0]
    return score_states(policy, params, states, tokens, segments, wanted=wanted, **settings)


def tree_states(policy: Policy, params: Params, tree: PrefixTree, real_rs: AnyArray) -> Array:
    """Hidden states [r s d] before each token of rows, from their trees; what is not real has that of some token."""
    if policy.hidden_tree is None:
        raise BadInput("the rows share prefixes, and this policy has no hidden_tree: pack plain rows")
    states_rud = policy.hidden_tree(params, tree.tokens, tree.positions, tree.ends)
    return before_tokens(states_rud, tree, real_rs)


def before_tokens(x_ru: Array, tree: PrefixTree, real_rs: AnyArray) -> Array:
    """What a tree's tokens have [r u ...], at the token before each of a row's: [r s ...]."""
    after_rs = jnp.where(jnp.asarray(real_rs), jnp.asarray(tree.after), 0)
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
    kept: Array | None = None,
    chunk: int = 256,
) -> Scores:
    """Log-probability and entropy of every token as `logprobs` gives them, from the hidden states [r s d].

    Where `wanted` [r s] is false a token is not scored, and costs nothing.
    """
    segments = jnp.asarray(segments)
    follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    if wanted is not None:
        follows &= jnp.asarray(wanted)[:, 1:]
    kept = None if kept is None else kept[:, 1:]
    settings: dict[str, Any] = {"temperature": temperature, "banned": banned, "kept": kept, "chunk": chunk}
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
    kept: Array | None = None,
    chunk: int = 256,
) -> Scores:
    """Log-probability and entropy of tokens given the hidden states of the tokens before them, 0 where not `real`."""
    # No gradient reaches the temperature.
    warm = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    # Where XLA divides a vocabulary, devices meet within a chunk, and must all come to the same number of them.
    skips = policy.settled is None or policy.mesh.shape.get("tensor", 1) == 1
    score = partial(_score_rows, temperature=warm, banned=banned, chunk=chunk, skips=skips)
    rows = (jnp.asarray(states_rsd), jnp.asarray(tokens_rs), jnp.asarray(real_rs), kept)
    # Each device goes through its own rows, so that the gradient of the unembedding is summed over them once.
    if policy.settled is not None:
        return policy.settled.over_rows(score, params, rows)
    return score(policy.unembed, params, rows)


def _score_rows(unembed, params, rows: tuple, *, temperature: Array, banned, chunk: int, skips: bool) -> Scores:
    """Scores [r s] of the real tokens of these rows, which come first, chunk by chunk; the others are not computed."""
    states, tokens, real, kept = rows
    # What isn't real fills up the last chunk, and whatever stands there must not reach the gradient.
    states, tokens = jnp.where(real[..., None], states, jnp.zeros((), states.dtype)), jnp.where(real, tokens, 0)
    chunk = min(_bounded_chunk(unembed, params, states, chunk), max(real.size, 1))
    order = jnp.argsort(~real.reshape(-1), stable=True)
    order = jnp.pad(order, (0, -len(order) % chunk))  # what comes twice is behind all that is real, or is cut off
    chunks = len(order) // chunk
    trips = (real.sum(dtype=jnp.int32) + chunk - 1) // chunk if skips else jnp.int32(chunks)

    def first(x: Array) -> Array:
        """[r s ...] -> [chunks, chunk, ...], what is real before what isn't."""
        return x.reshape(-1, *x.shape[2:])[order].reshape(chunks, chunk, *x.shape[2:])

    logits_of, weights = _weights_read(unembed, params, states)
    form = _Form(logits_of, tuple(banned))
    scores: Any = _score_chunks(
        form, weights, temperature, first(states), first(tokens), kept if kept is None else first(kept), trips
    )
    place = order[: real.size]
    whole = [jnp.zeros(real.size, x.dtype).at[place].set(x.reshape(-1)[: real.size]) for x in scores]
    return Scores(*(jnp.where(real, x.reshape(real.shape), 0.0) for x in whole))


def _weights_read(unembed, params, states: Array) -> tuple[Callable, list[Array]]:
    """`(logits_of, weights)` with `unembed(params, x) = logits_of(weights, x)`, of the parameters that it reads alone.

    So the gradient of a chunk is that of these, and no zeros are summed for all the others.
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
class _Form:
    """What is static of the distribution of a token."""

    logits_of: Callable[[list[Array], Array], Array]  # (weights, states [c d]) -> [c v]
    banned: tuple[int, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score_chunks(form: _Form, weights, temperature, states, tokens, kept, trips) -> tuple[Array, Array]:
    """Log-probability and entropy [chunks, chunk] of the first `trips` chunks; what comes after them is 0.

    With p the softmax of the logits l over the temperature t, e the one-hot vector of the token, H the entropy:

        d logp / d l = (e - p) / t          d H / d l = - p (log p + H) / t

    The backward pass multiplies a chunk's logits out once more, and keeps one number a token.
    """
    return _score_forward(form, weights, temperature, states, tokens, kept, trips)[0]


def _score_forward(form: _Form, weights, temperature, states, tokens, kept, trips) -> tuple:
    def add(i, done: tuple) -> tuple:
        cooled = cool(form.logits_of(weights, states[i]), jnp.broadcast_to(temperature, tokens.shape[1:]), form.banned)
        scores = _score(cooled, tokens[i], None if kept is None else kept[i])
        return tuple(x.at[i].set(y) for x, y in zip(done, scores, strict=True))

    scores = jax.lax.fori_loop(0, trips, add, (jnp.zeros(tokens.shape, jnp.float32),) * 3)
    return scores[:2], (weights, temperature, states, tokens, kept, trips, *scores[1:])


def _score(cooled: Array, tokens: Array, kept: Array | None) -> tuple[Array, Array, Array]:
    """Log-probability, entropy and log of the sum of exponentials, of one chunk: [c v], [c], [c k]."""
    if kept is None:
        top = cooled.max(axis=-1)
        share = jnp.exp(cooled - top[:, None])
        total = share.sum(axis=-1)
        weight = top + jnp.log(total)
        below = jnp.where(share > 0, cooled - top[:, None], 0.0)  # minus infinity is probability 0
        return _pick(cooled, tokens) - weight, jnp.log(total) - (share * below).sum(axis=-1) / total, weight
    recorded = kept[:, 0] >= 0
    among = jnp.where(recorded[:, None], _among(cooled, kept), 0.0)
    weight = jax.nn.logsumexp(among, axis=-1)
    logp, entropy = _pick(cooled, tokens) - weight, _entropy(among - weight[:, None])
    return jnp.where(recorded, logp, 0.0), jnp.where(recorded, entropy, 0.0), weight


def _score_backward(form: _Form, saved: tuple, d_scores: tuple) -> tuple:
    marks, (weights, temperature, states, tokens, kept, trips, entropy, weight) = saved
    d_logp, d_entropy = (None if isinstance(x, SymbolicZero) else x for x in d_scores)
    moved = [i for i, mark in enumerate(marks) if mark is not None]  # the weights that have a gradient

    def logits_of(some: list[Array], x: Array) -> Array:
        every = list(weights)
        for i, value in zip(moved, some, strict=True):
            every[i] = value
        return form.logits_of(every, x)

    def logits_gradient(i, logits: Array) -> Array:
        warm = jnp.broadcast_to(temperature, tokens.shape[1:])
        cooled, uncool = jax.vjp(lambda x: cool(x, warm, form.banned), logits)
        ups = [jnp.zeros(tokens.shape[1:]) if x is None else x[i] for x in (d_logp, d_entropy)]
        if kept is not None:
            return uncool(jax.vjp(lambda x: _score(x, tokens[i], kept[i])[:2], cooled)[1](tuple(ups))[0])[0]
        log_share = cooled - weight[i][:, None]
        share = jnp.exp(log_share)
        hit = jnp.arange(cooled.shape[-1])[None] == tokens[i][:, None]
        change = jnp.where(hit, ups[0][:, None], 0.0) - share * ups[0][:, None]
        if d_entropy is not None:
            surprise = jnp.where(share > 0, log_share, 0.0) + entropy[i][:, None]
            change -= share * surprise * ups[1][:, None]
        return uncool(change)[0]

    def add(i, done: tuple) -> tuple:
        d_weights, d_states = done
        logits, back = jax.vjp(logits_of, [weights[at] for at in moved], states[i])
        d_some, d_state = back(logits_gradient(i, logits))
        return [x + y.astype(jnp.float32) for x, y in zip(d_weights, d_some, strict=True)], d_states.at[i].set(d_state)

    start = [jnp.zeros(weights[at].shape, jnp.float32) for at in moved], jnp.zeros(states.shape, states.dtype)
    d_some, d_states = jax.lax.fori_loop(0, trips, add, start)
    d_weights: list[Array | None] = [None] * len(weights)
    for i, value in zip(moved, d_some, strict=True):
        d_weights[i] = value.astype(weights[i].dtype)
    return d_weights, None, d_states, None, None, None


def _score_marked(form: _Form, *inputs) -> tuple:
    """The forward pass of a gradient, which keeps which of the weights have one."""
    marks = [jnp.zeros(()) if weight.perturbed else None for weight in inputs[0]]
    values = jax.tree.map(lambda x: x.value, inputs, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    scores, saved = _score_forward(form, *values)
    return scores, (marks, saved)


_score_chunks.defvjp(_score_marked, _score_backward, symbolic_zeros=True)


def _bounded_chunk(unembed, params, states, chunk: int) -> int:
    """At most `chunk` tokens, and so few that their logits stay below `LOGITS`: several copies are alive at once."""
    v = jax.eval_shape(unembed, params, jax.ShapeDtypeStruct((1, states.shape[-1]), states.dtype)).shape[-1]
    return min(chunk, max(LOGITS // v, LEAST_CHUNK))
