"""What is printed past Python does not get into an answer on stdout."""

from __future__ import annotations

import subprocess
import sys

PRINTS = """
import os
from planner.files.standard_streams import keep_native_prints_off_stdout

print("before")
keep_native_prints_off_stdout()
os.write(1, b"a line of a library\\n")
print("{}: ×")
"""


def test_a_library_that_prints_does_not_print_into_the_answer() -> None:
    command = [sys.executable, "-X", "utf8", "-c", PRINTS]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
    assert (done.stdout, done.stderr) == ("before\n{}: ×\n", "a line of a library\n")
