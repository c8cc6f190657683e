"""The quickstart as a command: one run in an environment from outside, and everything that opens it again."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flowgrpo.learner.critic import with_critic
from flowgrpo.models.trainable import ActorCritic
from flowgrpo.publish.export import read_config
from flowgrpo.publish.pages import read_trajectories
from flowgrpo.recipes import pure, pure_config
from flowgrpo.recipes.pure import PureTrainable
from flowgrpo.recipes.registry import ALGORITHMS, make_algorithm
from flowgrpo.report.metrics import MetricsWriter
from flowgrpo.training.kill_series import differences
from flowgrpo.training.names import HARD_VARIANTS
from flowgrpo.training.pure_env import make_stages
from flowgrpo.training.session import Session, open_session
from flowgrpo.types import BadInput
from tests.experiments.conftest import check_refused, last_line, metrics, result, with_flags

ENV = "tests.tiny_env:tiny_env"
SMALL = (
    *(f"--env={ENV}", "--warm_steps=50", "--queries=4", "--samples=4"),
    *("--test_tasks=8", "--checkpoint_every=1", "--cpu_devices=1"),
)


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory) -> Path:
    """Two updates in one go."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    command("quickstart", f"--workdir={folder}", "--updates=2", *SMALL)
    return folder


@pytest.mark.slow
def test_S1_a_run_in_two_parts_ends_as_one_in_a_piece(command, whole, tmp_path):
    for updates in (1, 2):
        command("quickstart", f"--workdir={tmp_path}", f"--updates={updates}", *SMALL)
    assert any(line["grad_norm"] > 0 for line in metrics(whole, "train"))  # there was something to learn
    assert differences(whole, tmp_path) == {}
    assert (result(whole)["resumed_at"], result(tmp_path)["resumed_at"]) == ([], [1])


@pytest.mark.slow
def test_a_finished_run_teaches_another_of_its_shape(command, whole, tmp_path):
    """The reference of the run is the teacher, whom the planner leaves by its start alone; others are refused."""
    command(
        "quickstart",
        f"--workdir={tmp_path}",
        "--updates=1",
        "--seed=1",
        *SMALL,
        "--algorithm=opd",
        f"--teacher={whole}",
    )
    config = read_config(tmp_path)
    teacher = pure.teacher_params(config)
    session = open_session(pure.PureTrainable(pure.build(config)), tmp_path)
    jax.tree.map(np.testing.assert_array_equal, session.state.reference, teacher)
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (session.start_params, teacher)), strict=True))
    assert metrics(tmp_path, "train")[0]["grad_norm"] > 0
    with pytest.raises(BadInput, match=r"--teacher=.* has model_dim \d+, but this run \d+: they must be the same"):
        pure.teacher_params(config.replace(model_dim=2 * config.model.model_dim))


@pytest.mark.slow
def test_a_run_writes_what_it_says(whole):
    found = result(whole)
    assert {"success_before", "success_after", "tool_error_before", "tool_error_after", "turns_before"} <= set(found)
    assert (found["updates"], found["env"]) == (2, "tiny")
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [line["update"] for line in metrics(whole, "train")] == [1, 2]
    assert [line["update"] for line in metrics(whole, "validation")] == [0, 1, 2]
    for one in read_trajectories(whole):  # the gold answer is that of the task which was played
        digit, *_ = one.trajectory.task.query.split()
        assert one.trajectory.task.answers == (f"{digit} <end>",)
        version = found["best_update"] if one.phase == "test after" else 0
        assert {int(np.max(turn.version)) for turn in one.trajectory.turns} == {version}
    assert "seconds" not in (whole / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_finished_run_is_viewed_and_evaluated(command, whole):
    # 8 test tasks, before and after.
    assert f"16 trajectories of {whole}" in command("view", f"--workdir={whole}", "--ratios=start").stdout
    assert (whole / "trajectories.html").exists()
    found = last_line(command("evaluate", f"--workdir={whole}", "--num_tasks=8", "--samples=2"))
    assert 0 <= found["success_before"] <= found["pass@2_before"] <= 1
    assert found["tasks"] == 8
    assert "oracle" in command("environments", f"--environments={ENV}", "--episodes=8").stdout


@pytest.mark.slow
def test_another_run_is_refused_with_the_differences(command, whole):
    for other, difference in (
        ("--seed=5", "seed: there 0, here 5"),
        ("--cpu_devices=3", "devices: there 1, here 3"),
    ):
        refused = command("quickstart", f"--workdir={whole}", "--updates=2", *with_flags(SMALL, other), check=False)
        check_refused(refused, f"holds another run: {difference}")


@pytest.mark.slow
def test_S1_an_actor_and_its_critic_come_back_as_they_were_saved(tmp_path):
    setup = pure.build(pure.preset("lookup", "ppo", updates=1, model_dim=32, layers=1))
    work, key = PureTrainable(setup), jax.random.key(0)
    session, other = Session(work, tmp_path), Session(work, tmp_path)
    session.start_from(with_critic(setup.critic, key, setup.policy.init(key)), {"metrics.jsonl": 0})
    session.save()
    session.checkpoints.wait()
    assert other.restore()
    assert isinstance(other.state.learner.params, ActorCritic)
    jax.tree.map(np.testing.assert_array_equal, other.state.learner, session.state.learner)


@pytest.mark.slow
def test_a_nan_loss_stops_with_the_last_good_checkpoint(tmp_path):
    """The first step breaks the parameters; the second update sees it, and says which checkpoint is whole."""
    setup = pure.build(pure.preset("lookup", updates=4, queries=2, samples=2, mini_batches=1, model_dim=32, layers=1))
    broken = optax.scale(jnp.nan)

    def paid(trajectories, _key):
        return trajectories.replace(outcome=jnp.arange(4.0))

    parts = (setup.env, setup.policy, setup.algorithm, broken, setup.sizes)
    stages = make_stages(*parts, judge=paid)
    session = Session(PureTrainable(setup._replace(stages=stages, optimizer=broken)), tmp_path)
    session.start_from(setup.policy.init(jax.random.key(0)), {})
    session.save()
    said = r"update 2 is not finite: lower --learning_rate; the last good checkpoint is that of update 0"
    with jax.debug_nans(False), MetricsWriter(tmp_path, None) as opened, pytest.raises(BadInput, match=said):
        session.train(opened, every=10)
    assert np.isfinite(jax.tree.leaves(session.best_params()[1])[0]).all()


# Settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("env", list(pure_config.PRESETS))
def test_every_preset_builds_with_every_algorithm(env, algorithm):
    setup = pure.build(pure.preset(env, algorithm, teacher="run" if algorithm == "opd" else None))
    named = make_algorithm(algorithm, beta=0.1, clip_high=0.2, max_tokens=9).name
    assert (setup.env.name, setup.algorithm.name) == (HARD_VARIANTS.get(env, env), named)


@pytest.mark.parametrize("env", list(pure_config.PRESETS))
def test_flow_grpo_is_what_an_environment_gets(env):
    assert pure.preset(env).learner.algorithm == "flow_grpo"


@pytest.mark.parametrize("name", list(pure_config.BY_ALGORITHM))
def test_what_fits_an_algorithm_is_taken_unless_something_else_is_chosen(name):
    config = pure.preset("lookup", name, learning_rate=0.5)
    assert config == config.replace(**{**pure_config.BY_ALGORITHM[name], "learning_rate": 0.5})
    assert pure.build(config).algorithm.name == name


def test_a_critic_of_no_kind_is_refused():
    with pytest.raises(BadInput, match="--critic=both is unknown; choose from own, shared"):
        pure.preset("lookup", "ppo", critic="both")
