"""Tasks: an order without state, splits by id, and files whose faults are named by file, line and field."""

import json
import sys
from collections import Counter
from itertools import islice
from math import factorial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.data.task_files import batches, parse_fields, read_tasks, to_tasks
from flowgrpo.data.tasks import Tasks, batch_at, permute, split_of, split_tasks, task_at
from flowgrpo.types import BadInput, Task

GOOD = {"id": "a", "query": "2 + 2?", "answers": ["4", "four"], "domain": "math"}


def some(count: int) -> Tasks:
    return Tasks(tuple(Task(f"t{number}", "?", ("1",), "math") for number in range(count)))


@pytest.fixture
def write(tmp_path):
    """`write(records or lines, ...)` is the path of a JSONL file in a folder of its own."""

    def put(*lines):
        path = tmp_path / "tasks.jsonl"
        texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(b"\n".join(texts) + b"\n")
        return path

    return put


@given(st.integers(1, 60), st.integers(0, 2**64), st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_epochs_are_permutations_from_any_cursor(count, seed, sizes):
    tasks, cursor, parts = some(count), 0, []
    for size in sizes:
        batch, cursor = batch_at(tasks, seed, cursor, size)
        parts += batch
    assert (parts, cursor) == batch_at(tasks, seed, 0, sum(sizes))
    order = [task_at(tasks, seed, sum(sizes) * count + place) for place in range(count)]
    assert sorted(order) == list(range(count))


def test_order_depends_on_epoch_and_seed_alone():
    keys = [f"{seed}:{epoch}".encode() for seed in range(5) for epoch in range(5)]
    assert len({tuple(permute(place, 50, key) for place in range(50)) for key in keys}) == 25
    assert [task_at(some(10), 0, index) for index in range(12)] == [6, 2, 3, 4, 8, 9, 5, 0, 7, 1, 5, 4]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_permutations_of_a_few_tasks_come_up_equally_often(count):
    counts = Counter(tuple(permute(p, count, b"7:%d" % epoch) for p in range(count)) for epoch in range(2000))
    mean = 2000 / factorial(count)
    chi_squared = sum((times - mean) ** 2 / mean for times in counts.values())
    assert len(counts) == factorial(count)
    assert chi_squared < factorial(count) + 5 * factorial(count) ** 0.5 * 2**0.5


def test_batches_follow_the_order_without_end_or_for_some_epochs():
    tasks = [Task(str(i), "?", (), "any") for i in range(5)]
    endless = list(islice(batches(tasks, 4, seed=3), 3))
    assert endless == [batch_at(tasks, 3, cursor, 4)[0] for cursor in (0, 4, 8)]
    assert next(batches(tasks, 4, seed=3, first=2)) == endless[2]
    two = list(batches(tasks, 4, seed=3, epochs=2))
    assert [len(batch) for batch in two] == [4, 4, 2]
    assert set(Counter(task.id for batch in two for task in batch).values()) == {2}
    rows = [{"city": "Oslo"}, {"city": "Rome"}]
    assert {task.metadata["city"] for task in next(batches(rows, 2, any_fields=True))} == {"Oslo", "Rome"}
    for wrong, words in (([], "holds no task"), ("gone.jsonl", "is no file")):
        with pytest.raises(BadInput, match=words):
            batches(wrong, 4)
    with pytest.raises(BadInput, match="epochs is 0"):
        batches(tasks, 4, epochs=0)


def test_tasks_are_a_file_tasks_or_records_of_any_fields(write):
    parcel, question = {"person": "Ann", "houses": [1, None]}, {"id": 7, "question": "2 + 2?", "answer": 4}
    read = to_tasks(write(parcel, question), any_fields=True)
    assert list(read) == list(to_tasks([parcel, question], any_fields=True))
    assert (read[0].query, read[0].answers, read[0].domain, read[0].metadata) == ("", (), "env", parcel)
    assert (read[1].id, read[1].answers, read[1].metadata) == ("7", ("4",), question)
    assert list(to_tasks([GOOD])) == list(to_tasks(write(GOOD))) == list(to_tasks(to_tasks([GOOD]).items))
    for wrong, words in (
        ([parcel], "task 0: field 'query' is missing"),
        (3, "give a path"),
        ([3], "task 0 is 3: give an"),
    ):
        with pytest.raises(BadInput, match=words):
            to_tasks(wrong)
    with pytest.raises(BadInput, match="is there twice"):
        to_tasks([parcel, parcel], any_fields=True)
    with pytest.raises(BadInput, match="task 0 is no JSON"):
        to_tasks([{"person": object()}], any_fields=True)


@given(st.sets(st.text(max_size=8).filter(lambda text: text.isascii()), max_size=60), st.randoms())
def test_splits_partition_whatever_the_order(ids, random):
    made = Tasks(tuple(Task(name, "?", (), "math") for name in random.sample(sorted(ids), len(ids))))
    parts = split_tasks(made)
    assert Counter(task.id for part in parts.values() for task in part) == Counter(ids)
    assert all(split_of(task.id) == name for name, part in parts.items() for task in part)


def test_splits_have_about_their_fractions():
    fractions = {"train": 0.7, "validation": 0.1, "test": 0.2, "none": 0.0}
    sizes = {name: len(part) / 5000 for name, part in split_tasks(some(5000), fractions).items()}
    assert sizes == pytest.approx(fractions, abs=0.02)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: task_at(some(0), 0, 0), "holds no task"),
        (lambda: task_at(some(2), 0, -1), "cursor"),
        (lambda: batch_at(some(2), 0, 0, 0), "at least 1"),
        (lambda: Tasks((*some(3), Task("t1", "!", (), "code"))), "'t1' is there twice"),
        (lambda: split_tasks(some(3), {}), "sum to 1"),
        (lambda: split_tasks(some(3), {"a": 0.5}), "sum to 1"),
        (lambda: split_tasks(some(3), {"a": 1.5, "b": -0.5}), "'a' is 1.5, but must be at least 0 and at most 1"),
        (lambda: parse_fields(["query"]), "NAME=FIELD"),
        (lambda: read_tasks("none.jsonl"), "is no file"),
        (lambda: read_tasks("tasks.csv"), "tasks are read from .jsonl and .parquet"),
    ],
)
def test_invalid_arguments_are_refused(make, words):
    with pytest.raises(BadInput, match=words):
        make()


def test_a_jsonl_file_gives_its_tasks(write):
    more = {"id": 7, "query": "f?", "domain": "code", "tests": ["assert f()"], "metadata": {"level": 2}, "note": None}
    tasks = read_tasks(write(GOOD, b"", more, {"id": "c", "query": "pi?", "answer": 3.14, "domain": "math"}))
    assert list(tasks) == [
        Task("a", "2 + 2?", ("4", "four"), "math"),
        Task("7", "f?", (), "code", {"tests": ["assert f()"], "level": 2}),
        Task("c", "pi?", ("3.14",), "math"),
    ]
    assert (len(tasks), tasks[1].id, tasks.left_out) == (3, "7", ())


def test_fields_are_mapped_with_dots_and_ids_from_content(write):
    record = {"uid": "u", "problem": "1 + 1", "reward_model": {"gold": [2]}, "cases": ["assert f()"]}
    fields = parse_fields(["id=uid", "query=problem", "answers=reward_model.gold", "tests=cases"])
    tasks = read_tasks(write(record), fields=fields, domain="math")
    metadata = {"tests": ["assert f()"], "reward_model": {"gold": [2]}}
    assert list(tasks) == [Task("u", "1 + 1", ("2",), "math", metadata)]
    records = [{**GOOD, "query": query} for query in ("one", "two")]
    first, second = read_tasks(write(*records), fields={"id": "#"})
    (again,) = read_tasks(write(records[1]), fields={"id": "#"})
    assert first.id != second.id == again.id


def test_gsm8k_is_read_as_it_is(write):
    solution = "She has 2 * 600 = <<2*600=1200>>1200 shells.\n#### 1,200"
    record = {"question": "How many?", "answer": solution}
    (task,) = read_tasks(write(record), domain="answer")
    assert (task.query, task.answers, task.domain) == ("How many?", ("1,200",), "answer")
    steps = [["calculator", "2*600"]]
    assert task.metadata == {"solution": solution, "steps": steps, "final": "1,200"}
    (bare,) = read_tasks(write({**record, "answer": "It is so.\n#### 7"}), domain="answer")
    assert bare.metadata == {"solution": "It is so.\n#### 7"}
    mapped = read_tasks(write(record), domain="answer", fields={"query": "question", "answers": "answer", "id": "#"})
    assert mapped.items == (task,)
    (named,) = read_tasks(write({**record, "id": "g1", "domain": "k12"}))
    assert (named.id, named.domain, named.answers) == ("g1", "k12", ("1,200",))
    with pytest.raises(BadInput, match="field 'answer' holds '', but an answer is a text or a number"):
        read_tasks(write({**record, "answer": "Nothing. ####"}), domain="answer")
    with pytest.raises(BadInput, match="field 'query' is missing"):
        read_tasks(write({**record, "answer": "1200"}), domain="answer")


def test_images_are_relative_to_the_task_file(write, tmp_path):
    cat = str(tmp_path / "cat.png")
    (tmp_path / "cat.png").write_bytes(b"x")
    (task,) = read_tasks(write({**GOOD, "image": "cat.png"}))
    assert task.metadata == {"image": cat}
    (task,) = read_tasks(write({**GOOD, "images": ["cat.png", "cat.png"]}))
    assert task.metadata == {"images": (cat, cat)}
    with pytest.raises(BadInput, match=r"tasks.jsonl, line 2: field 'images' names 'dog.png', but there is no file"):
        read_tasks(write(GOOD, {**GOOD, "id": "b", "images": ["cat.png", "dog.png"]}))
    records = {"id": "a", "media": {"path": "cat.png"}, "source": "algebra"}, {"id": "b", "source": None}
    path = write(*({"query": "?", "answers": ["4"], **record} for record in records))
    first, second = read_tasks(path, fields={"images": "media.path", "domain": "source"}, domain="math")
    assert (first.metadata["image"], first.domain) == (cat, "algebra")
    assert ("image" in second.metadata, second.domain) == (False, "math")
    with pytest.raises(BadInput, match="images are mapped to 'picture', but no record has such a field"):
        read_tasks(path, fields={"images": "picture"}, domain="math")


BAD_LINES = [
    (b"{", "isn't JSON"),
    (b"[1]", "isn't a JSON object"),
    (b'{"id": NaN}', "NaN is not JSON"),
    (b"[" * 100_000, "isn't JSON (it is nested too deep)"),
    (b'{"answers": -1e999}', "isn't JSON (-1e999 is too large for a number: write it as a text)"),
    (b'{"answers": %s}' % (b"9" * 5000), "isn't JSON"),
    ({**GOOD, "image": "a" * 5000}, "field 'image' names 'aaaa"),
    ({**GOOD, "images": ["../" * 5000]}, "field 'images' names '../"),
    ({**GOOD, "images": ["a\0b", "\ud800"]}, "field 'images' names 'a\\x00b'"),
    ({**GOOD, "image": "."}, "field 'image' names '.'"),
    (b'{"id": "\xff"}', "isn't UTF-8 (byte 9)"),
    (
        {**GOOD, "query": None},
        "field 'query' is missing (there are: 'id', 'answers', 'domain'); add it, or name another by --fields=q",
    ),
    ({**GOOD, "query": "  "}, "field 'query' is '  ', but must be a text"),
    ({**GOOD, "query": "\ud800"}, "field 'query' holds half of a surrogate pair"),
    ({**GOOD, "id": 1.5}, "field 'id' is 1.5"),
    ({**GOOD, "answers": [True]}, "field 'answers' holds True"),
    ({**GOOD, "answers": {"a": 1}}, "field 'answers' holds {'a': 1}"),
    ({"id": "b", "query": "?", "answers": "1"}, "field 'domain' is missing"),
    ({**GOOD, "metadata": 3}, "field 'metadata' is 3"),
    ({**GOOD, "level": 1, "metadata": {"level": 1}}, "'level' is given twice"),
    ({**GOOD, "image": 3}, "field 'image' is 3"),
    ({**GOOD, "id": "first"}, "field 'id' repeats 'first' of"),
]


@pytest.mark.parametrize(("line", "words"), BAD_LINES, ids=[words[:40] for _, words in BAD_LINES])
def test_a_bad_line_is_named_and_can_be_left_out(write, line, words):
    path = write({**GOOD, "id": "first"}, line, {**GOOD, "id": "last"})
    with pytest.raises(BadInput) as caught:
        read_tasks(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert words in str(caught.value)
    tasks = read_tasks(path, skip_bad=True)
    assert [task.id for task in tasks] == ["first", "last"]
    assert tasks.left_out == (str(caught.value),)


def test_a_file_without_a_good_task_is_refused(write):
    for line, words in ((b"", "holds no task"), (b"{", r"holds no task; the first bad record: .*line 1")):
        with pytest.raises(BadInput, match=words):
            read_tasks(write(line), skip_bad=True)
    with pytest.raises(BadInput, match="is no file; give the path of a task file"):
        read_tasks("a" * 5000 + ".jsonl")


def test_a_parquet_file_gives_the_same_tasks(write, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "tasks.parquet"

    def as_parquet(*rows):
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        return path

    record = {
        "id": 0,
        "question": "Who?",
        "chain": "",
        "result": "Ada",
        "source": "nq",
        "extra_info": {"idx": 0},
    }  # AgentFlow
    assert list(read_tasks(write(record))) == [
        Task("0", "Who?", ("Ada",), "nq", {"chain": "", "extra_info": {"idx": 0}})
    ]
    for rows in ([record], [{**GOOD, "level": 2}, {**GOOD, "id": "b"}]):
        assert list(read_tasks(as_parquet(*rows))) == list(read_tasks(write(*rows)))
    with pytest.raises(BadInput, match="row 2: field 'query' is missing"):
        read_tasks(as_parquet(GOOD, {**GOOD, "id": "b", "query": None}))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match="can't be read as Parquet"):
        read_tasks(path)


@pytest.mark.parametrize(("module", "source"), [("reasoning_gym", "reasoning_gym:ab"), ("pyarrow", "tasks.parquet")])
def test_a_missing_extra_is_named(monkeypatch, tmp_path, module, source):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "tasks.parquet").write_bytes(b"")
    with pytest.raises(BadInput, match=r"pip install '(reasoning-gym|pyarrow)"):
        read_tasks(source if ":" in source else tmp_path / source)


@pytest.mark.oracle
def test_reasoning_gym_generates_reproducible_tasks():
    tasks = read_tasks("reasoning_gym:chain_sum?size=20&seed=3")
    assert tasks[4].metadata["reasoning_gym"] == {"name": "chain_sum", "options": {"size": 20, "seed": 3}, "index": 4}
    assert tasks[0].answers == (str(eval(tasks[0].query.split(": ")[1].removesuffix(" ="))),)
    more = read_tasks("reasoning_gym:chain_sum?size=25&seed=3")
    assert [task.query for task in more][:20] == [task.query for task in tasks]
    assert [task.id for task in more][:20] == [task.id for task in tasks]
    for source, words in (
        ("chain_sums", "reasoning_gym has no 'chain_sums'; choose from .*chain_sum,"),
        ("chain_sum?length=3", "unexpected keyword argument 'length'"),
        ("chain_sum?size=-1", "size must be positive"),
    ):
        with pytest.raises(BadInput, match=words):
            read_tasks(f"reasoning_gym:{source}")
