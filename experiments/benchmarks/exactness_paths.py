"""Log-probabilities of real weights by every path that computes one, against a forward pass in float64 (`float64`).

    sampled        an engine samples after fresh prompts, two samples each, from the whole distribution
    sampled again  it continues from its caches: prompts with those answers, and some tokens after them
    greedy         choices of top_k=1; the error is the distance to a better token's logit
    scored         the same contexts as rows of `logprobs`, as in a trainer
    scored in trees     packed by `pack_tree`, with shared prefixes
    echoed         prompts that a gateway scores: /v1/completions with echo and no new token

Contexts are English text if the model has a tokenizer, else random tokens. `measure_paths` and `compare_paths` run in
separate processes: one has the requested mode, the other has the weights in float64, a layer at a time.
"""

import asyncio
import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from flowgrpo import launch
from flowgrpo.batching.collate import collate
from flowgrpo.batching.prefix_tree import pack_tree
from flowgrpo.contracts import Completion, Request
from flowgrpo.gateway.serving import ModelServer, ServerSettings
from flowgrpo.gateway.wire import parse_text_request
from flowgrpo.generate.engine import Engine, EngineSettings
from flowgrpo.generate.sampler import MAX_TOP_K, logprobs
from flowgrpo.learner.update import make_score
from flowgrpo.models.hf import Model, load_model
from flowgrpo.report.tables import significant
from flowgrpo.types import Trajectory, Turn

from . import float64

SAMPLES = 2  # of each prompt; the second copies the first one's cache
ANSWER, OBSERVATION = 40, 24  # tokens of an answer, and of what follows it
CHUNK = 256  # tokens of a prompt that enter a cache together
EDGES = (0, 128, 512, 1024)  # of the groups of positions
BAR = 2e-5
PROSE = ("argparse", "asyncio", "decimal", "difflib", "doctest", "enum", "logging", "pdb", "statistics", "turtle")


class ScoredContext(NamedTuple):
    """Log-probabilities of a context's tokens from `start` on, and the path that computed them."""

    path: str
    tokens: tuple[int, ...]
    start: int
    logp: tuple[float, ...]


def prose() -> str:
    """Docstrings of the standard library, some 100 kB of English with code in it."""
    modules = [__import__(name) for name in PROSE]
    members = [member for module in modules for _, member in sorted(vars(module).items()) if inspect.isclass(member)]
    return "\n\n".join(filter(None, map(inspect.getdoc, [*modules, *members])))


def make_prompts(model: Model, lengths: Sequence[int]) -> list[list[int]]:
    """A context of each length, all with different text."""
    total = sum(lengths) + OBSERVATION
    if model.tokenizer is None:
        ids = np.random.default_rng(0).integers(3, model.config.v, total).tolist()
    else:
        ids = list(model.tokenizer.encode(prose()))[:total]
    ends = np.cumsum(lengths).tolist()
    return [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def measure_paths(name: str, exact: bool, lengths: Sequence[int]) -> list[ScoredContext]:
    """Log-probabilities by all paths in this mode; JAX must not have started in this process."""
    launch.configure(exact=exact)
    model = load_model(name)
    slot_length = max(lengths) + 2 * ANSWER + OBSERVATION
    prompts = make_prompts(model, lengths)
    engine = Engine(
        model.policy,
        model.params,
        EngineSettings(
            slots=len(prompts) * SAMPLES,
            slot_length=slot_length,
            chunk=CHUNK,
            banned=model.banned,
            max_recorded_top_k=MAX_TOP_K,
            mixed=True,
        ),
    )
    with engine:
        first = _ask(engine, "sampled", [prompt for prompt in prompts for _ in range(SAMPLES)], seed=0)
        resampled = _ask(
            engine, "sampled again", [context.tokens for context in first[::SAMPLES]], seed=1, added=prompts[0]
        )
        greedy = _ask(engine, "greedy", prompts, seed=2, top_k=1)
        echoed = _echo(model, engine, [scored.tokens for scored in resampled], slot_length)
    contexts = [context.tokens for pair in zip(resampled, first[1::SAMPLES], strict=True) for context in pair]
    scored = [*_score(model, contexts[::2], slot_length), *_score_trees(model, contexts, slot_length)]
    return [*first, *resampled, *greedy, *scored, *echoed]


def _ask(
    engine: Engine, path: str, contexts: Sequence[Sequence[int]], *, seed: int, top_k: int = MAX_TOP_K, added=()
) -> list[ScoredContext]:
    """Sample after contexts and `added` tokens; with these, a context ends with an answer that must be cached."""
    keys, requests = jax.random.split(jax.random.key(seed), len(contexts)), []
    for context, key in zip(contexts, keys, strict=True):
        tokens = [*context, *added[:OBSERVATION]]
        answer_positions = range(len(context) - ANSWER, len(context)) if added else ()
        chosen = [i in answer_positions for i in range(len(tokens))]
        requests.append(Request(tokens, key, ANSWER, top_k=top_k, chosen=chosen))
    answers: list[Completion] = engine.generate(requests)
    results = []
    for request, answer in zip(requests, answers, strict=True):
        assert not added or answer.reused >= len(request.tokens) - OBSERVATION - 1
        tokens = (*request.tokens, *answer.tokens)
        results.append(ScoredContext(path, tokens, len(request.tokens), tuple(answer.logp_sampled)))
    return results


def _score(model: Model, contexts: Sequence[tuple[int, ...]], room: int) -> list[ScoredContext]:
    """Score whole contexts in rows of one length."""
    rows = np.zeros((len(contexts), room), np.int32)
    for row, tokens in zip(rows, contexts, strict=True):
        row[: len(tokens)] = tokens
    real = np.arange(room) < np.array([[len(tokens)] for tokens in contexts])
    score = jax.jit(partial(logprobs, model.policy, banned=model.banned))
    logp_rs = [
        np.asarray(score(model.params, rows[r : r + 1], segments=real[r : r + 1]).logp)[0] for r in range(len(rows))
    ]
    return [
        ScoredContext("scored", tokens, 1, tuple(map(float, logp_s[1 : len(tokens)])))
        for tokens, logp_s in zip(contexts, logp_rs, strict=True)
    ]


def _score_trees(model: Model, contexts: Sequence[tuple[int, ...]], room: int) -> list[ScoredContext]:
    """Score whole contexts in rows of trees: a shared prefix is computed once."""
    group = []
    for tokens in contexts:
        chosen_s = np.arange(len(tokens)) > 0
        turn = Turn(np.array(tokens, np.int32), chosen_s, np.zeros(len(tokens), np.float32))
        group.append(Trajectory([turn], outcome=1.0, group=0))
    trajectories = collate(group)
    one_nt = np.ones(trajectories.turns.shape, np.float32)
    weight_ntl = np.asarray(trajectories.chosen, np.float32)
    batch = pack_tree(trajectories, one_nt, weight_ntl, row_length=2 * room, entries=SAMPLES * room)
    assert batch.tree is not None
    assert (batch.tree.ends > 0).sum() < sum(map(len, contexts))  # something is shared
    score = jax.jit(make_score(model.policy, banned=model.banned))
    logp = [np.full(len(tokens), np.nan) for tokens in contexts]
    for r in range(len(batch.tokens)):
        row = jax.tree.map(lambda x, r=r: x[r : r + 1], batch)
        logp_s = np.asarray(score(model.params, row).logp)[0]
        for at in np.flatnonzero(row.chosen[0]):
            logp[int(row.trajectory[0, at])][int(row.slot[0, at])] = logp_s[at]
    return [
        ScoredContext("scored in trees", tokens, 1, tuple(map(float, values[1:])))
        for tokens, values in zip(contexts, logp, strict=True)
    ]


def _echo(model: Model, engine: Engine, contexts: Sequence[tuple[int, ...]], room: int) -> list[ScoredContext]:
    """Have a gateway score prompts."""
    if model.tokenizer is None:
        return []
    settings = ServerSettings(max_tokens=ANSWER, context_tokens=room + 1)
    server = ModelServer(engine, model.tokenizer, model.policy, model.params, settings)
    echoed = []
    for tokens in contexts:
        body = {"prompt": list(tokens), "max_tokens": 0, "echo": True, "logprobs": 1}
        (answer,) = asyncio.run(server.complete(parse_text_request(body)))
        assert answer.prompt_scores is not None
        logp = [logp for logp, _ in answer.prompt_scores[1:]]
        echoed.append(ScoredContext("echoed", tokens, 1, tuple(value for value in logp if value is not None)))
    return echoed


def compare_paths(name: str, scored: Sequence[ScoredContext]) -> list[dict[str, Any]]:
    """Errors of all paths against float64, by positions -> a record of each."""
    model = load_model(name)
    params = {key: np.asarray(value) for key, value in model.params.items()}
    contexts = {one.tokens for one in scored}
    # a prefix of another context is scored with it
    whole = [t for t in contexts if not any(len(o) > len(t) and o[: len(t)] == t for o in contexts)]
    reference = float64.Reference(params, model.config, model.banned)
    exact = {tokens: reference.score(tokens) for tokens in sorted(whole, key=len, reverse=True)}
    errors: dict[tuple[str, int], list[np.ndarray]] = {}
    for one in scored:
        scores = next(s for tokens, s in exact.items() if tokens[: len(one.tokens)] == one.tokens)
        for at, error in _errors(one, scores):
            errors.setdefault((one.path, at), []).append(error)
    return [_record(path, at, np.concatenate(parts)) for (path, at), parts in sorted(errors.items())]


def _errors(one: ScoredContext, reference: dict[str, np.ndarray]) -> Iterable[tuple[int, np.ndarray]]:
    """Absolute errors of a context's tokens, grouped by position."""
    span = slice(one.start, len(one.tokens))
    if one.path == "greedy":
        off = np.maximum(-reference["margin"][span], 0.0)
    else:
        kind = "logp_all" if one.path == "echoed" else "logp"
        off = np.abs(np.asarray(one.logp, np.float64) - reference[kind][span])
    group = np.searchsorted(EDGES, np.arange(one.start, len(one.tokens)), side="right") - 1
    for at in sorted(set(group.tolist())):
        yield EDGES[at], off[group == at]


def _record(path: str, start: int, error: np.ndarray) -> dict[str, Any]:
    following = [edge for edge in EDGES if edge > start]
    return {
        "path": path,
        "positions": f"{start}-{following[0] - 1}" if following else f"{start}-",
        "tokens": len(error),
        "max": significant(float(error.max())),
        "p99": significant(float(np.quantile(error, 0.99))),
        "mean": significant(float(error.mean())),
        "over_bar": int((error > BAR).sum()),
    }
