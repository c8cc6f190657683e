"""Steps of this framework's loop in three programs, or prefill and decoding alone.

The environment has one END token, so with three turns the policy adds log 34 to its logit, which makes its probability
1/16 per word. A turn is cut at 96 words, which happens in less than one episode in twenty.
"""

import math
from functools import partial
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Bool, Int

from flowgrpo import launch
from flowgrpo.algorithms.policy_gradient import grpo
from flowgrpo.contracts import Env, Observation, Params, Policy, Sizes, Step
from flowgrpo.envs.env import END, PAD, absorbing, pad_tokens
from flowgrpo.generate.sampler import decode, make_sampling, prefill, start_rows
from flowgrpo.learner.state import adamw
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.hf import init_model
from flowgrpo.parallel.row_sharding import data_mesh, map_rows, replicate
from flowgrpo.report.tables import timed
from flowgrpo.training.pure_env import make_stages, split_step
from flowgrpo.training.stages import IterationSettings, init_train_state

from . import protocol, workload
from .workload import DIGIT, EQUALS, GROUP, MODEL, OTHER, PROMPT, PROMPTS, TOOL, WORDS

ACTION = {1: workload.ANSWER, 3: 96}  # most words of a turn, by the number of turns
ENDS = 34  # (512 - 2) / 15: one word with this weight among 510 others has a probability of 1/16
MICRO_ROWS = {1: 8, 3: 1}  # a row of three turns has room for the longest possible trajectory
MIN_DECODE_BATCH = {1: None, 3: 4}  # most episodes of three turns end early


class DialogueState(struct.PyTreeNode):
    """State of a dialogue."""

    turn: Int[Array, ""]
    done: Bool[Array, ""]
    correct: Bool[Array, ""]


def _dialogue(turns: int) -> Env:
    """Turns rewarded by their fraction of digits, with a calculator's answer after each but the last."""

    def say_zero(*_) -> tuple[Array, Array]:
        return pad_tokens([DIGIT, END], ACTION[turns]), jnp.int32(2)

    return Env(
        name="dialogue",
        vocabulary=WORDS,
        tools=("calculator",),
        sizes=Sizes(prompt=PROMPT, observation=6, action=ACTION[turns], turns=turns),
        make_task=_make_task,
        reset=_reset,
        step=absorbing(partial(_calculate, turns=turns)),
        anchor=lambda state: state.turn,
        oracle=say_zero,
        demonstrate=say_zero,
    )


def _make_task(key: Array, split: str) -> Array:
    """Random words other than special ones; all splits are equal."""
    del split
    words = jax.random.randint(key, (PROMPT,), OTHER, len(WORDS), jnp.int32)
    return words.at[-1].set(MODEL)


def _reset(key: Array, task: Array) -> tuple[DialogueState, Observation]:
    """The prompt."""
    del key
    no = jnp.zeros((), bool)
    return DialogueState(jnp.int32(0), no, no), Observation(task, jnp.int32(PROMPT))


def _calculate(state: DialogueState, tokens: Array, length: Array, *, turns: int) -> tuple[DialogueState, Step]:
    """Reward the fraction of digits; the observation is their sum, unless this was the last turn."""
    is_digit = (tokens >= DIGIT) & (tokens < OTHER) & (jnp.arange(len(tokens)) < length)
    total = jnp.where(is_digit, tokens - DIGIT, 0).sum(dtype=jnp.int32)
    fraction = is_digit.sum() / jnp.maximum(length, 1)
    done = state.turn + 1 >= turns
    figures = [DIGIT + total // power % 10 for power in (100, 10, 1)]
    message = pad_tokens([TOOL, EQUALS, *figures, MODEL], 6)
    observation = Observation(jnp.where(done, PAD, message), jnp.where(done, 0, 6))
    no = jnp.zeros((), bool)
    step = Step(observation, fraction.astype(jnp.float32), done, no, jnp.where(done, -1, 0), no)
    return state.replace(turn=state.turn + 1, done=done), step


def _with_frequent_end(policy: Policy) -> Policy:
    """Policy with a larger logit of END."""
    return policy._replace(
        unembed=lambda params, hidden: policy.unembed(params, hidden).at[..., END].add(math.log(ENDS))
    )


def _train(lane: protocol.Lane, case: workload.Training, policy: Policy, params: Params) -> None:
    """Make iterations until the race is over."""
    policy = policy if case.turns == 1 else _with_frequent_end(policy)
    optimizer = adamw(workload.RATE, clip_norm=workload.CLIP)
    rows = {"micro_rows": MICRO_ROWS[case.turns], "min_decode_batch": MIN_DECODE_BATCH[case.turns]}
    sizes = IterationSettings(queries=PROMPTS, samples=GROUP, **rows)
    iteration = make_stages(_dialogue(case.turns), policy, grpo(beta=case.beta), optimizer, sizes)
    step = split_step(iteration)
    run = replicate(init_train_state(params, optimizer, jax.random.key(0)), policy.mesh)
    while True:
        lane.wait()
        _, (run, metrics) = timed(partial(step, run))
        lane.done(int(metrics["tokens"]) - workload.EPISODES * PROMPT)


def generate_block(policy: Policy, tokens: int, params: Params, rows: tuple[Array, Array]) -> Array:
    """Sample after prompts, each with its key: [r s], [r] -> [r u]."""
    prompt_rs, key_r = rows
    width, prefix_rs = len(prompt_rs), prompt_rs[:, :-1]
    assert policy.make_cache is not None
    empty = policy.make_cache(width, PROMPT + tokens)
    cache = prefill(policy, params, empty, prefix_rs, jnp.ones(prefix_rs.shape, bool))
    state = start_rows(cache, prompt_rs[:, -1], key_r, jnp.full(width, tokens))
    _, sampled = decode(policy, params, state, make_sampling(width), jnp.full((width, 1), -1), steps=tokens)
    return sampled.token.T


def _decode(lane: protocol.Lane, case: workload.Decoding, policy: Policy, params: Params) -> None:
    """Generate a block of rows in every step, sharded over the devices."""
    rows, tokens = case
    prompt_rs = np.array(workload.random_ids(rows), np.int32)
    generate_rows = partial(generate_block, policy, tokens)
    generate = jax.jit(
        lambda params, prompt_rs, key_r: map_rows(generate_rows, policy.mesh, params, (prompt_rs, key_r))
    )
    params = replicate(params, policy.mesh)
    for seed in count():
        lane.wait()
        _, sampled = timed(lambda seed=seed: generate(params, prompt_rs, jax.random.split(jax.random.key(seed), rows)))
        assert np.asarray(sampled).shape == (rows, tokens)
        lane.done(rows * tokens)


def main() -> None:
    """Train, or only decode, by the case of the job."""
    lane, job = protocol.open_lane()
    launch.configure(cpu_devices=job.devices, compilation_cache=None)
    model = init_model(job.shape, jax.random.key(0))
    policy = make_policy(model.config, unroll=True)._replace(mesh=data_mesh())
    case = workload.CASES[job.case]
    if isinstance(case, workload.Training):
        _train(lane, case, policy, model.params)
    else:
        _decode(lane, case, policy, model.params)


if __name__ == "__main__":
    main()
