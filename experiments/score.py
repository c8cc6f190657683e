"""Score a file of answers to a file of tasks: writes a file of values with reasons.

    python -m experiments.score --tasks=tasks.jsonl --answers=answers.jsonl --out=scores.jsonl
    python -m experiments.score --tasks='reasoning_gym:chain_sum?size=100' --answers=answers.jsonl --out=scores.jsonl

Tasks are `{id, query, answers, domain, …}` (`flowgrpo/data/task_files.py` lists the forms), answers `{id, output}`; a
line of the result is `{id, value, reason, parts, made_of}`, with value null if there is none, and a hash of task,
answer and settings. The domain of a task decides which reward judges it; with --judge, it is the P("Yes") of a model
for all. Lines are appended as they are computed, and the same command resumes: values are kept, missing ones are
judged again, and a file with scores of other tasks, answers or settings is refused. Prints a table by domain, with
means over the valid values, and one JSON line. Short answers take well below a millisecond each, programs about 50 ms
on a core.
"""

import json
import math
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from absl import flags

from flowgrpo import launch

from .cli import app
from .cli.help import flag_heading

flag_heading("Run")
_TASKS = flags.DEFINE_string("tasks", None, "Tasks: a .jsonl or .parquet file, or reasoning_gym:NAME.", required=True)
_ANSWERS = flags.DEFINE_string("answers", None, "Answers: a .jsonl file of {id, output}.", required=True)
_DOMAIN = flags.DEFINE_string("domain", None, "Domain of tasks without one, or with an unknown one.")
_JUDGE = flags.DEFINE_string("judge", None, "Folder of a model that judges all answers; the value is P(Yes).")
_TOLERANCE = flags.DEFINE_float("tolerance", None, "Relative and absolute tolerance for numbers.", lower_bound=0)
flag_heading("Devices and memory")
_SECONDS = flags.DEFINE_float("seconds", 5.0, "Timeout of one check, in seconds.", lower_bound=0.01)
_WORKERS = flags.DEFINE_integer(
    "sandbox_workers", None, "Number of concurrent checks; by default one per core.", lower_bound=1
)
_UNSAFE = flags.DEFINE_bool("unsafe_sandbox", False, "Run code even if it can't be isolated from this machine.")
flag_heading("Files and resuming")
_OUT = flags.DEFINE_string("out", None, "File of the scores; existing ones are kept.", required=True)
_FIELDS = flags.DEFINE_list("fields", [], "Names of fields in the task file, such as query=question,answers=gold.")
_SKIP = flags.DEFINE_bool("skip_bad", False, "Report and skip bad lines instead of stopping.")

app.read_flags(__name__)

from flowgrpo import __version__
from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.data.task_files import FileRecord, parse_fields, read_json_lines, read_tasks
from flowgrpo.data.tasks import Tasks
from flowgrpo.files import is_file, write_atomic
from flowgrpo.recipes import registry
from flowgrpo.report.metrics import read_metrics
from flowgrpo.report.progress import Progress
from flowgrpo.sandbox import Sandbox
from flowgrpo.types import BadInput, Task

CHUNK = 8  # answers that a worker takes at once
SHOWN = 3  # of each kind of fault, and of the reasons
WIDTH = 100  # of a line of the table


class Answers(NamedTuple):
    """Outputs by task id, and the sentences about lines that were left out."""

    outputs: dict[str, str]
    left_out: list[str]


def read_answers(path: Path, *, skip_bad: bool) -> Answers:
    """The outputs of a JSONL file, by id."""
    if not is_file(path):
        raise BadInput(f"--answers={path} is no file; give a .jsonl file of {{id, output}}")
    answers = Answers({}, [])
    for record in read_json_lines(path, "an answer is {id, output}"):
        try:
            identity, output = _answer(record)
            if identity in answers.outputs:
                raise BadInput(f"{record.place}: the id {identity!r} is there twice; keep one answer")
            answers.outputs[identity] = output
        except BadInput as error:
            if not skip_bad:
                raise
            answers.left_out.append(str(error))
    return answers


def _answer(record: FileRecord) -> tuple[str, str]:
    """The id and the output of a line."""
    place, content, _ = record
    if isinstance(content, str):
        raise BadInput(f"{place}: {content}")
    identity, output = content.get("id"), content.get("output")
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise BadInput(f"{place}: field 'id' must be the id of a task, as a text or an integer")
    if not isinstance(output, str):
        raise BadInput(f"{place}: field 'output' must be a text: what the system answered")
    return str(identity), output


def read_scores(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of scores that a file holds already, by id, without a last line that was cut off."""
    lines = {}
    for number, record in enumerate(read_metrics(path) if path.exists() else (), 1):
        value = record.get("value")
        if not isinstance(record.get("id"), str) or "value" not in record or isinstance(value, str | list | dict):
            raise BadInput(f"{path}, line {number}: isn't a score {{id, value, …}}; give another --out")
        lines[record["id"]] = record
    return lines


def kept_scores(path: Path, made_of: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The lines of a file that have a value; `BadInput` where one was made of other things than these hashes say."""
    kept = {identity: line for identity, line in read_scores(path).items() if line["value"] is not None}
    others = [identity for identity, line in kept.items() if line.get("made_of") != made_of.get(identity, "nothing")]
    if others:
        raise BadInput(
            f"{path} holds {len(others)} scores of other tasks, answers or settings, the first for {others[0]!r}: give "
            "another --out, or remove the file to score all again"
        )
    return kept


def hash_of(task: Task, output: str, settings: Mapping[str, Any]) -> str:
    """Hash what a score is made of: the task, the answer, who judges it and how."""
    domain = task.domain if task.domain in registry.DOMAINS else settings["domain"]
    about = [task.id, task.query, task.answers, dict(task.metadata), output, {**settings, "domain": domain}]
    return blake2b(json.dumps(about, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def line_of(identity: str, scored: RewardResult, made_of: str) -> str:
    """A line of the result; a part that is no number is null."""
    parts = {name: part if math.isfinite(part) else None for name, part in scored.parts.items()}
    line = {"id": identity, "value": scored.value, "reason": scored.reason, "parts": parts, "made_of": made_of}
    return json.dumps(line)


def score_all(reward: Reward, todo: Sequence[tuple[Task, str]], *, workers: int) -> Iterator[tuple[Task, RewardResult]]:
    """The scores of tasks and outputs in their order, as they come, by so many threads."""
    pool = ThreadPoolExecutor(workers)
    chunks = [tuple(zip(*todo[start : start + CHUNK], strict=True)) for start in range(0, len(todo), CHUNK)]
    try:
        scored = pool.map(lambda chunk: reward.score_all(*chunk), chunks)
        for (tasks, _), found in zip(chunks, scored, strict=True):
            yield from zip(tasks, found, strict=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def write_scores(
    scores: Iterator[tuple[Task, RewardResult]], out: TextIO, made_of: Mapping[str, str], total: int, progress: Progress
) -> None:
    """Write each score when it comes, and say now and then how far it is."""
    said = time.monotonic()
    for number, (task, scored) in enumerate(scores, 1):
        out.write(line_of(task.id, scored, made_of[task.id]) + "\n")
        out.flush()
        if number == total or time.monotonic() - said > 1:
            said = time.monotonic()
            progress.show("score", number, {}, total=total)
    progress.end()


def summarize_scores(lines: Mapping[str, Mapping[str, Any]], tasks: Iterable[Task]) -> dict[str, Any]:
    """Counts and means, over all and by domain, and the most frequent reasons for invalid and for zero values."""
    rows: dict[str, list[Mapping[str, Any] | None]] = {}
    for task in tasks:
        rows.setdefault(task.domain, []).append(lines.get(task.id))
    every = [line for row in rows.values() for line in row]
    reasons = {
        name: Counter(line.get("reason") for line in every if line is not None and line["value"] == value)
        for name, value in (("invalid", None), ("zero", 0))
    }
    return {
        **_counts(every),
        "domains": {name: _counts(row) for name, row in rows.items()},
        "reasons": {name: counted.most_common(SHOWN) for name, counted in reasons.items()},
    }


def _counts(row: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """The mean of the valid values, and how many lines are valid, invalid, and missing."""
    answered = [line["value"] for line in row if line is not None]
    valid = [value for value in answered if value is not None]
    counts = {"valid": len(valid), "invalid": len(answered) - len(valid), "unanswered": len(row) - len(answered)}
    return {"mean": sum(valid) / len(valid) if valid else None, **counts}


def format_summary(found: Mapping[str, Any]) -> str:
    """The summary as a table."""
    width = max(map(len, ["domain", *found["domains"]]))
    lines = [f"{'domain':<{width}} {'mean':>8} {'valid':>7} {'invalid':>8} {'unanswered':>11}"]
    for name, row in [*found["domains"].items(), ("all", found)]:
        mean = "-" if row["mean"] is None else f"{row['mean']:.4f}"
        lines.append(f"{name:<{width}} {mean:>8} {row['valid']:>7} {row['invalid']:>8} {row['unanswered']:>11}")
    if found["invalid"] or found["unanswered"]:
        lines.append("means are over the valid values alone: what is invalid or unanswered counts in none")
    for kind, reasons in found["reasons"].items():
        lines += [
            textwrap.fill(f"{kind} ({count}): {reason}", WIDTH, subsequent_indent="  ") for reason, count in reasons
        ]
    return "\n".join(lines)


def _say_faults(progress: Progress, what: str, faults: Sequence[str]) -> None:
    """Say how many faults of a kind there are, and the first of them."""
    if faults:
        first = "; ".join(faults[:SHOWN]) + ("; …" if len(faults) > SHOWN else "")
        progress.log(f"{len(faults)} {what}: {first}")


def make_judge(folder: str) -> Reward:
    """The P("Yes") of the model in a folder, which sees the gold answers."""
    from flowgrpo.models.hf import load_model
    from flowgrpo.rewards.judge import make_next_logp, verifier_probability

    model = load_model(folder)
    return verifier_probability(model.tokenizer, make_next_logp(model.policy, model.params))


def _make_reward(names: Set[str], modules: Iterable[str], sandbox: Sandbox) -> Reward:
    """Make the reward that judges tasks of these domains, as the flags have it: a judge, or the router of domains."""
    if _JUDGE.value:
        return make_judge(_JUDGE.value)
    means = registry.RewardContext(sandbox=sandbox, seconds=_SECONDS.value, tolerance=_TOLERANCE.value)
    for module in modules:
        sandbox.call(f"{module}:is_warm", seconds=60.0)  # what can't be loaded ends the command here
    if "code" in names and not (_UNSAFE.value or sandbox.isolation.active):
        raise BadInput(f"code can't be judged here: {sandbox.isolation}; --unsafe_sandbox runs it all the same")
    return registry.route_by_domain(means, default=_DOMAIN.value)


def _settings_of() -> dict[str, Any]:
    """Collect the flags that a score depends on, with the files of a judge, which may become others."""
    judge = Path(_JUDGE.value or "")
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in judge.glob("*"))
    return {
        "flowgrpo": __version__,
        "domain": _DOMAIN.value,
        "judge": [_JUDGE.value, files] if _JUDGE.value else None,
        "seconds": _SECONDS.value,
        "tolerance": _TOLERANCE.value,
    }


def _check_flags(out: Path) -> None:
    """Raise for flags that can't be honoured, before anything is read or written."""
    if _DOMAIN.value is not None and _DOMAIN.value not in registry.DOMAINS:
        raise BadInput(f"--domain={_DOMAIN.value} is unknown; choose from {', '.join(registry.DOMAINS)}")
    if not out.parent.is_dir():
        raise BadInput(f"--out={out}: there is no folder {out.parent}; make it")
    if out.exists() and not out.is_file():
        raise BadInput(f"--out={out} is no file; name one")


def main() -> None:
    """Score what isn't scored yet, then sum up all."""
    out, progress = Path(_OUT.value), Progress(1)
    _check_flags(out)
    fields = parse_fields(_FIELDS.value)
    tasks: Tasks = read_tasks(_TASKS.value, fields=fields, domain=_DOMAIN.value, skip_bad=_SKIP.value)
    answers = read_answers(Path(_ANSWERS.value), skip_bad=_SKIP.value)
    known, settings = {task.id: task for task in tasks}, _settings_of()
    made_of = {i: hash_of(known[i], output, settings) for i, output in answers.outputs.items() if i in known}
    kept = kept_scores(out, made_of)
    _say_faults(progress, "bad lines are left out", [*tasks.left_out, *answers.left_out])
    unknown = [repr(identity) for identity in answers.outputs if identity not in known]
    _say_faults(progress, "answers are of no task, and not scored", unknown)
    without = [repr(identity) for identity in known if identity not in answers.outputs]
    _say_faults(progress, "tasks have no answer", without)
    todo = [(known[i], answers.outputs[i]) for i in made_of if i not in kept]
    if kept:
        progress.log(f"{len(kept)} scores are in {out} already, {len(todo)} are to come")
    workers = _WORKERS.value or launch.num_cores()
    names = {task.domain for task, _ in todo} | {_DOMAIN.value or ""}
    modules = () if _JUDGE.value else registry.modules_to_preload(names)
    with Sandbox(workers=workers, preload=modules, unsafe=_UNSAFE.value) as sandbox:
        scores = score_all(_make_reward(names, modules, sandbox), todo, workers=workers) if todo else iter(())
        write_atomic(out, "".join(json.dumps(line) + "\n" for line in kept.values()))
        with out.open("a") as file:
            write_scores(scores, file, made_of, len(todo), progress)
    lines = read_scores(out)
    found = summarize_scores(lines, tasks)
    print(f"{format_summary(found)}\n\nwritten to {out}: {len(lines)} scores")
    left_out = len(tasks.left_out) + len(answers.left_out)
    print(json.dumps({**found, "unknown": len(unknown), "left_out": left_out}))


if __name__ == "__main__":
    app.run(main)
