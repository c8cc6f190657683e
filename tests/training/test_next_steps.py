"""The message at the end of a run: what it wrote, and commands that take it further."""

from flowgrpo.training.next_steps import closing_message, command, list_contents, training_message


def test_next_steps_are_aligned_with_their_purposes():
    assert closing_message("written to x", [("a", "does this"), ("bcd", "does that")]) == (
        "\nwritten to x\nnext:\n    a    # does this\n    bcd  # does that"
    )
    assert closing_message("written to x", []) == "\nwritten to x"


def test_folder_with_a_space_is_quoted():
    assert command("chat", model="my models/a") == "python -m flowgrpo chat --model='my models/a'"


def test_contents_list_existing_files(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("result.json", ".lock"):
        (tmp_path / name).write_text("")
    assert list_contents(tmp_path) == "checkpoints/, result.json"


def test_evaluate_is_suggested_if_the_run_can_be_evaluated(tmp_path):
    messages = {evaluates: training_message(tmp_path, 7, can_evaluate=evaluates) for evaluates in (True, False)}
    assert [evaluates for evaluates, words in messages.items() if "flowgrpo evaluate" in words] == [True]
    assert f"python -m flowgrpo view --workdir={tmp_path} " in messages[False]
    assert "the same command with more --updates" in messages[True]
    assert messages[True].endswith("# resumes from update 7")
    unread = training_message(tmp_path, 7, can_evaluate=False, can_export=False)
    assert "flowgrpo" not in unread.partition("next:")[2]
