"""Scores answers: a file of tasks and a file of answers flow in, a file of values with their reasons flows out.

    python -m experiments.score --tasks=tasks.jsonl --answers=answers.jsonl --out=scores.jsonl
    python -m experiments.score --tasks='reasoning_gym:chain_sum?size=100' --answers=answers.jsonl --out=scores.jsonl

Tasks are `{id, query, answers, domain, …}` (`flowgrpo/task_files.py` lists the forms), answers `{id, output}`; a line
of the result is `{id, value, reason, parts}`, with value null where there is no verdict. The domain of a task decides
who judges it (`experiments/domains.py`); with --judge, it is the P("Yes") of a model for all. Lines are written as they
come; what was written is kept, and the same command goes on where it was stopped. Prints a table by domain and one
JSON line. Short answers take well below a millisecond each, programs about 50 ms on a core.
"""

import json
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from absl import flags

import flowgrpo as fg
from experiments import common, domains
from experiments.headings import heading
from flowgrpo import launch
from flowgrpo.contracts import Reward, Scored
from flowgrpo.report.progress import Progress
from flowgrpo.rewards.router import score_async
from flowgrpo.sandbox import Sandbox
from flowgrpo.task_files import parse_fields, read_tasks
from flowgrpo.tasks import Tasks
from flowgrpo.types import Task

heading("What is run")
_TASKS = flags.DEFINE_string("tasks", None, "Tasks: a .jsonl or .parquet file, or reasoning_gym:NAME.", required=True)
_ANSWERS = flags.DEFINE_string("answers", None, "Answers: a .jsonl file of {id, output}.", required=True)
_DOMAIN = flags.DEFINE_string("domain", None, "The domain of tasks that name none, or one that nobody judges.")
_JUDGE = flags.DEFINE_string("judge", None, "Folder of a model that judges all answers: P(Yes) is the value.")
_TOLERANCE = flags.DEFINE_float(
    "tolerance", None, "How far numbers may be off, relatively and absolutely.", lower_bound=0
)
heading("Devices and memory")
_SECONDS = flags.DEFINE_float("seconds", 5.0, "Seconds of one check.", lower_bound=0.01)
_WORKERS = flags.DEFINE_integer("sandbox_workers", None, "Checks at once; by default one a core.", lower_bound=1)
_UNSAFE = flags.DEFINE_bool("unsafe_sandbox", False, "Run code even where nothing isolates it from this machine.")
heading("Files and resuming")
_OUT = flags.DEFINE_string("out", None, "Where the scores go; what is there already is kept.", required=True)
_FIELDS = flags.DEFINE_list("fields", [], "Names of fields in the task file, such as query=question,answers=gold.")
_SKIP = flags.DEFINE_bool("skip_bad", False, "Leave bad lines out, and say so, instead of ending.")

CHUNK = 8  # answers that a worker takes at once
SHOWN = 3  # of each kind of fault, and of the reasons


class Answers(NamedTuple):
    """Outputs by task id, and the sentences about lines that were left out."""

    outputs: dict[str, str]
    left_out: list[str]


# Files --------------------------------------------------------------------------------------------------


def read_answers(path: Path, *, skip_bad: bool) -> Answers:
    """The outputs of a JSONL file, by id."""
    if not path.is_file():
        raise fg.BadInput(f"--answers={path} is no file; give a .jsonl file of {{id, output}}")
    answers = Answers({}, [])
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    identity, output = _answer(line, f"{path}, line {number}")
                    if identity in answers.outputs:
                        raise fg.BadInput(f"{path}, line {number}: the id {identity!r} is there twice; keep one answer")
                    answers.outputs[identity] = output
            except fg.BadInput as error:
                if not skip_bad:
                    raise
                answers.left_out.append(str(error))
    return answers


def _answer(line: bytes, place: str) -> tuple[str, str]:
    """The id and the output of a line."""
    record = _record(line, place)
    identity, output = record.get("id"), record.get("output")
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise fg.BadInput(f"{place}: field 'id' must be the id of a task, as a text or an integer")
    if not isinstance(output, str):
        raise fg.BadInput(f"{place}: field 'output' must be a text: what the system answered")
    return str(identity), output


def _record(line: bytes, place: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise fg.BadInput(f"{place}: isn't JSON ({error}); mend or remove the line") from None
    if not isinstance(record, dict):
        raise fg.BadInput(f"{place}: isn't a JSON object; mend or remove the line")
    return record


def read_scores(path: Path) -> dict[str, Scored]:
    """The scores that a file holds already; a last line that was cut off is removed."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    scores = {}
    for number, line in enumerate(whole.splitlines(), 1):
        record = _record(line, f"{path}, line {number}")
        value = record.get("value")
        if not isinstance(record.get("id"), str) or "value" not in record or isinstance(value, str | list | dict):
            raise fg.BadInput(f"{path}, line {number}: isn't a score {{id, value, …}}; give another --out")
        scores[record["id"]] = Scored(value, str(record.get("reason", "")))
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return scores


def line_of(identity: str, scored: Scored) -> str:
    """A line of the result; a part that is no number is null."""
    parts = {name: part if math.isfinite(part) else None for name, part in scored.parts.items()}
    return json.dumps({"id": identity, "value": scored.value, "reason": scored.reason, "parts": parts})


# Scoring ------------------------------------------------------------------------------------------------


def score_all(reward: Reward, todo: Sequence[tuple[Task, str]], *, workers: int) -> Iterator[tuple[Task, Scored]]:
    """The scores of tasks and outputs in their order, as they come, by so many threads."""
    pool = ThreadPoolExecutor(workers)
    waiting: deque = deque()
    starts = iter(range(0, len(todo), CHUNK))
    try:
        while True:
            for start in starts:
                chunk = todo[start : start + CHUNK]
                tasks, outputs = [task for task, _ in chunk], [output for _, output in chunk]
                waiting.append((tasks, score_async(reward, tasks, outputs, pool)))
                if len(waiting) > 2 * workers:
                    break
            if not waiting:
                return
            tasks, future = waiting.popleft()
            yield from zip(tasks, future.result(), strict=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def write_scores(scores: Iterator[tuple[Task, Scored]], out: TextIO, total: int, progress: Progress) -> None:
    """Write each score when it comes, and say now and then how far it is."""
    said, phase = time.monotonic(), "score"
    for number, (task, scored) in enumerate(scores, 1):
        out.write(line_of(task.id, scored) + "\n")
        out.flush()
        if number == total or time.monotonic() - said > 1:
            said = time.monotonic()
            progress.show(phase, number, {}, total=total)
    progress.end()


# What is said -------------------------------------------------------------------------------------------


def summary(scores: Mapping[str, Scored], domain_of: Callable[[str], str]) -> dict[str, Any]:
    """Counts and means, over all and by domain, and the most frequent reasons for invalid and for zero values."""
    rows: dict[str, list[Scored]] = {"all": list(scores.values())}
    for identity, scored in scores.items():
        rows.setdefault(domain_of(identity), []).append(scored)
    table = {}
    for name, row in rows.items():
        values = [scored.value for scored in row if scored.value is not None]
        mean = sum(values) / len(values) if values else None
        table[name] = {"mean": mean, "valid": len(values), "invalid": len(row) - len(values)}
    reasons = {
        "invalid": Counter(scored.reason for scored in scores.values() if scored.value is None),
        "zero": Counter(scored.reason for scored in scores.values() if scored.value == 0),
    }
    return {**table.pop("all"), "domains": table, "reasons": {k: c.most_common(SHOWN) for k, c in reasons.items()}}


def report(found: Mapping[str, Any]) -> str:
    """The summary as a table."""
    lines = [f"{'domain':<20} {'mean':>7} {'valid':>7} {'invalid':>8}"]
    for name, row in [*found["domains"].items(), ("all", found)]:
        mean = "-" if row["mean"] is None else f"{row['mean']:.4f}"
        lines.append(f"{name[:20]:<20} {mean:>7} {row['valid']:>7} {row['invalid']:>8}")
    for kind, reasons in found["reasons"].items():
        lines += [f"{kind} ({count}): {reason[:100]}" for reason, count in reasons]
    return "\n".join(lines)


def say_faults(progress: Progress, what: str, faults: Sequence[str]) -> None:
    """Say how many faults of a kind there are, and the first of them."""
    if faults:
        first = "; ".join(faults[:SHOWN]) + ("; …" if len(faults) > SHOWN else "")
        progress.say(f"{len(faults)} {what}: {first}")


# The command --------------------------------------------------------------------------------------------


def make_judge(folder: str) -> Reward:
    """The P("Yes") of the model in a folder, which sees the gold answers."""
    from flowgrpo.models.hf import load_model
    from flowgrpo.rewards.judge import make_next_logp, verifier_probability

    model = load_model(folder)
    return verifier_probability(model.text, make_next_logp(model.policy, model.params))


def make_reward(tasks: Sequence[Task], sandbox: Sandbox) -> Reward:
    """Make the reward that judges these tasks, as the flags have it: a judge, or the router of domains."""
    if _JUDGE.value:
        return make_judge(_JUDGE.value)
    means = domains.Means(sandbox=sandbox, seconds=_SECONDS.value, tolerance=_TOLERANCE.value)
    names = {task.domain for task in tasks}
    for module in domains.preload({*names, _DOMAIN.value or ""}):
        sandbox.call(f"{module}:is_warm", seconds=60.0)  # what can't be loaded ends the command here
    if "code" in {*names, _DOMAIN.value} and not (_UNSAFE.value or sandbox.isolation.active):
        raise fg.BadInput(f"code can't be judged here: {sandbox.isolation}; --unsafe_sandbox runs it all the same")
    return domains.route(means, default=_DOMAIN.value)


def check_flags(out: Path) -> None:
    """Raise for flags that can't be honoured, before anything is read or written."""
    if _DOMAIN.value is not None and _DOMAIN.value not in domains.DOMAINS:
        raise fg.BadInput(f"--domain={_DOMAIN.value} is unknown; choose from {', '.join(domains.DOMAINS)}")
    if not out.parent.is_dir():
        raise fg.BadInput(f"--out={out}: there is no folder {out.parent}; make it")
    if out.exists() and not out.is_file():
        raise fg.BadInput(f"--out={out} is no file; name one")


def main() -> None:
    """Score what isn't scored yet, then sum up all."""
    out, progress = Path(_OUT.value), Progress(1)
    check_flags(out)
    fields = parse_fields(_FIELDS.value)
    tasks: Tasks = read_tasks(_TASKS.value, fields=fields, domain=_DOMAIN.value, skip_bad=_SKIP.value)
    answers = read_answers(Path(_ANSWERS.value), skip_bad=_SKIP.value)
    known = {task.id: task for task in tasks}
    kept = read_scores(out)
    say_faults(progress, "bad lines are left out", [*tasks.left_out, *answers.left_out])
    unknown = [repr(identity) for identity in answers.outputs if identity not in known]
    say_faults(progress, "answers are of no task, and not scored", unknown)
    without = [repr(identity) for identity in known if identity not in answers.outputs]
    say_faults(progress, "tasks have no answer", without)
    todo = [(known[i], output) for i, output in answers.outputs.items() if i in known and i not in kept]
    if kept:
        progress.say(f"{len(kept)} scores are in {out} already, {len(todo)} are to come")
    workers = _WORKERS.value or launch.cores()
    names = {task.domain for task, _ in todo} | {_DOMAIN.value or ""}
    modules = () if _JUDGE.value else domains.preload(names)
    with Sandbox(workers=workers, preload=modules, unsafe=_UNSAFE.value) as sandbox, out.open("a") as file:
        if todo:
            reward = make_reward([task for task, _ in todo], sandbox)
            write_scores(score_all(reward, todo, workers=workers), file, len(todo), progress)
    domain_of = {task.id: task.domain for task in tasks}
    found = summary(read_scores(out), lambda identity: domain_of.get(identity, "no task"))
    print(f"{report(found)}\n\nwritten to {out}: {len(read_scores(out))} scores")
    counts = {
        "unknown": len(unknown),
        "unanswered": len(without),
        "left_out": len(tasks.left_out + tuple(answers.left_out)),
    }
    print(json.dumps({**found, **counts}))
    sys.stdout.flush()


if __name__ == "__main__":
    common.run(main, cpu_devices=1)
