"""Read tasks from files and generators: a path or `reasoning_gym:NAME` -> `Tasks`.

    read_tasks("train.jsonl")
    read_tasks("train.parquet", fields={"query": "problem", "answers": "reward_model.ground_truth"})
    read_tasks("reasoning_gym:chain_sum?size=100&seed=3")

A record has `id`, `query`, `answers` (or `answer`: a text, a number, or a list; [] if there is no gold answer; may be
missing if there are `tests`), `domain`, and may have `image` or `images` (paths relative to the file). AgentFlow's
`id, question, result, source, extra_info` is read as it is, and so is GSM8K's `question, answer`: the text after `####`
is the gold answer, the whole text is `metadata["solution"]`, its `<<48/2=24>>` are the calculator steps of an expert,
which end with `final`, and ids are hashes of the content. Other fields of a record, and those in its `metadata`, become
the task's metadata; null is the same as missing. `fields` maps to other names, with dots into nested records; `id=#`
makes ids from the content; `domain` is the default for records without one. A bad record is a `BadInput` with file,
line and field; `skip_bad=True` leaves it out and reports it. `to_tasks` also takes tasks and records that are there.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl

from flowgrpo.data.tasks import Tasks, batch_at
from flowgrpo.data.tokenizer import strict_json
from flowgrpo.files import is_file, pip_install
from flowgrpo.types import JSON, BadInput, Task, check_range, first_line

GYM = "reasoning_gym"
ANY_DOMAIN = "env"  # of a record of any fields without a domain
CONTENT = "#"  # pseudo-field: the id is a hash of the content
DEFAULT = {"id": "id", "query": "query", "answers": "answers", "domain": "domain", "images": "images"}
ANSWER_MARK = "####"  # between a solution of GSM8K and its answer
COMPUTATION = re.compile(r"<<([^<>=]+)=[^<>]*>>")  # in a solution of GSM8K
GSM8K = {"id": CONTENT, "query": "question", "answers": "answer", "domain": "domain", "images": "image"}
AGENTFLOW = {"id": "id", "query": "question", "answers": "result", "domain": "source", "images": "image"}


class FileRecord(NamedTuple):
    """A line or row of a file: its content, or a sentence about why it can't be read."""

    place: str  # "tasks.jsonl, line 3"
    content: Mapping[str, JSON] | str
    number: int  # of the line or row, from 1


def to_tasks(
    source: "str | Path | Tasks | Sequence[Task | Mapping[str, JSON]]",
    *,
    fields: Mapping[str, str] | None = None,
    domain: str | None = None,
    any_fields: bool = False,
) -> Tasks:
    """Tasks of whatever may be given for them: what `read_tasks` reads, `Tasks`, or a list of `Task`s and records.

    Args:
        source: the tasks; a record is a mapping, as a line of a file has one.
        fields, domain, any_fields: as in `read_tasks`.
    """
    if isinstance(source, Tasks):
        return source
    if isinstance(source, str | Path):
        return read_tasks(source, fields=fields, domain=domain, any_fields=any_fields)
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise BadInput(f"tasks are {source!r:.80}: give a path, a list of fg.Task, or a list of JSON objects")
    tasks, parse = [], _parse_any_task if any_fields else _parse_task
    for number, item in enumerate(source):
        if isinstance(item, Mapping):
            item = parse(FileRecord(f"task {number}", _plain_json(number, item), number), fields or {}, domain, Path())
        if not isinstance(item, Task):
            raise BadInput(f"task {number} is {item!r:.80}: give an fg.Task, or a JSON object")
        tasks.append(item)
    if not tasks:
        raise BadInput("the list of tasks holds no task: give at least one")
    return Tasks(tuple(tasks))


def read_tasks(
    source: str | Path,
    *,
    fields: Mapping[str, str] | None = None,
    domain: str | None = None,
    skip_bad: bool = False,
    any_fields: bool = False,
) -> Tasks:
    """The tasks of a JSONL or Parquet file, or of a `reasoning_gym:NAME` generator.

    Args:
        source: path, or `reasoning_gym:NAME?size=...&seed=...`.
        fields: our names -> the file's, such as `{"query": "problem"}`.
        domain: of records that have none.
        skip_bad: leave bad records out, and list them in `Tasks.left_out`.
        any_fields: a record may have any fields, and needs none: all are the task's metadata, as they are.
    """
    if str(source).startswith(GYM + ":"):
        return _generate_tasks(str(source))
    path = Path(source)
    readers = {".jsonl": read_json_lines, ".ndjson": read_json_lines, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise BadInput(
            f"{path}: tasks are read from .jsonl and .parquet files and from {GYM}:NAME; convert or rename it"
        )
    if not is_file(path):
        raise BadInput(f"{path} is no file; give the path of a task file")
    tasks: dict[str, tuple[Task, str]] = {}  # id -> (task, its place)
    left_out = []
    parse = _parse_any_task if any_fields else _parse_task
    for record in readers[path.suffix](path):
        try:
            task = parse(record, fields or {}, domain, path.parent)
            if task.id in tasks:
                first = tasks[task.id][1]
                raise BadInput(
                    f"{record.place}: field 'id' repeats {task.id!r} of {first}; give each task its "
                    "own, or make ids from the content by --fields=id=# (fields= in Python)"
                )
            tasks[task.id] = task, record.place
        except BadInput as error:
            if not skip_bad:
                raise
            left_out.append(str(error))
    if (
        fields
        and "images" in fields
        and not any({"image", "images"} & set(task.metadata) for task, _ in tasks.values())
    ):
        raise BadInput(f"{path}: images are mapped to {fields['images']!r}, but no record has such a field")
    if not tasks:
        why = f"; the first bad record: {left_out[0]}" if left_out else ""
        raise BadInput(f"{path} holds no task{why}")
    return Tasks(tuple(task for task, _ in tasks.values()), str(source), tuple(left_out))


def batches(
    tasks: str | Path | Tasks | Sequence[Task | Mapping[str, JSON]],
    size: int,
    *,
    seed: int = 0,
    epochs: int | None = None,
    first: int = 0,
    any_fields: bool = True,
) -> Iterator[list[Task]]:
    """Batches of `size` tasks in the shuffled order of `tasks.task_at`: a permutation for each epoch.

    Args:
        tasks: what `to_tasks` takes.
        size: tasks of a batch, which may cross the end of an epoch.
        seed: of the order.
        epochs: how often each task is seen, with a shorter last batch for what is left; None: endless.
        first: number of the first batch, for a loop that resumes.
        any_fields: as in `read_tasks`; False: each task must have a query and a domain.
    """
    pool = to_tasks(tasks, any_fields=any_fields)
    check_range("batches", "size", size, 1, whole=True)
    check_range("batches", "epochs", epochs, 1, whole=True, optional=True)
    check_range("batches", "first", first, 0, whole=True)
    total = None if epochs is None else epochs * len(pool)
    starts = count(first * size, size) if total is None else range(first * size, total, size)
    return (batch_at(pool, seed, i, size if total is None else min(size, total - i))[0] for i in starts)


def parse_fields(pairs: list[str]) -> dict[str, str]:
    """`["query=question", "answers=gold"]`, as in a flag, as a mapping from our names to the file's."""
    split = [pair.partition("=") for pair in pairs]
    for pair, (name, equals, field) in zip(pairs, split, strict=True):
        if not (name and equals and field):
            raise BadInput(f"--fields={pair} must be NAME=FIELD, such as query=question")
    return {name: field for name, _, field in split}


# Records ------------------------------------------------------------------------------------------------


def read_json_lines(path: Path, expected: str = "a task is {…} with id, query and answers") -> Iterator[FileRecord]:
    """The lines of a JSONL file that aren't blank; `expected` describes a line in error messages."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadInput(f"{path}: it can't be read ({error.strerror}); fix its permissions") from error
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                content = strict_json(line.decode("utf-8-sig"), parse_float=_finite)
                content = content if isinstance(content, dict) else f"isn't a JSON object; {expected}"
            except UnicodeDecodeError as error:
                content = f"isn't UTF-8 (byte {error.start + 1}); save the file as UTF-8"
            except ValueError as error:
                content = f"isn't JSON ({error}); fix or remove the line"
            yield FileRecord(f"{path}, line {number}", content, number)


def _finite(digits: str) -> float:
    """A float as it is written; `1e999` would be read as infinity, and become the gold answer "inf"."""
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is too large for a number: write it as a text")
    return number


def _read_parquet(path: Path) -> Iterator[FileRecord]:
    """The rows of a Parquet file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BadInput(f"{path}: reading Parquet needs pyarrow: {pip_install('parquet')}") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield FileRecord(f"{path}, row {number}", row, number)
    except (pyarrow.ArrowException, OSError) as error:
        why = " ".join(str(error).split())
        raise BadInput(f"{path} can't be read as Parquet after row {number} ({why}); write the file again") from error


# Tasks --------------------------------------------------------------------------------------------------


def _parse_task(record: FileRecord, fields: Mapping[str, str], domain: str | None, folder: Path) -> Task:
    """The task of a record, or `BadInput` with its place and field."""
    place, content, _ = record
    if isinstance(content, str):
        raise BadInput(f"{place}: {content}")
    names, content = _known_fields(content, fields)
    query = _text(place, names["query"], _take(place, content, names, "query"))
    has_tests = "tests" in content or "tests" in fields
    is_optional = "answers" not in fields and names["answers"] not in content and has_tests
    gold = [] if is_optional else _take(place, content, names, "answers")
    answers = _answers(place, names["answers"], gold)
    own_domain = _find(content, names["domain"])
    if own_domain is None and domain is None:
        raise BadInput(
            f"{place}: field {names['domain']!r} is missing; add it, name another by --fields=domain=FIELD, "
            "or give all tasks one by --domain (fields= and domain= in Python)"
        )
    domain = domain if own_domain is None else _text(place, names["domain"], own_domain)
    if names["id"] == CONTENT:
        identity = blake2b(json.dumps([query, answers, domain]).encode(), digest_size=8).hexdigest()
    else:
        value = _take(place, content, names, "id")
        identity = str(value) if type(value) is int else _text(place, names["id"], value)
    return Task(identity, query, answers, str(domain), _metadata(place, content, names, folder))


def _parse_any_task(record: FileRecord, fields: Mapping[str, str], domain: str | None, _folder: Path) -> Task:
    """The task of a record of any fields, which are its metadata; query, answers, domain and id if it has some."""
    place, content, _ = record
    if isinstance(content, str):
        raise BadInput(f"{place}: {content}")
    names, known = _known_fields(content, fields)
    values = {name: _find(known, names[name]) for name in ("id", "query", "answers", "domain")}
    try:
        answers = () if values["answers"] is None else _answers(place, names["answers"], values["answers"])
    except BadInput:  # they are something else here
        answers = ()
    identity = blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()
    texts = {name: value for name, value in values.items() if isinstance(value, str) and value.strip()}
    if type(values["id"]) is int:
        texts["id"] = str(values["id"])
    return Task(
        texts.get("id", identity),
        texts.get("query", ""),
        answers,
        texts.get("domain", domain or ANY_DOMAIN),
        {**known, **content},
    )


def _known_fields(content: Mapping[str, JSON], fields: Mapping[str, str]) -> tuple[dict[str, str], dict[str, JSON]]:
    """(our names -> the record's, the record without nulls), with GSM8K's solution taken apart."""
    content = {name: value for name, value in content.items() if value is not None}
    names = {**_infer_fields(content), **fields}
    if _is_gsm8k(content):
        solution = content["answer"]
        steps = [["calculator", expression.strip()] for expression in COMPUTATION.findall(solution)]
        final = solution.rpartition(ANSWER_MARK)[2].strip()
        extra = {"solution": solution} | ({"steps": steps, "final": final} if steps else {})
        content = {**extra, **content, "answer": final}
    return names, content


def _plain_json(number: int, content: Mapping[str, JSON]) -> dict[str, JSON]:
    """A copy of a record; raises unless it is JSON."""
    try:
        return json.loads(json.dumps(dict(content), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(
            f"task {number} is no JSON ({first_line(error)}): give strings, numbers, lists, objects"
        ) from None


def _infer_fields(content: Mapping[str, JSON]) -> dict[str, str]:
    """Our names -> the fields of a record, of one of the known layouts."""
    if "query" not in content and {"question", "result"} <= set(content):
        return AGENTFLOW
    if _is_gsm8k(content):
        return {**GSM8K, "id": "id"} if "id" in content else GSM8K
    answer = {"answers": "answer"} if "answers" not in content else {}
    image = {"images": "image"} if "images" not in content else {}
    return {**DEFAULT, **answer, **image}


def _is_gsm8k(content: Mapping[str, JSON]) -> bool:
    """Whether a record is a question and a solution that ends with `#### 18`."""
    solution = content.get("answer")
    return "query" not in content and "question" in content and isinstance(solution, str) and ANSWER_MARK in solution


def _find(content: Mapping[str, JSON], field: str) -> JSON:
    """The value of a field, or None; dots go into nested records."""
    value: JSON = content
    if field in content:
        return content[field]
    for key in field.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _take(place: str, content: Mapping[str, JSON], names: Mapping[str, str], name: str) -> JSON:
    """The value of a required field."""
    field = names[name]
    value = _find(content, field)
    if value is None:
        names_there = ", ".join(map(repr, content)) or "none"
        other = f"name another by --fields={name}=FIELD (fields= in Python)"
        raise BadInput(f"{place}: field {field!r} is missing (there are: {names_there}); add it, or {other}")
    return value


def _text(place: str, field: str, value: JSON) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadInput(f"{place}: field {field!r} is {_shown(value)}, but must be a text that isn't empty")
    return _encodable(place, field, value)


def _answers(place: str, field: str, value: JSON) -> tuple[str, ...]:
    """One gold answer or a list of them, as texts."""
    answers = value if isinstance(value, list | tuple) else [value]
    for answer in answers:
        is_number = isinstance(answer, int | float | Decimal) and not isinstance(answer, bool) and math.isfinite(answer)
        if not is_number and not (isinstance(answer, str) and answer.strip()):
            raise BadInput(f"{place}: field {field!r} holds {_shown(answer)}, but an answer is a text or a number")
    return tuple(_encodable(place, field, str(answer)) for answer in answers)


def _encodable(place: str, field: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{place}: field {field!r} holds half of a surrogate pair; fix the text") from None
    return text


def _metadata(place: str, content: Mapping[str, JSON], names: Mapping[str, str], folder: Path) -> dict[str, JSON]:
    """All that isn't id, query, answers or domain, under our names; images as paths of existing files."""
    used = {field for name, field in names.items() if name in DEFAULT} | {"metadata"}
    more = content.get("metadata", {})
    if not isinstance(more, Mapping):
        raise BadInput(f"{place}: field 'metadata' is {_shown(more)}, but must be an object")
    mapped = {name: _take(place, content, names, name) for name in names if name not in DEFAULT}
    others = {name: value for name, value in content.items() if name not in used | set(names.values())}
    for name in others:
        if name in more or name in mapped:
            raise BadInput(f"{place}: {name!r} is given twice, as a field and in the metadata; keep one")
    metadata = {**more, **mapped, **others}
    images = _find(content, names["images"])
    return metadata if images is None else {**metadata, **_images(place, names["images"], images, folder)}


def _images(place: str, field: str, value: JSON, folder: Path) -> dict[str, JSON]:
    """`image` for a single path, `images` for a list of them; all files must exist."""
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise BadInput(f"{place}: field {field!r} is {_shown(value)}, but must be a path or a list of paths")
    for path in paths:
        if not is_file(folder / path):
            missing = _shown(path) if len(path) > 60 else folder / path
            raise BadInput(f"{place}: field {field!r} names {_shown(path)}, but there is no file {missing}; add it")
    absolute = tuple(str(folder / path) for path in paths)
    return {"image": absolute[0]} if isinstance(value, str) else {"images": absolute}


def _shown(value: JSON) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


# Generators ---------------------------------------------------------------------------------------------


def _generate_tasks(source: str) -> Tasks:
    """Tasks of a generator of reasoning-gym; `rewards/reasoning_gym.py` runs its verifier on them."""
    name, _, query = source.removeprefix(GYM + ":").partition("?")
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise BadInput(f"{source} needs reasoning-gym: {pip_install('reasoning_gym')}") from None
    if name not in DATASETS:
        raise BadInput(f"{source}: reasoning_gym has no {name!r}; choose from {', '.join(sorted(DATASETS))}")
    options = {key: _option(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    options = {"size": 500, "seed": 0, **options}  # without a seed it would draw one
    try:
        dataset = reasoning_gym.create_dataset(name, **options)
        entries = [dataset[number] for number in range(len(dataset))]
    except (TypeError, ValueError, AssertionError) as error:
        raise BadInput(f"{source}: {name} can't be made with {options} ({error}); fix the options") from error
    label = f"{name}?" + "&".join(f"{key}={value}" for key, value in options.items() if key != "size")
    return Tasks(
        tuple(
            Task(
                id=f"{GYM}:{label}#{number}",
                query=entry["question"],
                answers=() if entry["answer"] is None else (str(entry["answer"]),),
                domain=GYM,
                metadata={GYM: {"name": name, "options": options, "index": number}},
            )
            for number, entry in enumerate(entries)
        ),
        source,
    )


def _option(text: str) -> JSON:
    """The value of an option: JSON if it is, else a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
