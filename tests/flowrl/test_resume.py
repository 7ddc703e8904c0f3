"""A run that was stopped or killed and is resumed equals one that never was."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toy_inline import load_drawing

from flowrl.cli import parse_flags, run_program
from flowrl.config import TrainConfig
from flowrl.errors import FlowRLError
from flowrl.record import TIME_FIELDS
from flowrl.resume import MAY_CHANGE, recorded_config, settled_config
from flowrl.stop import StopRequest
from flowrl.train import Run, train
from flowrl.vector_env import close_vector_env

TESTS = Path(__file__).parents[1]
CONFIG = TrainConfig(
    policy="none",
    env_id="toy_inline:ToyInline-v0",
    iterations=4,
    envs=3,
    episodes=8,
    val_episodes=5,
    val_every=2,
    save_every=2,
    lr=1e-3,
    kl_adapt=1e-3,
    learn_sigma=True,
    average_decay=0.9,
    sigma_start=0.4,
    sigma_end=0.1,
    target_kl=1.0,
    minibatch=8,
    device="cpu",
    torch_threads=1,
)


def start(out: Path, **changes: Any) -> Path:
    return train(replace(CONFIG, out=str(out), **changes), load_drawing)


def resume(out: Path, **changes: Any) -> Path:
    return train(replace(recorded_config(str(out)), out=str(out), resume=True, **changes), load_drawing)


def read_log(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIME_FIELDS} for line in lines]


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.is_dir() and not path.name.startswith("."))


def record_of(folder: Path) -> dict:
    record = json.loads((folder / "flowrl.json").read_text())
    del record["meta"]["flags"]
    return record


def assert_equal_runs(out: Path, other: Path) -> None:
    """Logs but for times, and every checkpoint: weights, moments, rates, critic, noise, generators, scenes, best."""
    assert read_log(out) == read_log(other)
    assert checkpoints(out) == checkpoints(other)
    for name in checkpoints(out):
        assert record_of(out / name) == record_of(other / name)
        for file in ("model.safetensors", "flowrl.safetensors"):
            a, b = load_file(out / name / file), load_file(other / name / file)
            assert list(a) == list(b)
            assert all(torch.equal(a[key], b[key]) for key in a), (name, file)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The uninterrupted run of 4 iterations."""
    return start(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def half(tmp_path) -> Path:
    """A finished run of 2 iterations."""
    return start(tmp_path / "half", iterations=2)


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    """A copy of the whole run that a test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_two_and_two_iterations_equal_four(whole, half):
    assert read_log(half) == read_log(whole)[:3]
    assert_equal_runs(resume(half, iterations=4), whole)


def test_a_run_stopped_after_each_iteration_equals_one_that_was_not(whole, tmp_path):
    out = start(tmp_path / "run", iterations=0)
    for iterations in range(1, 5):
        resume(out, iterations=iterations)
    assert_equal_runs(out, whole)


def test_resumed_run_holds_the_saved_state_before_it_goes_on(whole, copy):
    config = replace(recorded_config(str(copy)), out=str(copy), resume=True)
    saved = load_file(whole / "last" / "flowrl.safetensors")
    with StopRequest(), Run(config, load_drawing, {}) as run:
        assert run.iteration == 4 and run.next_index == 32 and run.pending is None
        assert run.ppo.lr == read_meta(whole / "last")["lr"] != CONFIG.lr
        moments = run.ppo.optimizer.state_dict()["state"]
        stored = {key for key in saved if key.startswith("optimizer.ppo.")}
        assert stored == {f"optimizer.ppo.{i}.{field}" for i in moments for field in moments[i]}
        for key in stored:
            index, field = key.removeprefix("optimizer.ppo.").split(".")
            assert torch.equal(moments[int(index)][field], saved[key])
        assert torch.equal(torch.get_rng_state(), saved["random.torch"])


def test_scenes_go_on_where_they_stopped(half):
    config = replace(recorded_config(str(half)), out=str(half), resume=True, iterations=3)
    with StopRequest() as stop, Run(config, load_drawing, {}) as run:
        scenes = [episode.scene.index for episode in run.collect(3, stop).episodes]
    assert scenes == list(range(16, 24))


def test_iterations_after_the_last_checkpoint_are_repeated_and_logged_once(whole, copy):
    shutil.rmtree(copy / "last")
    shutil.rmtree(copy / "iter_0004")
    if read_meta(copy / "best")["iteration"] == 4:
        shutil.rmtree(copy / "best")
    with (copy / "log.jsonl").open("a") as log:
        log.write('{"iteration": 5, "kl"')  # killed in mid-line
    assert_equal_runs(resume(copy), whole)


def test_run_killed_before_its_first_checkpoint_starts_again(whole, copy):
    for name in checkpoints(copy):
        shutil.rmtree(copy / name)
    assert_equal_runs(resume(copy), whole)


def test_checkpoint_that_a_killed_writer_put_aside_is_taken(whole, half):
    (half / "last").rename(half / ".last.old")
    shutil.rmtree(half / "iter_0002")
    shutil.rmtree(half / "best")
    resume(half, iterations=4)
    assert read_log(half) == read_log(whole)


def test_best_is_mended_when_the_kill_came_before_it_was_written(tmp_path):
    out = start(tmp_path / "run", iterations=0)
    before = load_file(out / "best" / "flowrl.safetensors")
    shutil.rmtree(out / "best")
    resume(out)
    mended = Path(start(tmp_path / "again", iterations=0)) / "best"
    assert (out / "best").is_dir()
    assert all(
        torch.equal(before[key], value) for key, value in load_file(mended / "flowrl.safetensors").items()
    )


def test_validation_that_was_cut_off_is_made_up_for(whole, tmp_path):
    out = tmp_path / "run"
    config = replace(CONFIG, out=str(out), env_id="toy_env:ToyReach-v0")
    with StopRequest() as stop, Run(config, load_drawing, {}) as run:
        assert run.pending is not None
        run.complete(run.pending, stop)
        for iteration in (1, 2):
            line = run.learn(iteration, run.collect(iteration, stop))
            if iteration == 2:
                stop.requested = True
                close_vector_env(run.vec_envs)  # as a signal to the process group does with the workers
            run.complete(line, stop)
        run.save_last()
    assert [line["iteration"] for line in read_log(out)] == [0, 1, 2]
    assert read_log(out)[2]["val_success"] is None and not read_meta(out / "last")["validated"]
    assert_equal_runs(resume(out), whole)


class StopInTheMiddle(StopRequest):
    """Requests a stop when it is asked for the third time."""

    @property
    def requested(self) -> bool:
        self.asked = getattr(self, "asked", 0) + 1
        return self.asked >= 3

    @requested.setter
    def requested(self, value: bool) -> None:
        pass


def test_rollout_that_was_dropped_leaves_no_trace(whole, tmp_path):
    out = tmp_path / "run"
    with StopRequest() as stop, Run(replace(CONFIG, out=str(out)), load_drawing, {}) as run:
        assert run.pending is not None
        run.complete(run.pending, stop)
        run.complete(run.learn(1, run.collect(1, stop)), stop)
        before = torch.get_rng_state()
        assert run.collect(2, StopInTheMiddle()).interrupted
        assert not torch.equal(torch.get_rng_state(), before)
        run.save_last()
    assert_equal_runs(resume(out), whole)


def test_finished_run_stays_as_it_is(whole, copy):
    resume(copy)
    assert_equal_runs(copy, whole)


def test_tensorboard_goes_on_without_the_repeated_steps(copy):
    shutil.rmtree(copy / "last")
    shutil.rmtree(copy / "iter_0004")
    shutil.rmtree(copy / "best")
    resume(copy)
    board = EventAccumulator(str(copy))
    board.Reload()
    assert [event.step for event in board.Scalars("update/v_loss")] == [1, 2, 3, 4]


def test_record_keeps_the_first_start_and_appends_later_ones(half):
    first = json.loads((half / "args.json").read_text())
    resume(half, iterations=3, envs=2)
    resume(half, iterations=4)
    args = json.loads((half / "args.json").read_text())
    resumptions = args.pop("resumptions")
    assert args == first
    assert [(r["from_iteration"], r["changed"]) for r in resumptions] == [
        (2, {"iterations": 3, "envs": 2}),
        (3, {"iterations": 4}),
    ]
    assert resumptions[0]["versions"] and recorded_config(str(half)).iterations == 4


def test_flags_that_may_change_are_taken(half):
    config = replace(recorded_config(str(half)), out=str(half), resume=True)
    asked = replace(
        config, iterations=9, val_every=3, save_every=4, envs=2, pipeline=1, device="auto", torch_threads=2, offload="cpu"
    )  # fmt: skip
    assert {name for name in asdict(asked) if getattr(asked, name) != getattr(config, name)} == set(
        MAY_CHANGE
    )
    assert settled_config(asked) == asked


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--lr", "0.002"], ["--lr 0.002", "0.001", "--policy"]),
        (["--policy", "other"], ["--policy 'other'", "'none'"]),
        (["--episodes", "9"], ["--episodes 9", "8"]),
        (["--train-seed", "1"], ["--train-seed 1"]),
        (["--no-learn-sigma"], ["--learn-sigma False", "True"]),
        (["--env-kwargs", '{"reward": "shift"}'], ["--env-kwargs", "shift"]),
    ],
)
def test_flags_that_may_not_change_are_refused_by_name(whole, args, words):
    asked = parse_flags(TrainConfig, "", ["--resume", *args], recorded_config(str(whole)))
    with pytest.raises(FlowRLError) as error:
        settled_config(replace(asked, out=str(whole)))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_flags_repeated_as_they_were_are_accepted(whole):
    args = ["--resume", "--out", str(whole), "--lr", "1e-3", "--env-kwargs", "{ }", "--policy", "none"]
    asked = parse_flags(TrainConfig, "", args, recorded_config(str(whole)))
    assert settled_config(asked).env_kwargs == CONFIG.env_kwargs


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda out: shutil.rmtree(out), ["args.json is missing"]),
        (lambda out: (out / "args.json").unlink(), ["args.json is missing"]),
        (lambda out: damage(out / "args.json"), ["args.json is damaged"]),
        (lambda out: (out / "args.json").write_text('{"flags": 3}'), ["args.json is damaged"]),
        (lambda out: (out / "args.json").write_text('{"flags": {"speed": 3}}'), ["--speed is 3"]),
        (lambda out: (out / "args.json").write_text('{"flags": {"envs": "x"}}'), ["--envs is 'x'"]),
        (lambda out: damage(out / "last" / "flowrl.json"), ["last is damaged", "removed"]),
        (lambda out: [damage(p) for p in out.glob("*/flowrl.safetensors")], ["is damaged", "removed"]),
        (lambda out: (out / "last" / "flowrl.json").unlink(), ["last/flowrl.json is missing"]),
        (lambda out: (out / "log.jsonl").unlink(), ["log.jsonl", "line 1"]),
        (lambda out: damage(out / "log.jsonl"), ["log.jsonl", "iteration"]),
        (lambda out: set_in(out / "last" / "flowrl.json", "format", 99), ["format 99"]),
        (lambda out: set_in(out / "last" / "flowrl.json", "meta", {"iteration": 4}), ["earlier flowrl"]),
    ],
)
def test_damaged_run_is_one_line_and_stays_as_it_is(copy, spoil, words, capfd):
    config = replace(recorded_config(str(copy)), out=str(copy), resume=True)
    spoil(copy)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert run_program(lambda _: train(config, load_drawing), []) == 2
    told = capfd.readouterr().err.strip().splitlines()
    assert len(told) == 1 and all(word in told[0] for word in words), told
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("place", ["", "/", "/last", "/log.jsonl"])
def test_run_folder_is_understood_or_pointed_to(whole, place):
    if place in ("", "/"):
        assert recorded_config(f"{whole}{place}") == replace(CONFIG, out="")
    else:
        with pytest.raises(FlowRLError, match=f"give the run's folder, --out {whole}$"):
            recorded_config(f"{whole}{place}")


def test_resume_without_out_is_one_line(capfd):
    from flowrl.cli import _train

    assert run_program(_train, ["--resume"]) == 2
    assert capfd.readouterr().err == "error: --resume: give the run's folder with --out\n"


def read_meta(folder: Path) -> dict:
    return json.loads((folder / "flowrl.json").read_text())["meta"]


def set_in(path: Path, key: str, value: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, key: value}))


class Nursery:
    """A process that forks trainers, kills them as asked and tells their exit codes."""

    def __init__(self, told: Path) -> None:
        self.told = told.open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "toy_inline.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.told,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        )

    def train(self, config: TrainConfig, **kill: float) -> int:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"config": asdict(config), **kill}) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.told.close()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    nursery = Nursery(tmp_path_factory.mktemp("nursery") / "told")
    yield nursery
    nursery.close()


def run_with_kills(nursery: Nursery, out: Path, rng: random.Random, *, by_lines: bool, most: int) -> int:
    """Trains to the end in `out` through at most `most` kills, resuming after each; returns their number."""
    config, kills = replace(CONFIG, out=str(out)), 0
    while True:
        started = (out / "args.json").is_file()
        if not started and out.exists():
            shutil.rmtree(out)  # killed before it was a run
        kill = {"lines": rng.randint(1, 900)} if by_lines else {"seconds": rng.uniform(0.02, 0.5)}
        code = nursery.train(replace(config, resume=started), **(kill if kills < most else {}))
        if code != -signal.SIGKILL:
            nursery.told.flush()
            assert code == 0, Path(nursery.told.name).read_text()[-3000:]
            return kills
        kills += 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_run_killed_again_and_again_equals_one_that_was_not(nursery, whole, tmp_path, seed):
    """Seeds 0 and 1: before a random line of what writes files. 2 and 3: at a random time."""
    rng, kills, runs = random.Random(seed), 0, 0
    while kills < 6 and runs < 30:  # a quick machine may end a run before any kill; then another run is tried
        out, runs = tmp_path / f"run_{runs}", runs + 1
        kills += run_with_kills(nursery, out, rng, by_lines=seed < 2, most=12)
        assert_equal_runs(resume(out), whole)
    print(f"{kills} kills")
    assert kills >= 6
