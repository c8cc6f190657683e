"""The check of a device as a command."""

import json

import pytest

from tests.experiments.conftest import check_refused, last_line


@pytest.mark.slow
def test_a_cpu_is_trusted_and_what_could_not_be_checked_is_told(command, tmp_path):
    file = tmp_path / "device.json"
    done = command("device_check", "--size=small", f"--out={file}")
    found = last_line(done)
    assert found["trusted"]
    assert json.loads(file.read_text())["lines"] == found["lines"]
    assert {line["check"] for line in found["lines"] if line.get("guards")} >= {"logits", "ratio", "widths", "packing"}
    assert not [line for line in found["lines"] if line["status"] in ("FAIL", "ERROR")]
    assert "figures that guard correctness are within their bounds" in done.stdout
    assert "peak of decode, measured / planned: was skipped" in done.stdout


def test_an_unknown_check_is_refused(command):
    refused = command("device_check", "--checks=logit", check=False)
    check_refused(refused, "--checks has 'logit', which is no check; choose from environment, logits")
