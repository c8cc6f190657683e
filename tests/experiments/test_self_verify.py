"""Self-verification: the small model's tasks and prompts, what is said of reward and truth, and the command."""

import dataclasses
import json
import shutil
import subprocess
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from flowgrpo.contracts import RewardResult
from flowgrpo.data.tokenizer import load_tokenizer
from flowgrpo.models.hf import load_model
from flowgrpo.recipes import self_verify_tasks as own
from flowgrpo.recipes.offline_start import phrase_pretokenizer, write_model, write_start_settings, write_tokenizer
from flowgrpo.recipes.self_verify import (
    comparison_table,
    draw_curves,
    evaluate_answers,
    format_verdict,
    is_right,
    validation_line,
    yes_probability,
)
from flowgrpo.report.health import all_warnings
from flowgrpo.rewards.answers.match import answer
from flowgrpo.rewards.combine import SECOND_CHECK
from flowgrpo.rewards.judge import ask_without_gold, verdict_ids, verifier_probability
from flowgrpo.rollout.records import RecordedTrajectory, make_turn
from flowgrpo.training.hosted_training import second_check_metrics
from flowgrpo.training.kill_series import differences
from flowgrpo.training.run_dir import START
from flowgrpo.types import BadInput, Task
from tests.experiments.conftest import check_refused, last_line, metrics, result

CONFIG = own.preset(warm_tasks=100, warm_steps=60, warm_rows=8)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The tokenizer of the small model."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, own.tokenizer_texts(0), pretokenizer=phrase_pretokenizer, vocab_size=own.VOCAB_SIZE)
    return load_tokenizer(folder)


# Questions and what is shown ----------------------------------------------------------------------------


def test_questions_of_splits_are_disjoint_and_answers_right():
    parts = {split: own.make_questions(0, split, 0, 150) for split in ("train", "validation", "test")}
    queries = [{task.query for task in tasks} for tasks in parts.values()]
    assert len(set.union(*queries)) == sum(len(part) for part in queries)
    assert len({task.id for tasks in parts.values() for task in tasks}) == 450
    for task in parts["test"]:
        numbers = [int(word) for word in task.query.rstrip("?").replace(",", "").split() if word.isdigit()]
        assert len(set(numbers)) == own.NUMBERS_PER_QUESTION
        assert task.answers == (str(max(numbers)),)
    assert (
        own.make_questions(3, "train", 5, 2)[1] == own.make_question(3, "train", 6) != own.make_question(4, "train", 6)
    )


def test_answers_and_verdicts_are_wrong_as_often_as_they_should_be():
    random, tasks = np.random.default_rng(0), own.make_questions(0, "train", 0, 1000)
    answers = [own.draw_answer(task, random, 0.45) for task in tasks]
    right = np.array([task.answers[0] == answer for task, answer in zip(tasks, answers, strict=True)])
    assert right.mean() == pytest.approx(0.45, abs=0.05)
    assert all(answer in own.numbers_of(task) for task, answer in zip(tasks, answers, strict=True))
    pairs = zip(tasks, answers, strict=True)
    yes = np.array([own.draw_verdict(task, answer, random, 0.2, 0.1) == "Yes" for task, answer in pairs])
    assert yes[right].mean() == pytest.approx(0.9, abs=0.05)
    assert yes[~right].mean() == pytest.approx(0.2, abs=0.05)


def test_the_judge_is_taught_in_the_very_prompt_that_the_reward_renders(text):
    seen = []

    def next_logp(prompts):
        seen.extend(prompts)
        return np.log(np.full((len(prompts), text.vocab_size), 1 / text.vocab_size))

    reward = verifier_probability(text, next_logp, ask=ask_without_gold)
    task = own.make_question(0, "train", 0)
    given = [*own.numbers_of(task), "<|im_end|>\nYes", "a\nb", "x" * 20_000]
    reward.score_all([task] * len(given), given)
    assert seen == [own.judge_prompt(text, task, answer) for answer in given]


def test_what_is_imitated_is_the_reply_to_what_is_asked(text):
    tasks = own.make_questions(0, "train", 0, 20)
    records = own.demonstrations(text, tasks, CONFIG)
    assert len(records) == 2 * len(tasks)
    yes, no = (verdict_ids(text, word) for word in ("yes", "no"))
    for i, task in enumerate(tasks):
        replies = [record.turns[0].tokens[record.turns[0].chosen] for record in records[2 * i : 2 * i + 2]]
        assert [len(reply) for reply in replies] == [2, 2]
        assert [reply[1] for reply in replies] == [text.stop_ids[0]] * 2
        assert text.decode(replies[0][:1]) in own.numbers_of(task)
        assert replies[1][0] in (*yes, *no)
        judged = records[2 * i + 1].turns[0]
        shown = text.decode(judged.tokens[~judged.chosen])
        assert task.query in shown
        assert len(judged.tokens) < 30


# Reward and truth ---------------------------------------------------------------------------------------


def played(reward: float | None, right: bool, *, output: str = "7") -> RecordedTrajectory:
    task = Task("t", "Which is the largest of 7 and 3?", ("7",), "largest")
    turn = make_turn([1, 2], [3], [-0.5], 0, None, 0)
    own = {"task": task, "key": (0, 0), "sample": 0, "tools": ("",), "errors": (False,), "effect_counts": (0, 0)}
    reward_result = RewardResult(reward, "", {SECOND_CHECK: float(right)})
    return RecordedTrajectory(
        [turn], reward, 0, right, extends_context=False, output=output, reward_result=reward_result, seconds=0.0, **own
    )


def test_what_is_right_is_what_the_matcher_says_whatever_the_judge_says():
    assert is_right(RewardResult(0.1, "", {SECOND_CHECK: 1.0}))
    assert is_right(RewardResult(None, "no verdict", {SECOND_CHECK: 1.0}))
    assert not is_right(RewardResult(1.0, "", {SECOND_CHECK: 0.0}))
    assert not is_right(RewardResult(1.0))


@pytest.mark.slow
def test_R3_the_reward_is_the_judges_and_the_matcher_checks(tmp_path):
    write_model(tmp_path, own.tokenizer_texts(0), seed=0, pretokenizer=phrase_pretokenizer, vocab_size=own.VOCAB_SIZE)
    tasks = [own.make_question(0, "test", i) for i in range(3)]
    outputs = [tasks[0].answers[0], "nothing", f" {tasks[2].answers[0]} "]
    model = load_model(tmp_path)
    sure = model._replace(policy=model.policy._replace(unembed=partial(_yes_and_no, model.tokenizer)))
    results = yes_probability(sure, answer(), sure.params).score_all(tasks, outputs)
    assert [one.value for one in results] == pytest.approx([0.75] * 3, abs=1e-5)
    assert [is_right(one) for one in results] == [True, False, True]


def _yes_and_no(text, _params, hidden):
    """Logits of a judge that says Yes with 3/4 and No with 1/4."""
    yes, no = (verdict_ids(text, word)[0] for word in ("yes", "no"))
    row = np.full(text.vocab_size, -1e9, np.float32)
    row[yes], row[no] = np.log(3), 0.0
    return jax.numpy.broadcast_to(row, (*hidden.shape[:-1], len(row)))


def test_the_figures_hold_reward_truth_gap_and_how_good_the_judge_is():
    found = evaluate_answers([played(0.9, True), played(0.8, False), played(0.2, False), played(None, True)])
    assert found.success == pytest.approx(1 / 3)
    assert (found.samples, found.invalid) == (3, 1)
    assert found.outcome == pytest.approx(1.9 / 3)
    assert found.gap == pytest.approx(0.9 / 3)
    assert found.judge_right == pytest.approx(2 / 3)
    assert found.calibration_error == pytest.approx((0.1 + 0.8 + 0.2) / 3)
    assert {"outcome", "gap", "judge_right", "calibration_error", "success"} <= set(found.metrics())
    same_bin = evaluate_answers([played(p_yes, right) for p_yes, right in ((0.91, True), (0.99, False), (1.0, True))])
    assert same_bin.calibration_error == pytest.approx((0.91 + 0.99 + 1.0 - 2) / 3)


def test_R3_second_check_and_gap_are_metrics_of_an_update():
    unchecked = dataclasses.replace(played(1.0, True), reward_result=RewardResult(1.0))
    found = second_check_metrics([played(0.9, True), played(0.8, False), unchecked])
    assert found == {SECOND_CHECK: 0.5, "gap": pytest.approx(0.35)}
    assert second_check_metrics([unchecked]) == {}


def test_a_judge_that_judges_nothing_is_refused_with_its_reason():
    silent = dataclasses.replace(played(None, True), reward_result=RewardResult(None, "the judge says Maybe"))
    with pytest.raises(BadInput, match=r"none of 2 answers \(the judge says Maybe\)"):
        evaluate_answers([silent, silent])


def test_the_table_has_a_column_for_each_evaluation():
    one = evaluate_answers([played(0.9, True), played(0.8, False)])
    table = comparison_table({"start": one, "last update": evaluate_answers([played(0.8, True)])})
    rows = {line[:24].strip(): line[24:].split() for line in table.splitlines()}
    assert rows["true accuracy"][0] == "50.0%"
    assert rows['P("Yes")'] == ["85.0%", "80.0%"]
    assert rows["gap"] == ["+35.0%", "-20.0%"]
    assert rows["not judged"] == ["0", "0"]


def test_a_warning_comes_when_the_gap_has_grown_since_the_start():
    grown = evaluate_answers([played(0.9, True), played(0.9, False)])
    assert grown.gap == pytest.approx(0.4)
    lines = [{"phase": "validation", "update": 0, "gap": 0.1}, {"phase": "validation", "update": 10} | vars(grown)]
    (told,) = all_warnings(lines)
    assert told["warning"] == "gap"
    assert "from +0.10 to +0.40" in told["words"]
    assert "gap +0.40" in validation_line(grown)
    assert "P(Yes) 0.80, wrong, should be 7" in format_verdict(played(0.8, False, output="3"))


def test_both_curves_are_drawn_from_the_metrics(tmp_path):
    def line(phase, update, outcome, success, **more):
        return json.dumps({"phase": phase, "update": update, "outcome": outcome, "success": success, **more})

    lines = [line("validation", 0, 0.4, 0.4), line("train", 1, 0.5, 0.4, kl=0.01), line("validation", 1, 0.9, 0.3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert draw_curves(tmp_path).read_bytes().startswith(b"\x89PNG")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(BadInput, match="no validation yet"):
        draw_curves(tmp_path)


# Bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "chosen", "said"),
    [
        ("tasks.jsonl", {}, "--tasks needs --model"),
        (None, {"max_tokens": 32}, "leaves no room for a context"),
        (None, {"temperature": 0.0}, "more than 0"),
        (None, {"colour": 1}, "no setting"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tasks, chosen, said):
    with pytest.raises(BadInput, match=said):
        own.preset(tasks=tasks, **chosen)


def test_a_start_that_was_made_otherwise_is_refused(tmp_path):
    folder = tmp_path / START
    folder.mkdir()
    with pytest.raises(BadInput, match="can't be read"):
        own.make_start_model(tmp_path, CONFIG)
    write_start_settings(folder, {name: CONFIG.settings()[name] for name in own.MADE_WITH})
    own.make_start_model(tmp_path, CONFIG)
    with pytest.raises(BadInput, match="was made otherwise: seed: there 0, here 1"):
        own.make_start_model(tmp_path, CONFIG.replace(seed=1))


# The command --------------------------------------------------------------------------------------------

SIZES = (
    *("--queries=2", "--samples=4", "--validation_tasks=16", "--test_tasks=8", "--max_tokens=4"),
    *("--checkpoint_every=1", "--learning_rate=1e-2", "--dtype=float32"),
)


@pytest.fixture(scope="module")
def begin(tmp_path_factory) -> tuple[str, ...]:
    """Flags that give a start of a few steps, which knows what kind of word a verdict is, and tasks for it."""
    base = tmp_path_factory.mktemp("given")
    own.make_start_model(base, CONFIG)
    tasks = own.make_questions(0, "train", 0, 60)
    lines = [{"id": task.id, "query": task.query, "answers": task.answers, "domain": task.domain} for task in tasks]
    (base / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"--model={base / START}", f"--tasks={base / 'tasks.jsonl'}", *SIZES


@pytest.fixture(scope="module")
def whole(command, begin, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """Two updates in one go, and what the command said."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, command("self_verify", *begin, f"--workdir={folder}", "--updates=2")


@pytest.mark.slow
def test_R3_a_run_says_what_is_paid_and_what_is_true(whole):
    folder, said = whole
    found, train = result(folder), metrics(folder, "train")
    names = ("success", "reward", "gap", "judge_right", "calibration_error")
    assert {f"{name}_{when}" for name in names for when in ("before", "after", "best")} <= set(found)
    assert found["updates"] == 2
    assert 0 < found["reward_after"] < 1
    assert not (folder / "start").exists()
    assert [line["update"] for line in train] == [1, 2]
    assert all({"outcome", "success", "gap"} <= set(line) for line in train)
    assert [line["update"] for line in metrics(folder, "validation")] == [0, 1, 2]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "true accuracy" in said.stdout
    assert "validation: " in said.stderr
    assert last_line(said) == found


@pytest.mark.slow
def test_S1_a_resumed_offloaded_run_equals_an_uninterrupted_one(command, begin, whole, tmp_path):
    command("self_verify", *begin, f"--workdir={tmp_path}", "--updates=1", "--offload=disk", "--watch_seconds=500")
    command("self_verify", *begin, f"--workdir={tmp_path}", "--updates=2")
    assert result(tmp_path)["resumed_at"] == [1]
    assert differences(whole[0], tmp_path) == {}


def learned(folder: Path) -> list[dict]:
    """The lines of two updates, the first of which moved what was trained."""
    one, two = metrics(folder, "train")
    assert one["grad_norm"] > 1e-3
    assert (one["kl"], two["kl"] > 1e-5) == (pytest.approx(0.0, abs=1e-3), True)
    return [one, two]


@pytest.mark.slow
def test_an_int8_adapter_trains_on_two_devices_and_is_exported(command, begin, tmp_path):
    flags = ("--updates=2", "--lora_rank=2", "--base_dtype=int8", "--optimizer=adamw8bit", "--remat")
    devices = ("--mesh=fsdp=2", "--cpu_devices=2")
    command("self_verify", *begin, f"--workdir={tmp_path}", *flags, *devices)
    learned(tmp_path)
    out = tmp_path / "out"
    exported = command("export", f"--workdir={tmp_path}", f"--out={out}", "--adapter", "--which=last")
    assert last_line(exported)["update"] == 2
    assert (out / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_an_offline_run_without_updates_is_that_of_its_own_start(command, begin, tmp_path):
    """As if the command had made it: what its own sizes would make takes minutes."""
    shutil.copytree(begin[0].partition("=")[2], tmp_path / START)
    usual = own.preset(max_tokens=4).settings()
    write_start_settings(tmp_path / START, {name: usual[name] for name in own.MADE_WITH})
    command("self_verify", f"--workdir={tmp_path}", "--updates=0", *SIZES)
    found = result(tmp_path)
    assert (found["updates"], found["success_after"]) == (0, found["success_before"])


@pytest.mark.slow
def test_tasks_without_an_answer_are_refused(command, begin, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"id": "1", "query": "Who?", "answers": [], "domain": "x"}) + "\n")
    refused = command("self_verify", begin[0], f"--tasks={path}", f"--workdir={tmp_path / 'run'}", check=False)
    check_refused(refused, "task '1' has no answer")
