"""The README of chess_env: every program in it runs as written and prints what its comments say; its tables are true."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from python_process import run_python

from chess_env.config import DEFAULT_ARGUMENTS, RANDOMIZATIONS, Randomization

README = (Path(__file__).parents[2] / "packages" / "chess_env" / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def title(program: str) -> str:
    """The heading above a program."""
    return README[: README.index(program)].rsplit("\n#", 1)[-1].split("\n")[0].strip("# ") or "first lines"


@pytest.mark.parametrize("program", PROGRAMS, ids=title)
def test_program_runs_as_written_and_prints_what_it_says(program):
    result = run_python(program)
    assert result.returncode == 0, result.stderr
    expected = re.findall(r"print\(.*\)  # (.+)", program)
    printed = result.stdout.splitlines()
    assert len(printed) == program.count("print(")
    assert [line for line in expected if line not in printed] == []


def test_newcomers_first_program_has_ten_lines_and_comes_first():
    assert README.index(PROGRAMS[0]) < README.index("\n## ")
    assert len(PROGRAMS[0].splitlines()) <= 11


def test_table_of_ranges_is_the_presets():
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([\d.]+) \| ([\d.]+) \|$", README, re.MULTILINE)
    assert {name: (float(default), float(wide)) for name, default, wide in rows} == {
        item.name: (getattr(RANDOMIZATIONS["default"], item.name), getattr(RANDOMIZATIONS["wide"], item.name))
        for item in fields(Randomization)
    }


def test_variants_name_real_arguments():
    variants = README[README.index("## Variants") : README.index("## Positions")]
    names = set(re.findall(r"`(\w+)=", variants))
    assert names and names <= set(DEFAULT_ARGUMENTS)
