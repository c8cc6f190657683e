"""This framework on real weights, through its public functions: an engine, an update, and a hosted rollout with both.

`ceilings` and `profile` have no competitors: they measure the machine's speed on products of the model's shapes, and
the time of the parts of a decode step, a prefill and an update.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from flowgrpo import launch
from flowgrpo.algorithms.policy_gradient import grpo
from flowgrpo.batching.layouts import full_batch
from flowgrpo.contracts import HostEnv, HostObservation, HostStep, Request, RewardResult
from flowgrpo.generate.engine import Engine, EngineSettings
from flowgrpo.generate.sampler import decode, draw_token, logprobs, make_sampling, prefill, start_rows
from flowgrpo.learner.state import adamw, init_learner
from flowgrpo.learner.update import UpdateSettings, make_update
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.hf import Model, load_model
from flowgrpo.parallel.offload import HostOffloader, placement_table
from flowgrpo.rewards.combine import batch_reward
from flowgrpo.rollout.hosted import RolloutResult, hosted
from flowgrpo.rollout.records import to_trajectories
from flowgrpo.training.iteration import Iteration, RolloutShape, Staging, hosted_rollout
from flowgrpo.training.language_model import default_min_decode_batch
from flowgrpo.training.planner import OFFLOAD
from flowgrpo.training.stages import IterationSettings, TrainState, init_train_state, make_update_stages
from flowgrpo.types import Status, Task

from ..measuring import medians_in_turn
from . import protocol
from .real_torch import step_seconds, timed
from .real_workload import CLIP, RATE, SHORT, Sizes, random_ids, step_prompts

CHUNK = 256  # tokens per prefill chunk, as in the agent's recipe
MICRO_ROWS = 1  # a tree then has 1,024 tokens
REPEATS = 5  # of a part in a profile, and of a product

# The race -----------------------------------------------------------------------------------------------


def _decode(lane: protocol.Lane, sizes: Sizes, model: Model) -> None:
    """Prefill fresh prompts in an engine, then sample from them and, in a small engine, from one of them."""
    sizes_of_engine: dict[str, Any] = {"slot_length": sizes.prompt + sizes.long, "chunk": CHUNK}
    with (
        Engine(
            model.policy,
            model.params,
            EngineSettings(slots=sizes.rows, min_decode_batch=default_min_decode_batch(), **sizes_of_engine),
        ) as engine,
        Engine(model.policy, model.params, EngineSettings(slots=1, **sizes_of_engine)) as single_engine,
    ):
        for seed in count():
            lane.wait()
            prompts = random_ids(model.config.v, sizes.rows, sizes.prompt, seed)
            _generate(single_engine, prompts[:1], 1)
            figures = {
                "prefill": timed(partial(_generate, engine, prompts, 1)),
                "rows": step_seconds(partial(_generate, engine, prompts), sizes),
                "stream": step_seconds(partial(_generate, single_engine, prompts[:1]), sizes),
            }
            lane.done(sizes.rows * sizes.prompt, **figures)


def _generate(engine: Engine, prompts: Sequence[list[int]], length: int) -> None:
    """Sample `length` tokens after each prompt; prompts that the engine has seen continue from its cache."""
    keys = jax.random.split(jax.random.key(length), len(prompts))
    answers = engine.generate([Request(ids, key, length) for ids, key in zip(prompts, keys, strict=True)])
    assert all(len(answer.tokens) == length for answer in answers)


def _update(lane: protocol.Lane, sizes: Sizes, model: Model) -> None:
    """One update of full rows, a row at a time."""
    optimizer = adamw(RATE, clip_norm=CLIP)
    update = jax.jit(
        make_update(model.policy, grpo(beta=0.0), optimizer, UpdateSettings(micro_rows=1)), donate_argnums=0
    )
    batch = full_batch(model.config.v, sizes.update_rows, sizes.update_length)
    state = init_learner(model.params, optimizer)
    while True:
        lane.wait()
        state, _ = jax.block_until_ready(update(state, batch))
        lane.done(sizes.update_rows * sizes.update_length)


def _step(lane: protocol.Lane, sizes: Sizes, model: Model) -> None:
    """Whole iterations of the staged system: an engine's rollout, advantages, packing, and an update."""
    optimizer = adamw(RATE, clip_norm=CLIP)
    trajectories, context = sizes.queries * sizes.samples, sizes.context
    sizes_of_engine = {
        "slots": trajectories,
        "slot_length": context,
        "chunk": CHUNK,
        "min_decode_batch": default_min_decode_batch(),
    }
    with (
        Engine(model.policy, model.params, EngineSettings(**sizes_of_engine)) as engine,
        HostOffloader(placement_table(OFFLOAD["none"])) as offloader,
    ):
        rollout = hosted(
            _prompt_env(model.config.v, sizes),
            engine.submit,
            reward=batch_reward(_score),
            concurrency=trajectories,
            judges=1,
        )

        def roll_out(run: TrainState, **callbacks) -> RolloutResult:
            update = int(run.update)
            engine.update_weights(run.learner.params, int(run.learner.version))
            tasks = [Task(f"{update} {query}", "", ("1",), "ids") for query in range(sizes.queries)]
            keys = jax.random.split(jax.random.fold_in(run.key, update), trajectories)
            repeated_tasks = [task for task in tasks for _ in range(sizes.samples)]
            return rollout(
                repeated_tasks, keys, np.repeat(np.arange(sizes.queries), sizes.samples).tolist(), **callbacks
            )

        settings = IterationSettings(queries=sizes.queries, samples=sizes.samples, micro_rows=MICRO_ROWS)
        step = Iteration(
            hosted_rollout(roll_out, lambda result: to_trajectories(result.trajectories, (), turns=1, length=context)),
            make_update_stages(model.policy, grpo(beta=0.0), optimizer, settings, banned=(), slots=context),
            RolloutShape(tools=0, samples=sizes.samples, trajectories=trajectories, max_trajectory_tokens=context),
            Staging(offloader=offloader, scores_ahead=True, release=engine.release, donates=True),
        )
        run = init_train_state(model.params, optimizer, jax.random.key(0))
        while True:
            lane.wait()
            run, metrics = step(run)
            counts = {name: float(metrics[name]) for name in ("context_tokens", "computed_tokens") if name in metrics}
            durations = {stage: metrics["timings"][f"{stage}_seconds"] for stage in ("rollout", "train")}
            lane.done(sizes.laid_out, **durations, **counts)


def _prompt_env(vocabulary: int, sizes: Sizes) -> HostEnv:
    """Environment of one turn: the prompt of a task, whose id has its update and query; the answer ends the episode."""

    def reset(_key, task: Task, _do) -> tuple[None, HostObservation]:
        update, query = map(int, task.id.split())
        return None, HostObservation(step_prompts(vocabulary, sizes, update * sizes.queries)[query])

    def step(state: None, tokens: Sequence[int], _do) -> tuple[None, HostStep]:
        return state, HostStep(None, True, output=" ".join(map(str, tokens)), status=Status.FINISHED)

    return HostEnv(name="prompts", tools=(), reset=reset, step=step, max_turns=1, max_tokens=sizes.answer, stop_ids=())


def _score(tasks: Sequence[Task], outputs: Sequence[str]) -> list[RewardResult]:
    """Half of a group's answers are right, so that no group is skipped in the update."""
    assert len(tasks) == len(outputs) > 1
    return [RewardResult(float(index % 2)) for index in range(len(outputs))]


# Ceilings of the machine ----------------------------------------------------------------------------------


def _layer_shapes(config: DecoderConfig) -> list[tuple[int, int]]:
    """Shapes of a layer's matrices, with q, k, v as one and gate, up as one."""
    d, heads = config.d, config.h * config.e
    return [(d, heads + 2 * config.k * config.e), (heads, d), (d, 2 * config.f), (config.f, d)]


@cache
def _matrices(config: DecoderConfig) -> list[list[Array]]:
    """Matrices of all layers, shared by all products of a process."""
    return [[jnp.full(shape, 0.01, jnp.float32) for shape in _layer_shapes(config)] for _ in range(config.num_layers)]


def _products(config: DecoderConfig, rows: int) -> Callable[[], Array]:
    """All products of the layers with `rows` rows, and nothing else; each depends on the previous one."""
    layers = _matrices(config)
    inputs = {size: jnp.ones((rows, size), jnp.float32) for size, _ in _layer_shapes(config)}

    @jax.jit
    def multiply(inputs, layers):
        previous = jnp.zeros((), jnp.float32)
        for layer in layers:
            for matrix in layer:
                previous = jnp.matmul(inputs[len(matrix)] + previous, matrix)[0, 0] * 1e-9
        return previous

    return partial(multiply, inputs, layers)


def _ceilings(lane: protocol.Lane, sizes: Sizes, model: Model) -> None:
    """Products alone, by rows: a step of one row, of all rows, and of the rows of a prefill."""
    config, tokens = model.config, sizes.update_length
    programs = {
        name: _products(config, rows) for name, rows in (("stream", 1), ("rows", sizes.rows), ("prefill", tokens))
    }
    hidden, embed = (jnp.ones((rows, config.d)) for rows in (sizes.rows, config.v))
    unembed = jax.jit(lambda hidden, embed: jnp.matmul(hidden, embed.T))
    programs |= {f"unembed {rows}": partial(unembed, hidden[:rows], embed) for rows in (1, sizes.rows)}
    array = jnp.ones(2**27, jnp.float32)
    scale = jax.jit(lambda x: x * 0.5, donate_argnums=0)
    while True:
        lane.wait()
        durations, copies = medians_in_turn(programs, REPEATS), []
        for _ in range(REPEATS):
            duration, array = _timed_result(partial(scale, array))
            copies.append(duration)
        flops = 2 * tokens * config.num_layers * sum(rows * columns for rows, columns in _layer_shapes(config))
        lane.done(
            tokens,
            stream=durations["stream"] + durations["unembed 1"],
            rows=durations["rows"] + durations[f"unembed {sizes.rows}"],
            products_rate=flops / durations["prefill"],
            bandwidth=2 * array.nbytes / min(copies),
        )


def _timed_result(function: Callable[[], Array]) -> tuple[float, Array]:
    """Seconds of a call, and its result."""
    results: list[Array] = []
    return timed(lambda: results.append(jax.block_until_ready(function()))), results[0]


# Profile ----------------------------------------------------------------------------------------


def _profile(lane: protocol.Lane, sizes: Sizes, model: Model) -> None:
    """Seconds of programs, and of their parts measured alone."""
    programs = _update_works(model, sizes) | _prefill_works(model, sizes)
    for name, rows in (("stream", 1), ("rows", sizes.rows)):
        programs |= {f"{name} {part}": program for part, program in _step_works(model, sizes, rows).items()}
    while True:
        lane.wait()
        durations = medians_in_turn(programs, REPEATS, warm=True)
        for name in ("stream", "rows"):
            durations[f"{name} whole"] /= SHORT
        lane.done(0, **durations)


def _step_works(model: Model, sizes: Sizes, rows: int) -> dict[str, Callable[[], Any]]:
    """Several decode steps, and the parts of one of them."""
    policy, config = model.policy, model.config
    assert policy.make_cache is not None
    params = model.params if policy.unstack_layers is None else jax.jit(policy.unstack_layers)(model.params)
    prompt_rs = jnp.asarray(random_ids(config.v, rows, sizes.prompt, 0), jnp.int32)
    cache = jax.jit(partial(prefill, policy))(
        params, policy.make_cache(rows, sizes.prompt + sizes.long), prompt_rs, jnp.ones(prompt_rs.shape, bool)
    )
    state = start_rows(cache, prompt_rs[:, -1], jax.random.split(jax.random.key(0), rows), jnp.full(rows, SHORT))
    none_rk = jnp.full((rows, 1), -1, jnp.int32)
    decode_steps = jax.jit(
        lambda params, state: decode(policy, params, state, make_sampling(rows), none_rk, steps=SHORT)
    )
    hidden_rd, uniform_r = jnp.ones((rows, config.d)), jnp.full(rows, 0.5)
    unembed = jax.jit(policy.unembed)
    logits_rv = unembed(params, hidden_rd)
    settings: dict[str, Any] = {"banned": (), "width": 0}  # of the distribution
    draw = jax.jit(
        lambda logits, uniform: draw_token(logits, uniform, make_sampling(rows), jnp.ones(rows, bool), **settings)
    )
    return {
        "whole": partial(decode_steps, params, state),
        "products": _products(config, rows),
        "unembed": partial(unembed, params, hidden_rd),
        "draw": partial(draw, logits_rv, uniform_r),
    }


def _prefill_works(model: Model, sizes: Sizes) -> dict[str, Callable[[], Any]]:
    """Hidden states of new rows, and their products."""
    tokens_rs = jnp.asarray(random_ids(model.config.v, sizes.rows, sizes.prompt, 0), jnp.int32)
    hidden = jax.jit(lambda params, tokens: model.policy.hidden(params, tokens, None, None, None)[0])
    return {
        "prefill whole": partial(hidden, model.params, tokens_rs),
        "prefill products": _products(model.config, tokens_rs.size),
    }


def _update_works(model: Model, sizes: Sizes) -> dict[str, Callable[[], Any]]:
    """Parts of an update of one row: hidden states, scores, gradients of both; and the optimizer's step."""
    policy, params = model.policy, model.params
    tokens_rs = jnp.asarray(random_ids(model.config.v, 1, sizes.update_length, 0), jnp.int32)

    def states_sum(params, tokens):
        return policy.hidden(params, tokens, None, None, None)[0].sum()

    def logp_sum(params, tokens):
        return logprobs(policy, params, tokens).logp.sum()

    optimizer = adamw(RATE, clip_norm=CLIP)
    memory = optimizer.init(params)

    def move(gradient, memory, params):
        change, memory = optimizer.update(gradient, memory, params)
        return optax.apply_updates(params, change), memory

    sums = {"states": states_sum, "scores": logp_sum}
    forward = {f"update {name}": partial(jax.jit(function), params, tokens_rs) for name, function in sums.items()}
    both = {
        f"update {name} grad": partial(jax.jit(jax.grad(function)), params, tokens_rs)
        for name, function in sums.items()
    }
    products = {"update products": _products(model.config, tokens_rs.size)}
    return forward | both | products | {"update optimizer": partial(jax.jit(move), params, memory, params)}


WORKS = {"decode": _decode, "update": _update, "step": _step, "ceilings": _ceilings, "profile": _profile}


def main() -> None:
    """Load the model and run the job."""
    lane, job = protocol.open_lane()
    launch.configure(cpu_devices=job.devices, exact=job.exact)
    WORKS[job.case](lane, Sizes(**job.sizes), load_model(job.model, tokenizer=False))


if __name__ == "__main__":
    main()
