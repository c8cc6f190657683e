"""The line of progress: what it says, on a terminal and elsewhere."""

import io

import pytest

from flowgrpo.report.progress import Progress, clock_time, format_metrics, with_progress

FIGURES = {"success": 0.541, "turns": 3.17, "tool_errors": 0.083, "kl": 0.01234, "entropy": 1.308}
FIGURES["tokens_per_second"] = 3380.4


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_without_a_terminal():
    out = io.StringIO()
    progress = Progress(150, stream=out, clock=lambda: 0.0)
    progress.show("train", 12, FIGURES)
    progress.log("saved")
    progress.end()
    line = "train  12/150  success 0.54  turns 3.2  tool errors 0.08  KL 0.0123  entropy 1.31  3,380 tok/s"
    assert out.getvalue() == f"{line}\nsaved\n"
    assert format_metrics({"success": None, "turns": float("nan"), "kl": 0.0, "other": 3}) == ["KL 0.0000"]
    counts = {"computed_tokens": 4400, "context_tokens": 19840}
    assert format_metrics(counts) == ["computed 4,400 of 19,840 context tokens"]
    assert format_metrics(counts | {"computed_tokens": 19840}) == [], "nothing is shared"


def test_terminal_line_is_rewritten_within_a_phase(monkeypatch):
    monkeypatch.setenv("COLUMNS", "24")
    out = Terminal()
    progress = Progress(5, stream=out, clock=lambda: 0.0)
    for phase, update in (("train", 1), ("train", 2), ("validation", 2)):
        progress.show(phase, update, FIGURES)
    progress.log("done")
    clear, first, last = "\r\x1b[2K", "train 1/5  success 0.54", "validation 2/5"
    assert out.getvalue() == f"{clear}{first}{clear}train 2/5  0:00 left\n{clear}{last}\ndone\n"


@pytest.mark.parametrize(
    ("columns", "line", "stage"),
    [
        (12, "train  82/1", "rollout  8/"),
        (40, "train  82/120  1:16 left  success 0.54", "rollout  8/32  0:03 left"),
        (
            80,
            "train  82/120  1:16 left  success 0.54  turns 3.2  tool errors 0.08  KL 0.0123",
            "rollout  8/32  0:03 left  |  train  82/120  1:16 left  success 0.54  turns 3.2",
        ),
        (
            200,
            "train  82/120  1:16 left  success 0.54  turns 3.2  tool errors 0.08  KL 0.0123  entropy 1.31  "
            "3,380 tok/s  rollout 1.2 s  update 0.8 s",
            "rollout  8/32  0:03 left  |  train  82/120  1:16 left  success 0.54  turns 3.2  tool errors 0.08  "
            "KL 0.0123  entropy 1.31  3,380 tok/s  rollout 1.2 s  update 0.8 s",
        ),
    ],
)
def test_time_left_comes_first_and_metrics_as_they_fit(monkeypatch, columns, line, stage):
    monkeypatch.setenv("COLUMNS", str(columns))
    out, times = Terminal(), [0.0]
    progress = Progress(120, stream=out, clock=lambda: times[0])
    progress.show("train", 81, {})
    times[0] += 2.0
    progress.show("train", 82, FIGURES | {"rollout_seconds": 1.2, "train_seconds": 0.8})
    progress.step("rollout", 0, 32)
    times[0] += 1.0
    progress.step("rollout", 8, 32)
    drawn = out.getvalue().split("\r\x1b[2K")
    assert (drawn[2], drawn[4]) == (line, stage)


def test_time_left_is_extrapolated_from_this_process():
    """Going on at update 10, one update takes 3 s (validation included), and 5 are left: 15 s."""
    out, times = io.StringIO(), [100.0, 103.0, 104.0, 106.0]
    progress = Progress(17, stream=out, clock=lambda: times[0])
    progress.show("train", 10, {})
    for phase, update in (("train", 11), ("validation", 11), ("train", 12)):
        times.pop(0)
        progress.show(phase, update, {})
    assert [text.partition("  ")[2] for text in out.getvalue().splitlines()] == ["", "0:18 left", "", "0:15 left"]


def steps(out, times) -> None:
    """Two rollouts of four parts, a second a part, and an update between them."""
    progress = Progress(9, stream=out, clock=lambda: times[0])
    for update in (1, 2):
        for done in range(5):
            progress.step("rollout", done, 4)
            times[0] += 1.0
        progress.show("train", update, {})
    progress.end()


def test_stage_is_put_before_the_terminal_line():
    out = Terminal()
    steps(out, [0.0])
    drawn = out.getvalue().split("\r\x1b[2K")
    assert drawn[2:4] == ["rollout 1/4  0:03 left", "rollout 2/4  0:02 left"]
    assert drawn[6:9] == ["train 1/9", "rollout 0/4  |  train 1/9", "rollout 1/4  0:03 left  |  train 1/9"]
    assert out.getvalue().count("\n") == 2  # one of them where another phase begins
    out = io.StringIO()
    steps(out, [0.0])
    assert out.getvalue().splitlines() == ["rollout 0/4", "train 1/9", "train 2/9  0:35 left"]


def test_long_stage_prints_every_half_minute_without_a_terminal():
    out, times = io.StringIO(), [0.0]
    progress = Progress(1, stream=out, clock=lambda: times[0])
    for done in range(5):
        progress.step("validation", done, 4)
        times[0] += 20.0
    assert out.getvalue().splitlines() == ["validation 0/4", "validation 2/4  0:40 left", "validation 4/4  0:00 left"]


def test_clock_time():
    assert [clock_time(s) for s in (0, 59.6, 83, 3599, 7384)] == ["0:00", "1:00", "1:23", "59:59", "2:03:04"]


def test_with_progress_counts_cases_on_own_lines():
    out = io.StringIO()
    assert list(with_progress("decode", [3, 5], stream=out)) == [3, 5]
    lines = out.getvalue().splitlines()
    assert [line.partition("  ")[0] for line in lines] == ["decode 0/2", "decode 1/2", "decode 2/2"]
    assert ["left" in line for line in lines] == [False, True, True]
    out = Terminal()
    for case in with_progress("decode", [3, 5], stream=out):
        print(f"found {case}", file=out)
    lines = out.getvalue().split("\n")
    assert lines[0].endswith("decode 0/2")
    assert (lines[1], lines[3], lines[-1]) == ("found 3", "found 5", "")
