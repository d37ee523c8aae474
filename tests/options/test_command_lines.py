"""Command lines mean what they meant when tests/command_lines.py was last run."""

import json
import re

import pytest
from command_lines import LINES, RECORDED, observe

NAMES = re.compile(r"--\w+")


@pytest.mark.parametrize("script", LINES)
def test_command_lines_mean_what_they_meant(script):
    recorded, found = json.loads(RECORDED.read_text())[script], observe(script)
    assert found["flags"] == recorded["flags"]
    assert found["usual"] == recorded["usual"]
    for line, expected in recorded["lines"].items():
        if "options" in expected:
            assert found["lines"][line] == expected, line
        else:  # in words that may be others, of the same flags
            assert set(NAMES.findall(expected["refused"])) <= set(NAMES.findall(found["lines"][line]["refused"])), line
