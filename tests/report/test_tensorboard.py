"""Event files: framed and summed as TensorBoard wants them, and read back, by hand and by TensorBoard itself."""

import struct

import pytest
from event_files import fields, records

from flowgrpo.report.tensorboard import EventFile, masked_crc


def test_checksum_is_crc32c():
    crc = 0xE3069283  # CRC-32C of "123456789"
    assert masked_crc(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_step_is_one_event_with_scalars_by_tag(tmp_path):
    with EventFile(tmp_path, clock=lambda: 12.5) as events:
        events.write(300, {"success": 0.5, "tools/add": -2.0}, {"h": ([0.0, 1.0, 3.0], [4, 2])})
    (path,) = tmp_path.iterdir()
    first, second = map(fields, records(path.read_bytes()))
    assert first == [(1, 12.5), (2, 0), (3, b"brain.Event:2")]
    assert second[:2] == [(1, 12.5), (2, 300)]
    values = [dict(fields(value)) for _, value in fields(second[2][1])]
    assert values[:2] == [{1: b"success", 2: 0.5}, {1: b"tools/add", 2: -2.0}]
    *plain, limits, counts = [value for _, value in fields(values[2][5])]
    assert plain == [0.0, 3.0, 6.0, 4 * 0.5 + 2 * 2.0, 4 * 0.25 + 2 * 4.0]
    assert struct.unpack("<3d", limits) == (0.0, 1.0, 3.0)
    assert struct.unpack("<3d", counts) == (0.0, 4.0, 2.0)


def test_later_file_may_purge_earlier_steps(tmp_path):
    for purge in (None, 7):
        with EventFile(tmp_path, purge_step=purge):
            pass
    one, two = sorted(tmp_path.iterdir())
    assert len(records(one.read_bytes())) == 1
    assert fields(records(two.read_bytes())[1])[1:] == [(2, 7), (7, b"\x08\x01")]


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_events_without_purged_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for purge, steps in ((None, range(5)), (3, range(3, 6))):
        with EventFile(tmp_path, purge_step=purge) as events:
            for step in steps:
                events.write(step, {"success": step / 8}, {"h": ([0.0, 1.0, 3.0], [step, 2])})
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(one.step, one.value) for one in read.Scalars("success")] == [(step, step / 8) for step in range(6)]
    histogram = read.Histograms("h")[-1].histogram_value
    assert (histogram.num, list(histogram.bucket_limit), list(histogram.bucket)) == (7, [0, 1, 3], [0, 5, 2])
