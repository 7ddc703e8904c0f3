"""Commands in the documentation are understood by the programs, and every flag that it names exists."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from flowrl.cli import parse_flags
from flowrl.config import CheckConfig, EvalConfig, RelocateConfig, TrainConfig, check_config, flag
from flowrl.errors import FlowRLError

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md", "packages/flowrl/README.md", "models/chess-tiny/README.md", "docs/algorithm.md", "docs/environment.md",
    "docs/classic_control.md", "docs/baselines.md", "docs/results.md", "docs/performance.md", "docs/experiments.md",
    "packages/lerobot_env_chess_pick/README.md", "models/chess-tiny-rl/README.md",
]  # fmt: skip
FLOWRL_PAGES = ["packages/flowrl/README.md", "docs/algorithm.md", "docs/classic_control.md"]
"""Pages on which every flag is one of flowrl's programs, but for those of `OTHER_PROGRAMS`."""
OTHER_PROGRAMS = {"--agent"}
CONFIGS = {
    "flowrl-train": TrainConfig,
    "flowrl-eval": EvalConfig,
    "flowrl-check": CheckConfig,
    "flowrl-relocate": RelocateConfig,
}


def bash_commands(text: str) -> list[list[str]]:
    """The flowrl commands of the fenced bash blocks: program and arguments."""
    commands = []
    for block in re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            for place, word in enumerate(words):
                if word in CONFIGS:
                    ends = [n for n, w in enumerate(words) if n > place and w in ("&&", ";", "|", "&")]
                    commands.append(words[place : min(ends, default=len(words))])
    return commands


def inline_code(text: str) -> list[str]:
    """`code` in the text, without the fenced blocks; it may run over the end of a line."""
    return re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def flags_in(code: str) -> set[str]:
    """The flags of a piece of code, as they are registered: --no-x as --x."""
    return {f.replace("--no-", "--") for f in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", code)}


def flags_of(*configs: type) -> set[str]:
    return {"--help", "--version"} | {flag(field.name) for c in configs for field in dataclasses.fields(c)}


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_documentation_are_understood(page):
    for name, *args in bash_commands((ROOT / page).read_text()):
        config = parse_flags(CONFIGS[name], name, args)
        if not isinstance(config, RelocateConfig):
            check_config(config)


@pytest.mark.parametrize("page", PAGES)
def test_flags_named_beside_a_program_are_its_own(page):
    for code in inline_code((ROOT / page).read_text()):
        name = code.split()[0]
        if name in CONFIGS:
            assert flags_in(code) <= flags_of(CONFIGS[name]), code


@pytest.mark.parametrize("page", PAGES)
def test_scripts_of_the_documentation_are_there_and_have_the_flags_that_it_gives_them(page):
    """Also in running text. What is quoted is another program's."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```(?:bash|sh|console)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()] + inline_code(text)
    for line in lines:
        for script, rest in re.findall(r"((?:benchmarks|apps/baselines)/\w+\.py)([^#;&|]*)", line):
            source = (ROOT / script).read_text()
            known = "parse_flags" in source or "tyro" in source  # from a config
            for name in flags_in(re.sub(r"'[^']*'|\"[^\"]*\"", "", rest)):
                assert known or f'"{name}"' in source, f"{script} {name}"


@pytest.mark.parametrize("page", FLOWRL_PAGES)
def test_flags_named_alone_are_some_programs(page):
    named = {f for code in inline_code((ROOT / page).read_text()) for f in flags_in(code)}
    assert named and named <= flags_of(*CONFIGS.values()) | OTHER_PROGRAMS


def test_every_program_is_shown_on_its_page():
    shown = {name for name, *_ in bash_commands((ROOT / "packages/flowrl/README.md").read_text())}
    assert shown == set(CONFIGS)


def test_a_wrong_command_would_be_found():
    text = "```bash\nFOO=1 uv run flowrl-eval --policy x \\\n  --speed 3   # a comment\n```\nand `flowrl-train --fast`"
    (command,) = bash_commands(text)
    assert command == ["flowrl-eval", "--policy", "x", "--speed", "3"]
    with pytest.raises(FlowRLError, match="--speed"):
        parse_flags(EvalConfig, "flowrl-eval", command[1:])
    assert flags_in(inline_code(text)[0]) - flags_of(TrainConfig) == {"--fast"}
