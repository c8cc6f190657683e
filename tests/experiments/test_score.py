"""The score command: values with reasons as they come, faults named, and nothing lost that was written."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from commands import run_module
from tiny_judge import SPELLINGS, id_of, judge_text

from experiments import score
from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.models.hf import init_model, save_model
from flowgrpo.recipes import registry
from flowgrpo.report.progress import Progress
from flowgrpo.sandbox import Sandbox
from flowgrpo.types import BadInput, Task
from tests.experiments.conftest import check_refused

TASKS = [
    {"id": "sum", "query": "2 + 2?", "answer": "4", "domain": "math"},
    {"id": "half", "query": "Write 0.5 as a fraction.", "answers": ["1/2"], "domain": "math"},
    {"id": "town", "query": "The capital of France?", "answers": ["Paris"], "domain": "answer"},
    {"id": "add", "query": "f adds.", "domain": "code", "tests": ["assert f(1, 2) == 3", "assert f(0, 0) == 1"]},
    {"id": "poem", "query": "A poem?", "answers": [], "domain": "poetry"},
    {"id": "left", "query": "?", "answers": ["1"], "domain": "answer"},
]
ANSWERS = [
    {"id": "sum", "output": "It is \\boxed{4}."},
    {"id": "half", "output": "\\boxed{\\frac{2}{3}}"},
    {"id": "town", "output": "<answer>Paris</answer>"},
    {"id": "add", "output": "```python\ndef f(a, b): return a + b\n```"},
    {"id": "poem", "output": "Roses"},
    {"id": "who", "output": "me"},
]


def put(path: Path, records) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    paths = [f"--{name}={folder / name}.jsonl" for name in ("tasks", "answers", "out")]
    return run_module("experiments.score", *paths, "--unsafe_sandbox", *arguments)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_answers_of_several_domains_are_scored_and_resumed(tmp_path):
    """It keeps what has a value, judges what has none again, and refuses what was made of another answer."""
    put(tmp_path / "tasks.jsonl", TASKS)
    put(tmp_path / "answers.jsonl", ANSWERS)
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    found = lines(tmp_path / "out.jsonl")
    values = {line["id"]: line["value"] for line in found}
    assert values == {"town": 1.0, "sum": 1.0, "half": 0.0, "add": 0.5, "poem": None}
    assert all(set(line) == {"id", "value", "reason", "parts", "made_of"} for line in found)
    assert "1 answers are of no task, and not scored: 'who'" in done.stderr
    assert "1 tasks have no answer: 'left'" in done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["valid"], figures["invalid"], figures["unknown"], figures["unanswered"]) == (4, 1, 1, 1)
    assert figures["mean"] == pytest.approx(2.5 / 4)
    assert figures["domains"]["math"] == {"mean": 0.5, "valid": 2, "invalid": 0, "unanswered": 0}
    assert "of domain 'poetry', which has no reward" in figures["reasons"]["invalid"][0][0]
    cut = put(tmp_path / "out.jsonl", [line | {"reason": "kept"} for line in found[1:]] + ['{"id": "sum", "val'])
    cut.write_text(cut.read_text()[:-1])
    again = run(tmp_path, "--domain=answer")  # which another judges only where no domain is known
    assert "3 scores are in" in again.stderr
    found = lines(tmp_path / "out.jsonl")
    assert [(line["id"], line["reason"] == "kept") for line in found[:3]] == [
        (n, True) for n in ("half", "town", "add")
    ]
    assert {line["id"]: line["value"] for line in found[3:]} == {"sum": 1.0, "poem": None}
    put(tmp_path / "answers.jsonl", [answer | {"output": "5"} for answer in ANSWERS[:1]] + ANSWERS[1:])
    check_refused(run(tmp_path), "out.jsonl holds 1 scores of other tasks, answers or settings, the first for 'sum'")
    assert lines(tmp_path / "out.jsonl") == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--domain=maths"], "--domain=maths is unknown; choose from answer, math,"),
        ([], "answers.jsonl, line 2: isn't JSON"),
    ],
)
def test_bad_input_gets_one_sentence_and_nothing_is_written(tmp_path, arguments, words):
    put(tmp_path / "tasks.jsonl", TASKS)
    put(tmp_path / "answers.jsonl", [ANSWERS[0], "{", ANSWERS[2]])
    done = run(tmp_path, *arguments)
    check_refused(done, words)
    assert not (tmp_path / "out.jsonl").exists()


# Parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "isn't a JSON object"),
        ("[" * 100_000, "isn't JSON"),
        ({"output": "x"}, "field 'id' must be"),
        ({"id": True, "output": "x"}, "field 'id' must be"),
        ({"id": "b", "output": None}, "field 'output' must be a text"),
        ({"id": "a", "output": "again"}, "the id 'a' is there twice"),
    ],
)
def test_a_bad_answer_is_named_and_can_be_left_out(tmp_path, line, words):
    path = put(tmp_path / "answers.jsonl", [{"id": "a", "output": "x"}, line, {"id": 3, "output": "y"}])
    with pytest.raises(BadInput) as caught:
        score.read_answers(path, skip_bad=False)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert words in str(caught.value)
    assert score.read_answers(path, skip_bad=True) == ({"a": "x", "3": "y"}, [str(caught.value)])


def test_a_file_without_scores_is_refused_and_unchanged(tmp_path):
    for content in ('{"id": "a", "output": "x"}\n', "notes\n", '{"id": "a", "value": "1"}\n'):
        (tmp_path / "out.jsonl").write_text(content)
        with pytest.raises(BadInput, match=r"line 1: isn't|:1 is not a JSON object"):
            score.read_scores(tmp_path / "out.jsonl")
        assert (tmp_path / "out.jsonl").read_text() == content


@pytest.mark.parametrize("end", [RuntimeError, KeyboardInterrupt])
def test_a_crash_and_ctrl_c_keep_every_line_that_was_written(tmp_path, end):
    def judge(task, _output):
        if task.id == "9":
            raise end
        return RewardResult(1.0)

    todo = [(Task(str(number), "?", (), "a"), "x") for number in range(20)]
    out = tmp_path / "out.jsonl"
    made_of = {task.id: "a hash" for task, _ in todo}
    with out.open("w") as file, pytest.raises(end):
        score.write_scores(score.score_all(Reward(judge), todo, workers=2), file, made_of, 20, Progress(1))
    assert list(score.read_scores(out)) == [str(number) for number in range(8)]  # the chunk before the crash


@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_scores_come_in_order_whatever_the_workers(count):
    todo = [(Task(str(number), "?", (), "a"), f"{number}") for number in range(count)]
    reward = Reward(lambda _task, output: RewardResult(float(output)))
    found = list(score.score_all(reward, todo, workers=3))
    assert [(task.id, scored.value) for task, scored in found] == [(str(n), float(n)) for n in range(count)]


def test_parts_that_are_no_numbers_are_null_and_the_line_stays_ascii():
    line = score.line_of("é\ud800", RewardResult(None, "why", {"a": float("inf")}), "a hash")
    assert line.isascii()
    said = {"id": "é\ud800", "value": None, "reason": "why", "parts": {"a": None}, "made_of": "a hash"}
    assert json.loads(line) == said


def test_the_summary_counts_invalid_and_unanswered_and_cuts_no_word():
    tasks = [Task(name, "?", (), domain) for name, domain in zip("abcde", "xxyyx", strict=True)]
    values = {"a": (1.0, ""), "b": (0.0, "wrong"), "c": (None, "lost " * 50), "d": (None, "lost " * 50)}
    found = score.summarize_scores(
        {i: {"value": value, "reason": reason} for i, (value, reason) in values.items()}, tasks
    )
    assert (found["mean"], found["valid"], found["invalid"], found["unanswered"]) == (0.5, 2, 2, 1)
    assert found["domains"] == {
        "x": {"mean": 0.5, "valid": 2, "invalid": 0, "unanswered": 1},
        "y": {"mean": None, "valid": 0, "invalid": 2, "unanswered": 0},
    }
    assert found["reasons"] == {"invalid": [("lost " * 50, 2)], "zero": [("wrong", 1)]}
    table = score.format_summary(found).splitlines()
    assert table[:5] == [
        "domain     mean   valid  invalid  unanswered",
        "x        0.5000       2        0           1",
        "y             -       0        2           0",
        "all      0.5000       2        2           1",
        "means are over the valid values alone: what is invalid or unanswered counts in none",
    ]
    assert " ".join(table[5:]).split() == ["invalid", "(2):", *["lost"] * 50, "zero", "(1):", "wrong"]
    assert max(map(len, table)) <= 100


SETTINGS = {"flowgrpo": "1", "domain": None, "judge": None, "seconds": 5.0, "tolerance": None}


@pytest.mark.parametrize(
    "changed",
    [
        {"task": {"query": "3 + 3?"}},
        {"task": {"answers": ("5",)}},
        {"task": {"domain": "k12"}},
        {"task": {"metadata": {"tests": ["assert f()"]}}},
        {"output": "5"},
        *({"settings": {name: value}} for name, value in (("flowgrpo", "2"), ("judge", ["a", []]), ("tolerance", 0.1))),
    ],
)
def test_scores_of_other_inputs_are_refused_and_missing_ones_judged_again(tmp_path, changed):
    task, path = Task("sum", "2 + 2?", ("4",), "math"), tmp_path / "out.jsonl"
    now = score.hash_of(task, "4", SETTINGS)
    assert now == score.hash_of(
        task, "4", SETTINGS | {"domain": "k12"}
    )  # which is for tasks without a domain of theirs
    text = (
        score.line_of("sum", RewardResult(1.0), now)
        + "\n"
        + score.line_of("null", RewardResult(None, "lost"), now)
        + "\n"
    )
    path.write_text(text)
    assert list(score.kept_scores(path, {"sum": now, "null": now})) == ["sum"]
    parts = {"task": {}, "output": "4", "settings": {}} | changed
    other = score.hash_of(replace(task, **parts["task"]), parts["output"], SETTINGS | parts["settings"])
    for made_of in ({"sum": other}, {}):
        with pytest.raises(BadInput, match=r"holds 1 scores of other tasks.*'sum': give another --out, or remove the"):
            score.kept_scores(path, made_of)
    assert path.read_text() == text


def test_every_domain_has_a_reward_that_answers():
    with Sandbox(unsafe=True) as sandbox:
        means = registry.RewardContext(sandbox=sandbox, tolerance=0.1)
        for name in set(registry.DOMAINS) - {"math", "mathematics", "reasoning_gym"}:
            scored = registry.DOMAINS[name].make(means)
            task = Task("t", "?", ("1",), name, {"tests": ["assert f() == 1"]})
            assert isinstance(registry.route_by_domain(means).score(task, "1"), RewardResult)
            assert isinstance(scored, Reward)
        assert registry.route_by_domain(means).score(Task("t", "?", ("100",), "answer"), "104").value == 1.0
        assert registry.route_by_domain(means).score(Task("t", "?", ("100",), "poem"), "104").value is None
        assert (
            registry.route_by_domain(means, default="answer").score(Task("t", "?", ("100",), "poem"), "104").value
            == 1.0
        )


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda _name: None)
    with pytest.raises(BadInput, match=r"needs math_verify: pip install 'math-verify"):
        registry.modules_to_preload(["math", "code"])
    assert registry.modules_to_preload(["code", "poem"]) == ()
    with Sandbox(unsafe=True) as sandbox:  # and is in the way of no other domain
        reward = registry.route_by_domain(registry.RewardContext(sandbox=sandbox))
        scored = {name: reward.score(Task("t", "?", ("4",), name), "4") for name in ("math", "answer")}
    assert scored["answer"].value == 1.0
    assert scored["math"].value is None
    assert "needs math_verify: pip install 'math-verify" in scored["math"].reason


def write_judge(folder: Path) -> None:
    """A random model whose every reply begins with Yes or No."""
    text = judge_text()
    source = {"model_type": "qwen2", "vocab_size": text.vocab_size, "hidden_size": 32, "intermediate_size": 48}
    source |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = init_model({**source, "tie_word_embeddings": False, "initializer_range": 0.4}, jax.random.key(0))
    way_d = 10 * jax.random.normal(jax.random.key(1), (32,))
    signs_v = jnp.zeros(text.vocab_size)
    for word in SPELLINGS:
        signs_v = signs_v.at[id_of(word)].set(1.0 if word.strip().lower() == "yes" else -1.0)
    params = model.params | {"unembed": jnp.outer(way_d, signs_v).astype(model.params["unembed"].dtype)}
    save_model(folder, model._replace(params=params, tokenizer=text))


@pytest.mark.slow
def test_a_model_in_a_folder_judges_all_answers(tmp_path):
    """The values that the command writes are those that the same judge gives in this process."""
    write_judge(tmp_path / "judge")
    tasks = [{"id": str(i), "query": f"{i} + 1?", "answer": str(i + 1), "domain": "any"} for i in range(6)]
    put(tmp_path / "tasks.jsonl", tasks)
    put(tmp_path / "answers.jsonl", [{"id": str(i), "output": f"It is {i + 1 + i % 2}."} for i in range(6)])
    done = run(tmp_path, f"--judge={tmp_path / 'judge'}")
    assert done.returncode == 0, done.stderr
    judge = score.make_judge(str(tmp_path / "judge"))
    for i, line in enumerate(lines(tmp_path / "out.jsonl")):
        said = judge.score(Task(str(i), f"{i} + 1?", (str(i + 1),), "any"), f"It is {i + 1 + i % 2}.")
        assert line["parts"]["mass"] > 0.9
        assert line["value"] == pytest.approx(said.value, abs=1e-5)
