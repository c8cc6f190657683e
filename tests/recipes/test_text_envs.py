"""A run on a `TextEnv`: by its name and as an object, with the same bits; and what is refused before it begins."""

import json

import pytest
from gateway_cases import tiny_folder
from text_env_cases import Parcel, Plain

import flowgrpo as fg
from flowgrpo.recipes import own_env
from flowgrpo.recipes.own_env_config import sizes_of_env
from flowgrpo.recipes.recipe import Objects
from flowgrpo.training.run_dir import read_run

SMALL = {
    "queries": 2,
    "samples": 2,
    "context_tokens": 250,
    "validation_tasks": 2,
    "test_tasks": 2,
    "slots": 4,
    "prefill_chunk": 16,
    "decode_steps": 4,
    "mini_batches": 1,
    "dtype": "float32",
    "remat": False,
    "updates": 1,
    "learning_rate": 1e-3,
}
RECORDS = [{"person": f"Ann {n}", "address": f"{n} Elm"} for n in range(60)]


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return str(path)


def preset(tasks, env="text_env_cases:Parcel", **settings):
    return own_env.preset(str(tiny_folder()), env=env, tasks=tasks, **{**SMALL, **settings})


@pytest.mark.slow
def test_a_run_by_name_and_by_object_has_the_same_bits(tmp_path, tasks):
    named, handed = preset(tasks), preset(tasks, "a:class", **sizes_of_env(Parcel))
    assert (named.rollout.turns, named.rollout.eval_turns, named.rollout.max_tokens) == (3, 3, 6)
    assert own_env.RECIPE.train(named, tmp_path / "named")["updates"] == 1
    own_env.RECIPE.train(handed, tmp_path / "handed", objects=Objects(env=Parcel))
    first, second = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("named", "handed"))
    assert first == second
    assert read_run(tmp_path / "handed")["objects"] == {"env": "text_env_cases:Parcel"}


@pytest.mark.parametrize(
    ("env", "why"),
    [
        (Parcel(), "is an instance: give the class"),
        (Plain, "is no subclass of fg.TextEnv"),
        (type("Parcel", (Parcel,), {"reset": lambda *_: 3}), "Parcel.reset returned 3: return a string"),
        (fg.single_turn(), "tasks of the domain 'env' have no reward"),
        (fg.single_turn(lambda *_: 1.0), "reward 'SingleTurn.reward' came to 1.0 for task"),
        ("text_env_cases:Gone", "or an environment 'text_env_cases:Gone' can't be imported"),
    ],
)
def test_what_is_no_environment_is_refused_before_anything_is_written(tmp_path, tasks, env, why):
    objects = Objects() if isinstance(env, str) else Objects(env=env)
    config = preset(tasks, env if isinstance(env, str) else "a:class", turns=2, eval_turns=2, max_tokens=6)
    with pytest.raises(fg.BadInput, match=why):
        own_env.RECIPE.train(config, tmp_path / "run", objects=objects)
    assert not (tmp_path / "run").exists()


def test_a_context_without_room_for_an_action_is_refused(tmp_path, tasks):
    config = preset(tasks, context_tokens=40)
    with pytest.raises(fg.BadInput, match=r"the first observation of task .* holds no action after it: raise context_"):
        own_env.RECIPE.train(config, tmp_path / "run")


def test_a_run_without_the_tasks_that_its_environment_reads_is_refused(tmp_path):
    with pytest.raises(
        fg.BadInput, match=r"Parcel.reset raised KeyError: 'person' \(.*\); .* there are no tasks: give"
    ):
        own_env.RECIPE.train(preset(None), tmp_path / "run")
