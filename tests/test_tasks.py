"""Tasks: an order without state, splits by id, and files whose faults are named by file, line and field."""

import json
import sys
from collections import Counter
from math import factorial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.task_files import parse_fields, read_tasks
from flowgrpo.tasks import Tasks, batch_at, permuted, split_of, split_tasks, task_at
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


# Order ------------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(0, 2**64), st.integers(0, 10**9))
def test_every_epoch_is_a_permutation(count, seed, epoch):
    order = [task_at(some(count), seed, epoch * count + place) for place in range(count)]
    assert sorted(order) == list(range(count))


@given(st.integers(1, 40), st.integers(0, 9), st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_resuming_from_any_cursor_equals_going_on(count, seed, sizes):
    tasks, cursor, parts = some(count), 0, []
    for size in sizes:
        batch, cursor = batch_at(tasks, seed, cursor, size)
        parts += batch
    whole, end = batch_at(tasks, seed, 0, sum(sizes))
    assert (parts, cursor) == (whole, end)


def test_order_differs_between_epochs_and_seeds_and_is_the_same_on_every_machine():
    orders = {tuple(permuted(place, 50, f"{seed}:{epoch}".encode()) for place in range(50))
              for seed in range(5) for epoch in range(5)}  # fmt: skip
    assert len(orders) == 25
    assert [task_at(some(10), 0, index) for index in range(12)] == [6, 2, 3, 4, 8, 9, 5, 0, 7, 1, 5, 4]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_all_permutations_of_a_few_tasks_come_up_equally_often(count):
    seen = Counter(tuple(permuted(p, count, b"7:%d" % epoch) for p in range(count)) for epoch in range(4000))
    mean = 4000 / factorial(count)
    chi_squared = sum((times - mean) ** 2 / mean for times in seen.values())
    assert len(seen) == factorial(count)
    assert chi_squared < factorial(count) + 5 * factorial(count) ** 0.5 * 2**0.5


def test_an_order_over_nothing_is_refused():
    for bad, words in ((lambda: task_at(some(0), 0, 0), "holds no task"), (lambda: task_at(some(2), 0, -1), "cursor"),
                       (lambda: batch_at(some(2), 0, 0, 0), "at least 1")):  # fmt: skip
        with pytest.raises(BadInput, match=words):
            bad()


def test_tasks_of_one_id_are_refused():
    with pytest.raises(BadInput, match="'t1' is there twice"):
        Tasks((*some(3), Task("t1", "!", (), "code")))


# Splits -----------------------------------------------------------------------------------------------


@given(st.sets(st.text(max_size=8).filter(lambda text: text.isascii()), max_size=60), st.randoms())
def test_splits_partition_whatever_the_order(ids, random):
    order = sorted(ids)
    random.shuffle(order)
    made = [Tasks(tuple(Task(name, "?", (), "math") for name in names)) for names in (sorted(ids), order)]
    parts, shuffled = map(split_tasks, made)
    assert Counter(task.id for part in parts.values() for task in part) == Counter(ids)
    assert {n: {t.id for t in part} for n, part in parts.items()} == {
        n: {t.id for t in part} for n, part in shuffled.items()
    }
    assert all(split_of(task.id) == name for name, part in parts.items() for task in part)


def test_splits_have_about_their_shares():
    parts = split_tasks(some(5000), {"train": 0.7, "validation": 0.1, "test": 0.2, "none": 0.0})
    sizes = {name: len(part) / 5000 for name, part in parts.items()}
    assert sizes == pytest.approx({"train": 0.7, "validation": 0.1, "test": 0.2, "none": 0.0}, abs=0.02)


@pytest.mark.parametrize("shares", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": float("nan")}])
def test_shares_that_are_no_shares_are_refused(shares):
    with pytest.raises(BadInput, match="sum to 1"):
        split_tasks(some(3), shares)


# Files ------------------------------------------------------------------------------------------------


def test_a_jsonl_file_gives_its_tasks(write):
    more = {"id": 7, "query": "f?", "domain": "code", "tests": ["assert f()"], "metadata": {"level": 2}, "note": None}
    tasks = read_tasks(write(GOOD, b"", more, {"id": "c", "query": "pi?", "answer": 3.14, "domain": "math"}))
    assert list(tasks) == [
        Task("a", "2 + 2?", ("4", "four"), "math"),
        Task("7", "f?", (), "code", {"tests": ["assert f()"], "level": 2}),
        Task("c", "pi?", ("3.14",), "math"),
    ]
    assert (len(tasks), tasks[1].id, tasks.left_out) == (3, "7", ())


def test_fields_are_mapped_and_dots_lead_into_records(write):
    record = {"uid": "u", "problem": "1 + 1", "reward_model": {"gold": [2]}, "cases": ["assert f()"]}
    fields = parse_fields(["id=uid", "query=problem", "answers=reward_model.gold", "tests=cases"])
    (task,) = read_tasks(write(record), fields=fields, domain="math")
    assert (task.id, task.query, task.answers, task.domain) == ("u", "1 + 1", ("2",), "math")
    assert task.metadata["tests"] == ["assert f()"]
    assert "cases" not in task.metadata


def test_agentflows_training_format_reads_as_it_is_from_jsonl_and_parquet(write, tmp_path):
    record = {"id": 0, "question": "Who?", "chain": "", "result": "Ada", "source": "nq",
              "extra_info": {"groundtruth": "Ada", "idx": 0}}  # fmt: skip
    expected = Task("0", "Who?", ("Ada",), "nq", {"chain": "", "extra_info": {"groundtruth": "Ada", "idx": 0}})
    assert list(read_tasks(write(record))) == [expected]
    assert list(read_tasks(parquet(tmp_path, [record]))) == [expected]


def test_ids_made_of_the_content_tell_contents_apart(write):
    records = [{**GOOD, "query": query} for query in ("one", "two")]
    one, two = read_tasks(write(*records), fields={"id": "#"})
    (again,) = read_tasks(write(records[1]), fields={"id": "#"})
    assert one.id != two.id == again.id


def test_mapped_images_and_domains_may_lie_deep_or_be_missing_here_and_there(write, tmp_path):
    (tmp_path / "cat.png").write_bytes(b"")
    deep = {name: value for name, value in GOOD.items() if name != "domain"}
    path = write({**deep, "media": {"path": "cat.png"}, "source": "algebra"}, {**deep, "id": "b", "source": None})
    one, two = read_tasks(path, fields={"images": "media.path", "domain": "source"}, domain="math")
    assert one.metadata["image"] == str(tmp_path / "cat.png")
    assert "image" not in two.metadata
    assert (one.domain, two.domain) == ("algebra", "math")
    with pytest.raises(BadInput, match="images are mapped to 'picture', but no record has such a field"):
        read_tasks(path, fields={"images": "picture"}, domain="math")


def test_images_are_found_beside_the_task_file(write, tmp_path):
    (tmp_path / "cat.png").write_bytes(b"x")
    (task,) = read_tasks(write({**GOOD, "image": "cat.png"}))
    assert task.metadata == {"image": str(tmp_path / "cat.png")}
    (task,) = read_tasks(write({**GOOD, "images": ["cat.png", "cat.png"]}))
    assert task.metadata == {"images": (str(tmp_path / "cat.png"),) * 2}
    with pytest.raises(BadInput, match=r"tasks.jsonl, line 2: field 'images' names 'dog.png', but there is no file"):
        read_tasks(write(GOOD, {**GOOD, "id": "b", "images": ["cat.png", "dog.png"]}))


BAD_LINES = [
    (b"{", "isn't JSON"),
    (b"[1]", "isn't a JSON object"),
    (b'{"id": NaN}', "NaN is not a JSON number"),
    (b"[" * 100_000, "isn't JSON"),
    (b'{"id": "\xff"}', "isn't UTF-8 (byte 9)"),
    ({**GOOD, "query": None}, "field 'query' is missing (there are: 'id', 'answers', 'domain'); add it, or map query="),
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
    kept = read_tasks(path, skip_bad=True)
    assert [task.id for task in kept] == ["first", "last"]
    assert kept.left_out == (str(caught.value),)


def test_a_source_without_a_task_is_refused(write, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    for source, words in (
        (tmp_path / "none.jsonl", "is no file"),
        (tmp_path / "tasks.csv", "tasks are read from .jsonl and .parquet"),
        (tmp_path / "empty.jsonl", "holds no task"),
    ):
        with pytest.raises(BadInput, match=words):
            read_tasks(source)
    with pytest.raises(BadInput, match=r"holds no task; the first bad record: .*line 1"):
        read_tasks(write(b"{"), skip_bad=True)
    with pytest.raises(BadInput, match="NAME=FIELD"):
        parse_fields(["query"])


def parquet(folder, rows):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = folder / "tasks.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_a_parquet_file_gives_the_same_tasks_and_names_its_rows(write, tmp_path):
    rows = [{**GOOD, "level": 2}, {**GOOD, "id": "b"}]
    path = parquet(tmp_path, rows)
    assert list(read_tasks(path)) == list(read_tasks(write(*rows)))
    bad = parquet(tmp_path, [GOOD, {**GOOD, "id": "b", "query": None}])
    with pytest.raises(BadInput, match="row 2: field 'query' is missing"):
        read_tasks(bad)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match="can't be read as Parquet"):
        read_tasks(path)


# Generators -------------------------------------------------------------------------------------------


@pytest.mark.oracle
def test_reasoning_gym_makes_the_same_tasks_again():
    tasks = read_tasks("reasoning_gym:chain_sum?size=20&seed=3")
    assert list(tasks) == list(read_tasks("reasoning_gym:chain_sum?size=20&seed=3"))
    assert len(tasks) == 20
    assert tasks[4].metadata["reasoning_gym"] == {"name": "chain_sum", "options": {"size": 20, "seed": 3}, "index": 4}
    expression = tasks[0].query.split(": ")[1].removesuffix(" =")
    assert tasks[0].answers == (str(eval(expression)),)
    more = read_tasks("reasoning_gym:chain_sum?size=25&seed=3")
    assert [task.id for task in more][:20] == [task.id for task in tasks]


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("reasoning_gym:chain_sums", "reasoning_gym has no 'chain_sums'; choose from .*chain_sum,"),
        ("reasoning_gym:chain_sum?length=3", "unexpected keyword argument 'length'"),
        ("reasoning_gym:chain_sum?size=-1", "size must be positive"),
    ],
)
def test_a_generator_that_cant_be_made_is_refused(source, words):
    with pytest.raises(BadInput, match=words):
        read_tasks(source)


@pytest.mark.parametrize(("module", "source"), [("reasoning_gym", "reasoning_gym:ab"), ("pyarrow", "tasks.parquet")])
def test_a_missing_extra_is_named(monkeypatch, tmp_path, module, source):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "tasks.parquet").write_bytes(b"")
    with pytest.raises(BadInput, match=r"pip install 'flowgrpo\[(reasoning_gym|parquet)\]'"):
        read_tasks(source if ":" in source else tmp_path / source)
