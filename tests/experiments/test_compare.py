"""Studies: tables and pages of known runs; a real study, interrupted, resumed, made larger; bad flags."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import run_module

import flowgrpo as fg
from experiments.studies import study_arms, study_pages
from experiments.studies.studies import STUDIES, chosen_arms, find_study
from flowgrpo.evaluation.statistics import iqm
from flowgrpo.learner.imitation import demonstrate
from flowgrpo.models.quantised import KINDS, Quantised
from flowgrpo.recipes import compare, pure
from flowgrpo.recipes.compare import read_runs, run_study, study_config
from flowgrpo.recipes.study import Arm, Study
from flowgrpo.recipes.study_tables import table, tabulate_study, write_study
from flowgrpo.rollout.compiled import repeat
from flowgrpo.rollout.exams import draw_tasks
from flowgrpo.training.time_budget import OutOfTime, time_budget
from tests.experiments.conftest import check_refused, last_line, run_command

TWO = Study("Is it so?", "one", {"one": Arm(), "other": Arm()}, worlds={"lookup": {}, "maze": {}})


def known_runs() -> dict:
    """Of `one` all runs end at 0.5, of `other` at 0.6 to 0.9 on one environment and at 0.4 on the other."""
    ends = {
        "one": {"lookup": [0.5] * 4, "maze": [0.5] * 4},
        "other": {"lookup": [0.6, 0.7, 0.8, 0.9], "maze": [0.4] * 4},
    }
    return {
        (arm, env, seed): {
            "arm": arm,
            "env": env,
            "seed": seed,
            "updates": [0, 10],
            "success": [0.2, end],
            "turns": [4.0, 3.0],
        }
        for arm, envs in ends.items()
        for env, own in envs.items()
        for seed, end in enumerate(own)
    }


def test_a_row_has_estimate_interval_and_how_often_it_beats_the_baseline():
    one, other = tabulate_study(TWO, known_runs(), range(4))
    assert (one["iqm"], one["low"], one["high"], one["seeds"], one["start"]) == (0.5, 0.5, 0.5, 4, 0.2)
    assert "beats_baseline" not in one
    assert other["iqm"] == pytest.approx(iqm(np.array([0.6, 0.7, 0.8, 0.9, 0.4, 0.4, 0.4, 0.4])))
    assert other["beats_baseline"] == 0.5  # always on the one environment, never on the other
    assert other["low"] <= other["iqm"] <= other["high"]


def test_the_page_needs_nothing_beside_it_and_says_everything(tmp_path):
    study = TWO._replace(question="Is a < b & c?")
    rows = tabulate_study(study, known_runs(), range(4))
    write_study(tmp_path, study, rows, known_runs(), range(4), expected="a < b")
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"curves.png", "curves.svg", "index.html", "table.jsonl", "table.md"}
    page = (tmp_path / "index.html").read_text()
    assert "Is a &lt; b &amp; c?" in page
    assert page.count("<tr>") == 3
    assert "<svg" in page
    assert 'src="' not in page
    lines = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    assert [line["arm"] for line in lines] == ["one", "other"]
    assert {"arm", "iqm", "low", "high", "seeds"} <= set(lines[0])
    pictures = [(tmp_path / name).read_bytes() for name in ("curves.svg", "table.md")]
    write_study(tmp_path, study, rows, known_runs(), range(4), expected="a < b")
    assert [(tmp_path / name).read_bytes() for name in ("curves.svg", "table.md")] == pictures
    assert "--study" not in page  # which no command knows
    for command, expected in {"python -m x --study=<credit>": "a", "": "", "  ": "  "}.items():
        write_study(tmp_path, study, rows, known_runs(), range(4), expected=expected, command=command.strip())
        page = (tmp_path / "index.html").read_text()
        assert ("Expected" in page) == ("<pre>python -m x --study=&lt;credit&gt;</pre>" in page) == (command[:1] == "p")


def test_a_study_is_published_in_its_page(tmp_path):
    page = tmp_path / "mine.md"
    page.write_text(f"# Mine\n{study_pages.BEGIN}\nold\n{study_pages.END}\nAnswer: yes.\n")
    study_pages.publish_study(tmp_path, "mine", TWO, known_runs(), range(4))
    text = table(tabulate_study(TWO, known_runs(), range(4)), TWO)
    assert page.read_text() == f"# Mine\n{study_pages.BEGIN}\n{text}\n{study_pages.END}\nAnswer: yes.\n"
    assert study_pages.read_published(tmp_path / "mine.jsonl") == known_runs()
    assert (tmp_path / "mine.svg").exists()
    with pytest.raises(fg.BadInput, match=r"other\.md must be a page with one line <!-- table -->"):
        study_pages.publish_study(tmp_path, "other", TWO, known_runs(), range(4))


def test_a_run_says_at_which_update_it_would_have_been_warned_first():
    """Entropy is gone from the eleventh update on; the window is five updates."""
    by_update = {"success": np.full(30, 0.2), "entropy": np.where(np.arange(30) < 10, 0.5, 1e-4)}
    assert compare.first_warnings(by_update) == {"entropy_falls": 13, "entropy": 15}
    assert compare.first_warnings({}) == {}
    runs = {("one", "lookup", seed): {"warnings": {"entropy": 10 + seed} if seed else {}} for seed in range(4)}
    study = TWO._replace(arms={"one": Arm()}, worlds={"lookup": {}})
    assert study_pages.warning_table(study, runs, range(4)).splitlines()[2] == "| one | `entropy` 3 of 4, 12 |"


PUBLISHED = sorted(Path("docs/studies").glob("*.jsonl"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_a_published_table_is_that_of_the_runs_beside_it(path):
    """Sixteen seeds of every arm of the study as it ships, and the page shows their table and picture."""
    study, runs = STUDIES[path.stem](), study_pages.read_published(path)
    assert {(arm, env, seed) for arm in study.arms for env in study.worlds for seed in range(16)} == runs.keys()
    text = table(tabulate_study(study, runs, range(16)), study)
    page = path.with_suffix(".md").read_text()
    assert f"{study_pages.BEGIN}\n{text}\n{study_pages.END}" in page
    for part in (f"({path.stem}.svg)", f"--study={path.stem}", "## Who claims what", "## Answer", study.question):
        assert part in page, part


def test_the_readme_shows_rows_of_the_published_table():
    """Name, IQM, interval and how often it beats the baseline, as the page of the study has them."""
    section = Path("README.md").read_text().split("### Credit assignment")[1].split("\n![")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "% to " in line]
    page = Path("docs/studies/credit.md").read_text()
    published = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        published[cells[0]] = [cell for cell in cells[1:4] if cell]
    assert len(rows) == 8
    for name, *cells in rows:
        assert [cell for cell in cells if cell] == published[name], name


@pytest.mark.parametrize("name", list(STUDIES))
def test_every_study_is_built_and_says_what_to_expect(name):
    study = STUDIES[name]()
    assert study.baseline in study.arms
    assert len(study.arms) >= 3
    assert "Expected" in (STUDIES[name].__doc__ or "")
    for arm in study.arms.values():
        if arm.algorithm is not None:
            assert arm.algorithm().advantages is not None


def test_a_quantised_sampler_samples_and_the_trainer_scores(monkeypatch):
    monkeypatch.setattr(study_arms, "iteration_program", lambda iteration: iteration)
    setup = pure.build(study_config(STUDIES["quantised_sampler"](), "lookup", {}))
    setup = setup._replace(stages=setup.stages._replace(generate=lambda params, _drawn: params))
    params = jax.eval_shape(setup.policy.init, jax.random.key(0))
    for kind in KINDS:
        play = study_arms.quantised_rollouts(setup, kind=kind).generate
        played = jax.eval_shape(play, params, None)
        assert {name for name, x in played.items() if isinstance(x, Quantised) and x.kind == kind} == {
            *"qkvo",
            "gate",
            "up",
            "down",
        }
        assert played["embed"] == params["embed"]
    arms = STUDIES["quantised_sampler"]().arms
    needs = {name: arm.algorithm().needs for name, arm in arms.items() if arm.algorithm is not None}
    assert {name for name, read in needs.items() if "logp_old" in read} == set(arms) - {"full precision"}


@pytest.mark.slow
def test_turn_rewards_are_answered_calls_and_the_outcome_at_the_end():
    env = fg.lookup(hops=(1, 1))
    rollout = _played(env)
    paid = study_arms.answered_call_rewards(rollout)
    for n in range(len(paid.outcome)):
        turns = int(paid.turns[n].sum())
        for turn in range(turns):
            called = bool(rollout.tool[n, turn] >= 0) and not bool(rollout.error[n, turn])
            expected = float(called) + (float(paid.outcome[n]) if turn == turns - 1 else 0.0)
            assert float(paid.reward[n, turn]) == expected
    adv_nt = np.asarray(study_arms.reward_zscore(paid, None, paid.valid, fg.algorithms.Options()))
    assert adv_nt.shape == paid.turns.shape
    assert (adv_nt[~np.asarray(paid.turns)] == 0).all()
    own = np.asarray(paid.group) == 0
    rows = np.asarray(paid.reward)[own][np.asarray(paid.turns)[own]]
    seen = adv_nt[own][np.asarray(paid.turns)[own]]
    np.testing.assert_allclose(seen, (rows - rows.mean()) / (rows.std(ddof=1) + 1e-6), atol=1e-5)


def _played(env: fg.Env):
    """Eight trajectories of two tasks, by a planner that knows nothing but the forms of a call."""
    tasks, group_n = repeat(draw_tasks(env, jax.random.key(0), 2, "train"), 4)
    shown = demonstrate(env, tasks, jax.random.split(jax.random.key(1), 8)).replace(group=group_n)
    calls = np.asarray(shown.turns) & (
        np.arange(shown.turns.shape[1])[None] < np.asarray(shown.turns).sum(1)[:, None] - 1
    )
    return shown.replace(tool=np.where(calls, 0, -1), error=np.zeros(calls.shape, bool))


def test_settings_are_the_studies_unless_others_are_chosen():
    study = STUDIES["credit"]()
    assert study_config(study, "lookup", {}).run.updates == study.changes["updates"]
    assert study_config(study, "lookup", {}).warm_start.warm_steps == study.changes["warm_steps"]
    chosen = study_config(study, "lookup", {"updates": 7})
    assert (chosen.run.updates, chosen.learner.decay_updates) == (7, 7)


def test_some_arms_and_always_the_baseline():
    study = STUDIES["credit"]()
    assert list(chosen_arms(study, ["GiGPO"]).arms) == ["broadcast", "GiGPO"]
    assert chosen_arms(study, None) is study
    with pytest.raises(fg.BadInput, match="'gigpo' is no arm of this study; they are broadcast"):
        chosen_arms(study, ["gigpo"])


MINE = """
from flowgrpo.recipes.study import Arm, Study


def wider():
    return Study("Wider?", "one", {"one": Arm()})


def narrow():
    return 3
"""


def test_a_study_of_ones_own_is_a_function_of_a_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "study_of_mine.py").write_text(MINE)
    assert find_study("study_of_mine:wider")().question == "Wider?"
    assert find_study("credit") is STUDIES["credit"]
    with pytest.raises(fg.BadInput, match=r"gave 3, which is no fg\.recipes\.study\.Study"):
        find_study("study_of_mine:narrow")
    with pytest.raises(fg.BadInput, match="--study=chess is unknown; choose from credit, "):
        find_study("chess")


@pytest.fixture
def asked(monkeypatch) -> list:
    """Studies that only note which arm was run with which seeds; `None` among the arms interrupts."""
    asked = []

    def run_arm(arm, _settings, _world, begun, **_):
        if arm is None:
            raise KeyboardInterrupt
        asked.append((arm.changes["samples"], np.asarray(begun).tolist()))
        return [{"success": [0.0, 1.0]}] * len(begun)

    monkeypatch.setattr(compare, "warm_start_seeds", lambda _settings, _world, seeds, **_: np.array(seeds))
    monkeypatch.setattr(compare, "run_arm", run_arm)
    return asked


@pytest.mark.parametrize("kind", ["missing", "a file", "a folder in the place of its file"])
def test_a_study_has_its_folder_before_its_first_arm(asked, tmp_path, kind):
    study, folder = TWO._replace(arms={"one": Arm(changes={"samples": 2})}, worlds={"lookup": {}}), tmp_path / "a" / "b"
    if kind == "missing":
        assert run_study(study, folder, seeds=[0]) == read_runs(folder)
        return
    folder.parent.mkdir()
    if kind == "a file":
        folder.write_text("mine")
    else:
        (folder / compare.RUNS).mkdir(parents=True)
    with pytest.raises(fg.BadInput, match=re.escape(str(folder))):
        run_study(study, folder, seeds=[0])
    assert asked == []


@pytest.mark.usefixtures("asked")
def test_seeds_follow_one_another_on_a_cpu_and_are_vmapped_elsewhere(tmp_path, monkeypatch):
    """Unless so many lanes are asked for; `lanes` is what `map_over_seeds` gets."""
    lanes: list = []
    monkeypatch.setattr(
        compare,
        "run_arm",
        lambda *_, map_seeds, **__: lanes.append(map_seeds.keywords["lanes"]) or [{"success": [1.0]}],
    )
    study = TWO._replace(arms={"one": Arm()}, worlds={"lookup": {}})
    for number, platform in enumerate(("cpu", "gpu", "tpu")):
        monkeypatch.setattr(compare.jax, "default_backend", lambda platform=platform: platform)
        run_study(study, tmp_path / platform, seeds=[number])
    run_study(study, tmp_path, seeds=[0], lanes=4)
    assert lanes == [1, None, None, 4]


def test_a_study_resumes_and_takes_more_seeds(asked, tmp_path):
    two, four = Arm(changes={"samples": 2}), Arm(changes={"samples": 4})
    study = TWO._replace(arms={"one": two, "other": four}, worlds={"lookup": {}})
    with pytest.raises(KeyboardInterrupt):
        run_study(study._replace(arms={"one": two, "other": None}), tmp_path, seeds=[0])
    kept = (tmp_path / "runs.jsonl").read_text()
    run_study(study, tmp_path, seeds=[0])
    run_study(study._replace(arms={"one": two}), tmp_path, seeds=range(3))
    runs = run_study(study, tmp_path, seeds=range(4))
    assert asked == [(2, [0]), (4, [0]), (2, [1, 2]), (2, [3]), (4, [1, 2, 3])]
    assert (tmp_path / "runs.jsonl").read_text().startswith(kept)
    assert run_study(study, tmp_path, seeds=range(4)) == runs == read_runs(tmp_path)
    assert set(runs) == {(arm, "lookup", seed) for arm in study.arms for seed in range(4)}
    assert len(asked) == 5  # nothing was left to run


def test_a_study_whose_time_is_over_ends_before_its_next_arm(asked, tmp_path, capsys):
    two, four = Arm(changes={"samples": 2}), Arm(changes={"samples": 4})
    study = TWO._replace(arms={"one": two, "other": four}, worlds={"lookup": {}})
    budget = time_budget("9h", started=0.0, clock=iter((0.0, 32400.0)).__next__)
    with pytest.raises(OutOfTime):
        run_study(study, tmp_path, seeds=[0], budget=budget)
    assert asked == [(2, [0])]
    said = "the time budget of 9h is over; the same command resumes with the arm other"
    assert capsys.readouterr().err.endswith(f"{said}\n")
    assert len(run_study(study, tmp_path, seeds=[0])) == 2


@pytest.mark.slow
def test_a_published_run_comes_out_again_to_the_bit(monkeypatch):
    """The warm start, ten updates and two examinations of 256 tasks, with the flags of users, of one study of many.

    A processor on which none was run rounds otherwise, one of another generation, too: it has to come near, and the
    command says what is not equal.
    """
    made_on = json.loads(Path("docs/studies/machines.json").read_text())
    here = study_pages.processor_of_bits()
    of_here = [name for name, machine in made_on.items() if machine == here]
    study = [*made_on, *of_here][-1]
    monkeypatch.setenv("XLA_FLAGS", "")
    core = min(os.sched_getaffinity(0))  # the studies were run on one, and XLA parts work by their number
    flags = [f"--study={study}", "--check=docs/studies", "--until=10", "--cpu_devices=1"]
    source = (
        f"import os, runpy, sys; os.sched_setaffinity(0, [{core}]); sys.argv[1:] = {flags}; "
        "runpy.run_module('experiments.compare', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    found = last_line(done)
    assert len(found["found"]) == 2
    assert found["found"] == (found["published"] if of_here else pytest.approx(found["published"], abs=0.1))
    assert (done.returncode == 0) == (found["found"] == found["published"]), done.stderr


@pytest.mark.slow
def test_the_command_runs_arms_of_each_kind_and_refuses_another_study(tmp_path):
    flags = (f"--workdir={tmp_path}", "--num_seeds=1", "--examine_every=1", "--test_tasks=8", "--cpu_devices=1")
    ran = run_module("tests.experiments.tiny_study", "--study=tiny", *flags)
    assert ran.returncode == 0, ran.stderr
    assert [row["arm"] for row in last_line(ran)] == ["broadcast", "late", "taught", "in hindsight"]
    assert "| taught       |" in ran.stdout
    assert (tmp_path / "index.html").exists()
    for (arm, _, _), line in read_runs(tmp_path).items():
        assert (line["updates"], len(line["success"])) == ([0, 1, 2], 3)
        assert {len(figures) for figures in line["train"].values()} == {2}
        assert ("task_information" in line["train"]) == (arm == "broadcast")
        assert line["warnings"] == {}  # of two updates nothing can be said
    other = run_command("compare", "--study=clip", "--arms=no clip", *flags, check=False)
    check_refused(other, 'holds another run: study: there "tiny", here "clip"')
