"""docs/results.md's tables: numbers known independently, from a folder as `gain.py` leaves it."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from chess_env.layout import draw_layout
from flowrl.cli import parse_flags
from flowrl.config import EvalConfig

ROOT = Path(__file__).parents[2]
SCENES, SEED = 40, 9000003
FLAGS = {"policy": "models/chess-tiny", "episodes": 256, "train_seed": 7700004, "average_decay": 0.95}


@pytest.fixture
def program(monkeypatch):
    """Imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def evaluation(success):
    """eval_results.json of one policy on real scenes, the successes made up."""
    episodes = []
    for index, good in enumerate(success):
        layout = draw_layout(SEED, index, (0, 8))
        episodes.append(
            {
                "index": index, "piece": layout.target.kind, "square": layout.target.square, "success": bool(good),
                "clean_lift": bool(good), "disturbed": False, "toppled": not good, "frames": 100 + index if good else 600,
                "close_lateral_mm": 2.0 if good else None,
            }
        )  # fmt: skip
    kwargs = {"distractors": [0, 8]}
    return {
        "settings": {"seed": SEED}, "environment": {"kwargs": kwargs}, "device_name": "a GPU", "commit": "abc",
        "control_rate": 30.0, "weights": "as trained", "episodes": episodes,
    }  # fmt: skip


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def run_log(successes):
    """A log with validation before the first and after the last iteration."""
    lines = [{"iteration": 0, "train_episodes": None, "train_success": None, "val_success": 0.5, "kl": None}]
    for number, success in enumerate(successes, start=1):
        line = {"iteration": number, "train_episodes": 256, "train_success": success, "val_success": None}
        lines.append(line | {"kl": 1e-3, "rollout_s": 3.0, "update_s": 1.0, "ratio_max_dev": 0.0})
    lines[-1]["val_success"] = 0.9
    return lines


@pytest.fixture
def out(tmp_path):
    """The start with 20 of 40; a run that wins 10 of the other scenes and loses 2: 28 of 40. No second run, no control."""
    start = np.arange(SCENES) < 20
    after = start.copy()
    after[20:30], after[:2] = True, False
    write(tmp_path / "out/test/start/eval_results.json", evaluation(start))
    write(tmp_path / "out/test/rl-seed1/eval_results.json", evaluation(after))
    run = tmp_path / "out/runs/rl-seed1"
    write(run / "args.json", {"flags": FLAGS, "commit": "abc", "device_name": "a GPU"})
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run_log([0.4, 0.5, 0.6])))
    usage = {"stage": "train", "seconds": 540.0, "cores": 32, "gpus": 2}
    (tmp_path / "out/stages.jsonl").write_text(json.dumps(usage) + "\n")
    return tmp_path / "out"


@pytest.fixture
def results(program, out):
    return program("result_data").read_results(out, ROOT / "models/chess-tiny")


def test_final_table_has_mcnemars_p_and_the_pooled_difference(program, results):
    table = program("result_tables").final_table(results)
    # Two-sided binomial test of 2 in 12: 2 * (1 + 12 + 66) / 4096 = .0386.
    assert "| rl-seed1 | 28/40 = 70.0%" in table
    assert "| 0.039 | 10 / 2 |" in table
    assert "| start | 20/40 = 50.0%" in table
    assert "Pooled over 1 runs: +20.0 (" in table
    assert "Missing: rl-seed2, rl-seed3." in table


def test_wilson_interval_in_cells(program):
    success = np.arange(512) < 451
    assert program("result_tables").rate(success) == "451/512 = 88.1% (85.0 to 90.6)"


def test_bootstrap_over_scenes_agrees_with_the_normal_interval_of_one_run(program):
    generator = np.random.default_rng(3)
    start, after = generator.random(1000) < 0.55, generator.random(1000) < 0.88
    found = program("result_statistics").pooled_difference([after], [start])
    difference = after.astype(float) - start
    half = 1.96 * difference.std() / np.sqrt(1000)
    assert found.mean == pytest.approx(difference.mean())
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half), abs=0.004)


def test_shared_scenes_do_not_narrow_the_interval_of_equal_runs(program):
    generator = np.random.default_rng(4)
    start, after = generator.random(300) < 0.5, generator.random(300) < 0.8
    pooled = program("result_statistics").pooled_difference
    assert pooled([after, after, after], [start]) == pooled([after], [start])


def test_interval_between_runs_is_students(program):
    found = program("result_statistics").between_runs([0.2, 0.3, 0.4])
    # t(2) = 4.303, standard deviation .1: 4.303 * .1 / sqrt(3) = .2484
    assert (found.mean, found.low, found.high) == pytest.approx((0.3, 0.0516, 0.5484), abs=1e-4)


def test_compact_form_gives_the_same_tables(program, results, tmp_path):
    data, tables = program("result_data"), program("results").TABLES
    data.write_results(results, tmp_path / "compact")
    again = data.read_results(tmp_path / "compact", ROOT / "models/chess-tiny")
    assert {name: table(again) for name, table in tables.items()} == {
        name: table(results) for name, table in tables.items()
    }
    assert sum(path.stat().st_size for path in (tmp_path / "compact").rglob("*") if path.is_file()) < 6000


def test_parts_that_do_not_exist_say_so(program, results):
    tables = program("results").TABLES
    assert tables["controls"](results) == tables["ablations"](results) == tables["final-cpu"](results)
    assert tables["ablations"](results) == "Not yet run."
    claim = tables["claim"](results)
    assert "| pooled gain at least 20 points | +20.0" in claim
    assert "| each of three runs significant | p 0.039 | **no** |" in claim  # one run is not three
    assert "| not yet run | open |" in claim


def test_ablations_stand_beside_the_proofs_own_run_when_it_was_as_long(program, results, out):
    data = program("result_data")
    write(out.parent / "other/validation/ratio-step-s1/eval_results.json", evaluation(np.arange(SCENES) < 30))
    run = out.parent / "other/runs/ratio-step-s1"
    write(run / "args.json", {"flags": FLAGS, "commit": "def", "device_name": "a GPU"})
    lines = run_log([0.2, 0.7])
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    other = data.read_results(out.parent / "other", ROOT / "models/chess-tiny")
    both = data.merged([results, other])
    assert both.commit == "abc; def" and list(both.usage) == list(results.usage)
    assert both.tests["test"] == results.tests["test"]
    table = program("result_tables").ablations_table(both).splitlines()
    # The proof's run has no validation at iteration 2; its training success there was .5.
    assert table[2] == "| the preset: the proof's runs at iteration 2 |  |  |  |  | 50.0% |"
    assert table[3] == "| `--ratio step` | 30/40 = 75.0% (59.8 to 85.8) | 75.0% | 90.0% | 90.0% | 70.0% |"
    assert table[-1] == (
        "Missing: no-critic-s1, no-critic-s2, ratio-step-s2, ratio-chunk-s1, ratio-chunk-s2, learn-sigma-s1, learn-sigma-s2."
    )


def test_of_two_folders_the_later_ones_parts_win(program, results):
    data = program("result_data")
    newer = data.Results(runs={"rl-seed1": data.Run([{"iteration": 7}], {})}, fits={"longer": {"loss": []}})
    both = data.merged([results, newer])
    assert both.runs["rl-seed1"].iterations == 7 and both.fits == newer.fits
    assert data.merged([newer, results]).runs == results.runs


def test_a_folder_that_is_merged_twice_costs_once(program, results):
    data = program("result_data")
    other = data.Results(usage=[{"stage": "train", "seconds": 99.0, "cores": 32, "gpus": 2}])
    once = data.merged([results, other])
    assert [stage["seconds"] for stage in once.usage] == [540.0, 99.0]
    assert data.merged([once, other]).usage == once.usage


def test_larger_policys_table_has_each_validation_and_what_it_was_cloned_from(program, tmp_path):
    run = tmp_path / "runs/rl"
    write(
        run / "args.json",
        {"flags": FLAGS | {"policy": "/a/start"}, "commit": "abcdefghij", "device_name": "a GPU"},
    )
    lines = [line | {"val_episodes": 40} for line in run_log([0.4, 0.5])]
    lines[-1] |= {"val_gain": 0.4, "val_gain_low": 0.25, "val_gain_high": 0.55}
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    clone = {"episodes_kept": 9, "observations": 450, "loss": [[50, 0.5], [123, 0.25]]}
    config = {
        "record": {"episodes": 10},
        "steps": 8000,
        "batch": 256,
        "lr": 1e-3,
        "preset": "/a/b/preset.json",
    }
    write(tmp_path / "start/clone.json", clone | {"config": config})
    write(tmp_path / "validation/start/eval_results.json", evaluation(np.arange(SCENES) < 20))
    results = program("result_data").read_results(tmp_path, ROOT / "models/chess-tiny")
    table = program("result_tables").larger_table(results)
    assert "| 0 | 0 | 20/40 = 50.0% (35.2 to 64.8) |  |" in table
    assert "| 2 | 512 | 36/40 = 90.0% (76.9 to 96.0) | +40.0 (+25.0 to +55.0) |" in table
    assert "start: cloned from 9 of 10 demonstrations, 450 observations; 123 steps of 256 at 0.001" in table
    assert "start, validation, scenes 0-39 of seed 9,000,003: 20/40 = 50.0% (35.2 to 64.8)." in table
    assert "Largest |ratio - 1| as sampled: 0. a GPU, commit abcdefg." in table
    data = program("result_data")
    data.write_results(results, tmp_path / "compact")
    again = data.read_results(tmp_path / "compact", ROOT / "models/chess-tiny")
    assert program("result_tables").larger_table(again) == table
    assert again.fits["start"]["config"] == config | {"preset": "preset.json"}  # no paths of a machine
    assert again.runs["rl"].args["flags"] == FLAGS | {"policy": "start"}


def test_black_pieces_are_counted_in_the_drawn_scene(program, results):
    columns = results.tests["test"]["start"].columns
    assert columns["distractors"][:5] == [len(draw_layout(SEED, i, (0, 8)).distractors) for i in range(5)]
    with pytest.raises(ValueError, match="other scenes"):
        program("result_data").num_distractors(SEED, 0, (0, 8), "queen", "e4")


def test_usage_is_seconds_times_the_machine(program, results):
    table = program("result_tables").usage_table(results)
    assert "| train | 1 | 9.0 | 18.0 | 4.80 |" in table  # 540 s: 9 min, 2 GPUs, 32 cores
    assert "3 iterations, 768 episodes" in table


def test_page_is_filled_and_curves_are_drawn(program, results, tmp_path):
    module = program("results")
    page = (ROOT / "docs/results.md").read_text()
    blocks = {name: table(results) for name, table in module.TABLES.items()} | {"curves": "picture"}
    filled = module.filled(page, blocks)
    assert "28/40" in filled and filled.count("Not yet run.") >= 2
    assert module.filled(filled, blocks) == filled
    assert module.learning_curves(results, tmp_path / "curves.png")
    assert 5_000 < (tmp_path / "curves.png").stat().st_size < 200_000


def test_model_card_has_the_numbers_and_a_command_that_is_understood(program, out):
    card = program("model_card").model_card(out, "rl-seed1", Path("models/chess-tiny-rl"))
    for words in (
        "768 training episodes",
        "seed 7700004",
        "28/40 = 70.0%",
        "20/40 = 50.0%",
        "commit abc",
        "on a GPU;",
    ):
        assert words in " ".join(card.split())
    command = next(line for line in card.splitlines() if line.startswith("uv run flowrl-eval"))
    config = parse_flags(EvalConfig, "flowrl-eval", command.split()[3:])
    assert (config.policy, config.versus) == ("models/chess-tiny-rl", "models/chess-tiny")
