"""The quickstart as a command: it goes on where it was stopped to the same bits, and says what it can't do."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import setups
from experiments.pure_work import pure_work
from experiments.session import Session
from flowgrpo import launch, loop
from flowgrpo.learner.critic import ActorCritic, with_critic
from flowgrpo.report.metrics import Metrics
from flowgrpo.types import BadInput

pytestmark = pytest.mark.slow

SMALL = ("--warm_steps=50", "--queries=4", "--samples=4", "--test_tasks=16", "--checkpoint_every=2")


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory) -> Path:
    """Four updates in one go."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    command("quickstart", f"--workdir={folder}", "--updates=4", *SMALL)
    return folder


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_it_writes_what_it_says(whole):
    found = result(whole)
    assert {"success_before", "success_after", "tool_error_before", "tool_error_after", "turns_before"} <= set(found)
    assert found["updates"] == 4
    assert found["resumed_at"] == []
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    phases = [json.loads(line)["phase"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert phases.count("train") == 4
    assert phases.count("validation") == 3
    assert "seconds" not in (whole / "metrics.jsonl").read_text()


def test_its_test_trajectories_become_a_page(command, whole):
    said = command("view", f"--workdir={whole}", "--ratios=start").stdout
    assert f"32 trajectories of {whole}" in said  # 16 test tasks, before and after
    assert (whole / "trajectories.html").exists()


def test_S1_a_run_that_was_stopped_ends_as_one_that_was_not(command, whole, tmp_path):
    folder = tmp_path / "parts"
    command("quickstart", f"--workdir={folder}", "--updates=2", *SMALL)
    command("quickstart", f"--workdir={folder}", "--updates=4", *SMALL)
    assert result(folder)["resumed_at"] == [2]
    assert result(folder)["params_sha256"] == result(whole)["params_sha256"]
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_finished_run_that_is_called_again_was_not_continued(command, whole):
    before = result(whole)
    command("quickstart", f"--workdir={whole}", "--updates=4", *SMALL)
    assert result(whole)["resumed_at"] == []
    assert result(whole)["params_sha256"] == before["params_sha256"]
    assert result(whole)["best_update"] == before["best_update"]


@pytest.mark.parametrize(
    ("other", "difference"),
    [("--seed=5", "seed: there 0, here 5"), ("--cpu_devices=3", f"devices: there {launch.cores()}, here 3")],
)
def test_another_run_is_refused_with_what_differs(command, whole, other, difference):
    refused = command("quickstart", f"--workdir={whole}", "--updates=4", other, *SMALL, check=False)
    assert refused.returncode == 1
    assert "holds another run" in refused.stderr
    assert difference in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_finished_run_can_be_evaluated_again(command, whole):
    line = command("evaluate", f"--workdir={whole}", "--num_tasks=8", "--samples=2").stdout.splitlines()[-1]
    found = json.loads(line)
    assert 0 <= found["success_before"] <= found["pass@2_before"] <= 1
    assert found["tasks"] == 8


def test_a_folder_without_a_run_is_refused(command, tmp_path):
    refused = command("evaluate", f"--workdir={tmp_path}", check=False)
    assert refused.returncode == 1
    assert "holds no run" in refused.stderr


def test_an_environment_from_outside_is_trained_in_and_its_run_opened_again(command, tmp_path):
    env = "tests.tiny_env:tiny_env"
    command("quickstart", f"--env={env}", f"--workdir={tmp_path}", "--updates=2", *SMALL)
    assert result(tmp_path)["env"] == "tiny"
    assert (
        json.loads(command("evaluate", f"--workdir={tmp_path}", "--num_tasks=8").stdout.splitlines()[-1])["tasks"] == 8
    )
    assert "trajectories of" in command("view", f"--workdir={tmp_path}", "--ratios=start").stdout
    assert "oracle" in command("environments", f"--environments={env}", "--episodes=8").stdout


def test_an_unknown_environment_is_refused(command):
    refused = command("quickstart", "--env=chess", check=False)
    assert refused.returncode == 2
    assert "lookup" in refused.stderr


@pytest.mark.parametrize("env", list(setups.PRESETS))
def test_every_preset_builds(env):
    setup = setups.build(setups.settings_of(env))
    assert setup.env.name == env
    assert setup.algorithm.name == "flow_grpo"


@pytest.mark.parametrize("name", list(setups.BY_ALGORITHM))
def test_what_fits_an_algorithm_is_taken_unless_something_else_is_chosen(name):
    settings = setups.settings_of("lookup", algorithm=name, learning_rate=0.5)
    assert settings["learning_rate"] == 0.5
    assert {key: settings[key] for key in setups.BY_ALGORITHM[name] if key != "learning_rate"} == {
        key: value for key, value in setups.BY_ALGORITHM[name].items() if key != "learning_rate"
    }
    assert setups.build(settings).algorithm.name == name


def test_a_critic_of_no_kind_is_refused():
    with pytest.raises(BadInput, match="critic 'both' is unknown; choose from own, shared"):
        setups.build(setups.settings_of("lookup", algorithm="ppo", critic="both"))


def test_S1_an_actor_and_its_critic_come_back_as_they_were_saved(tmp_path):
    setup = setups.build(setups.settings_of("lookup", algorithm="ppo", updates=1))
    work = pure_work(setup)
    session = Session(work, tmp_path)
    key = jax.random.key(0)
    session.begin(with_critic(setup.critic, key, setup.policy.init(key)), {"metrics.jsonl": 0})
    session.save()
    session.checkpoints.wait()
    other = Session(work, tmp_path)
    assert other.restore()
    assert isinstance(other.run.learner.params, ActorCritic)
    assert jax.tree.structure(other.run) == jax.tree.structure(session.run)
    for one, two in zip(jax.tree.leaves(other.run.learner), jax.tree.leaves(session.run.learner), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_loss_that_is_no_number_stops_it_with_the_last_good_checkpoint(tmp_path):
    """The first step breaks the parameters; the second update sees it, and says which checkpoint is whole."""
    setup = setups.build(setups.settings_of("lookup", updates=4, queries=2, samples=2))
    broken = optax.scale(jnp.nan)

    def paid(trajectories, _key):
        return trajectories.replace(outcome=jnp.arange(4.0))

    parts = (setup.env, setup.policy, setup.algorithm, broken, setup.sizes)
    iteration = loop.make_iteration(*parts, judge=paid, mesh=setup.mesh)
    session = Session(pure_work(setup._replace(iteration=iteration, optimizer=broken)), tmp_path)
    session.begin(setup.policy.init(jax.random.key(0)), {})
    session.save()
    said = r"update 2 is not finite: lower --learning_rate; the last good checkpoint is that of update 0"
    with jax.debug_nans(False), Metrics(tmp_path, None) as metrics, pytest.raises(BadInput, match=said):
        session.train(metrics, every=10)
    assert np.isfinite(jax.tree.leaves(session.best_params()[1])[0]).all()


def test_a_folder_that_cannot_be_made_is_refused(command, tmp_path):
    (tmp_path / "file").write_text("")
    refused = command("quickstart", f"--workdir={tmp_path}/file/run", "--updates=4", *SMALL, check=False)
    assert refused.returncode == 1
    assert "can't be made" in refused.stderr
    assert "Traceback" not in refused.stderr
