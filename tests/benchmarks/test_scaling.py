"""The driver of docs/performance.md's measurements: every part once, with its command in its result."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = "import json, sys; from pathlib import Path; Path(sys.argv[-1]).write_text(json.dumps({'flags': sys.argv[1:-2]}))"


@pytest.fixture
def scaling(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("scaling")


def call(scaling, monkeypatch, tmp_path, parts, *flags) -> int:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("GPUS", raising=False)
    monkeypatch.setattr(scaling, "cpu_parts", lambda: parts)
    folders = ["--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch")]
    monkeypatch.setattr("sys.argv", ["scaling.py", "60", *folders, *flags])
    with pytest.raises(SystemExit) as ended:
        scaling.main()
    return ended.value.code


def test_every_part_leaves_its_command_and_is_not_run_again(scaling, monkeypatch, tmp_path):
    script = tmp_path / "measure.py"
    script.write_text(SCRIPT)
    parts = [scaling.Part(name, [str(script), "--of", name], 1.0) for name in ("a", "b")]
    assert call(scaling, monkeypatch, tmp_path, parts, "--only", "b") == 0
    assert not (tmp_path / "out/cpu-a.json").exists()
    first = json.loads((tmp_path / "out/cpu-b.json").read_text())
    assert first == {"flags": ["--of", "b"], "command": f"python {script} --of b"}
    script.write_text("raise SystemExit(3)")  # b is there, a fails
    assert call(scaling, monkeypatch, tmp_path, parts) == 1
    assert json.loads((tmp_path / "out/cpu-b.json").read_text()) == first
    assert not (tmp_path / "out/cpu-a.json").exists()


def test_unknown_part_is_refused(scaling, monkeypatch, tmp_path, capsys):
    parts = [scaling.Part("a", ["x.py"], 1.0)]
    assert call(scaling, monkeypatch, tmp_path, parts, "--only", "c") == 2
    assert "no part c for this machine; there are a" in capsys.readouterr().err


def test_parts_are_understood_by_their_programs(scaling, monkeypatch):
    iteration = importlib.import_module("iteration")
    for part in [*scaling.gpu_parts(), *scaling.cpu_parts()]:
        script, *words = part.words
        assert (ROOT / script).is_file()
        if script.endswith("iteration.py"):
            own, flags = iteration.parser().parse_known_args(words)
            assert own.envs and own.episodes and own.repeats >= 1
            iteration.config_of(flags)  # raises for a flag that flowrl-train does not have


def test_pages_tables_are_of_parts_that_are_measured(scaling):
    page = importlib.import_module("performance_page")
    text = "\n".join(page.blocks({}).values())
    for kind, parts in (("gpu", scaling.gpu_parts()), ("cpu", scaling.cpu_parts())):
        for part in parts:
            assert f"{kind}-{part.name}" in text, part.name
