"""Programs side by side, each on its share of the cores and with a GPU, until a time limit. What is done is not done again."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STOP_BEFORE_S, KILL_BEFORE_S = 15.0, 3.0
"""A trainer is asked to stop (SIGTERM) and saves; what still runs shortly before the limit is killed with its workers."""


ATTEMPTS = 2
"""A program that fails is started once more: a run goes on from its last checkpoint."""


@dataclass(frozen=True)
class Step:
    """One program of a job.

    Attributes:
        command: Its words, asked for when it is started (a run that was stopped goes on with other flags).
        done: Whether its result is there, told from the files alone.
        needs_s: It is not started with less time left [s].
    """

    command: Callable[[], Sequence[str]]
    done: Callable[[], bool]
    needs_s: float = 20.0


@dataclass(frozen=True)
class Job:
    """Programs one after another.

    Attributes:
        name: Also of its log.
        steps: Those that are done are left out.
        weight: Its share of the cores, where each job has cores of its own.
        gpu: Which of the GPUs, by number modulo their count; None: dealt out in turn.
    """

    name: str
    steps: Sequence[Step]
    weight: int = 1
    gpu: int | None = None

    def done(self) -> bool:
        """Whether every step's result is there."""
        return all(step.done() for step in self.steps)


@dataclass
class Slot:
    """A share of the machine, and what runs on it."""

    cores: list[int]
    gpu: str | None
    queue: list[Job]
    job: Job | None = None
    step: Step | None = None
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    failures: int = 0
    asked_to_stop: bool = False


@dataclass(frozen=True)
class Machine:
    """Cores and GPUs that may be used.

    The cores are those that this process may run on (`nproc` obeys OMP_NUM_THREADS, and would say 1), or the first CORES of them; the
    GPUs are named by GPUS, by CUDA_VISIBLE_DEVICES, or by nvidia-smi. Without a GPU the list is empty.
    """

    cores: list[int] = field(default_factory=lambda: _cores())
    gpus: list[str] = field(default_factory=lambda: _gpus())

    def slots(self, jobs: Sequence[Job], parallel: int) -> list[Slot]:
        """One slot for each job where there are at most `parallel`, by weight; else `parallel` equal ones with a common queue."""
        own = len(jobs) <= parallel
        weights = [job.weight for job in jobs] if own else [1] * parallel
        common = list(jobs)
        slots, first = [], 0
        for number, weight in enumerate(weights):
            count = max(1, len(self.cores) * weight // sum(weights))
            chosen = [self.cores[(first + i) % len(self.cores)] for i in range(min(count, len(self.cores)))]
            first += count
            wanted = jobs[number].gpu if own else None
            place = number if wanted is None else wanted
            gpu = self.gpus[place % len(self.gpus)] if self.gpus else None
            slots.append(Slot(chosen, gpu, [jobs[number]] if own else common))
        return slots


def run_jobs(
    jobs: Sequence[Job], out: Path, deadline: float, machine: Machine, parallel: int = 4
) -> dict[str, str]:
    """Runs what is not done yet, once more what fails; returns "done", "not finished ..." or "FAILED ..." for each job, by its name.

    Programs write to `out/logs/<name>.log`; `out/jobs.jsonl` gets a line for each that ended: job, cores, GPU, seconds, exit code.

    Args:
        jobs: In this order. A job whose steps are all done is left out.
        out: Folder of the logs.
        deadline: `time.monotonic()` at which nothing runs any more.
        machine: What they share.
        parallel: Most jobs at once.
    """
    (out / "logs").mkdir(parents=True, exist_ok=True)
    outcome = {job.name: "done" if job.done() else "not finished: no time to start" for job in jobs}
    slots = machine.slots([job for job in jobs if not job.done()], parallel)
    stopping = _StopSignals()
    with stopping:
        while True:
            left = deadline - time.monotonic()
            stop = left < STOP_BEFORE_S or stopping.requested
            for slot in slots:
                _attend(slot, out, outcome, left, stop)
            if not any(slot.process for slot in slots):
                return outcome
            if stopping.requested:
                deadline = min(deadline, time.monotonic() + STOP_BEFORE_S)
            time.sleep(0.1)


def _attend(slot: Slot, out: Path, outcome: dict[str, str], left: float, stop: bool) -> None:
    """Looks after one slot: a program that ended, the next one, the time limit."""
    if slot.process is not None and slot.process.poll() is not None:
        _ended(slot, out, outcome, stop)
    if slot.process is None:
        if not stop:
            _start_next(slot, out, outcome, left)
    elif stop and not slot.asked_to_stop:
        slot.process.terminate()
        slot.asked_to_stop = True
    elif left < KILL_BEFORE_S:
        _kill_group(slot.process)


def _start_next(slot: Slot, out: Path, outcome: dict[str, str], left: float) -> None:
    while slot.job is not None or slot.queue:
        if slot.job is None:
            slot.job, slot.failures = slot.queue.pop(0), 0
        step = next((step for step in slot.job.steps if not step.done()), None)
        if step is None:
            outcome[slot.job.name] = "done"
            slot.job = None
            continue
        if left < step.needs_s + STOP_BEFORE_S:
            if not slot.failures:
                outcome[slot.job.name] = f"not finished: its next program needs about {step.needs_s:.0f} s"
            slot.job = None
            continue
        slot.step, slot.started, slot.asked_to_stop = step, time.monotonic(), False
        if not slot.failures:
            outcome[slot.job.name] = "not finished"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if slot.gpu is not None:
            environment |= {"CUDA_VISIBLE_DEVICES": slot.gpu, "MUJOCO_EGL_DEVICE_ID": slot.gpu}
        cores = ",".join(map(str, slot.cores))
        with (out / "logs" / f"{slot.job.name}.log").open("ab") as log:
            slot.process = subprocess.Popen(
                ["taskset", "-c", cores, *step.command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        return


def _ended(slot: Slot, out: Path, outcome: dict[str, str], stop: bool) -> None:
    assert slot.process is not None and slot.job is not None and slot.step is not None
    code, name = slot.process.returncode, slot.job.name
    _kill_group(slot.process)  # workers that outlive a program that was killed
    seconds = time.monotonic() - slot.started
    line = {
        "job": name,
        "cores": len(slot.cores),
        "gpu": slot.gpu,
        "seconds": round(seconds, 1),
        "code": code,
    }
    with (out / "jobs.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    slot.process = None
    if slot.step.done():
        slot.failures = 0
        if slot.job.done():
            outcome[name] = "done"
            print(f"{name}: done, {seconds:.0f} s on {len(slot.cores)} cores", flush=True)
            slot.job = None
        return
    if not stop:
        what = f"exit code {code}" if code else "it ended without its result"
        outcome[name] = f"FAILED, {what}: {last_line(out / 'logs' / f'{name}.log')}"
        print(f"{name}: {outcome[name]}", flush=True)
        slot.failures += 1
        if slot.failures < ATTEMPTS:
            return
    slot.job = None


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """SIGKILL to all processes of the program's session that are left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def last_line(path: Path) -> str:
    """The last line of a text file that is not empty; "" where there is none."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-200:] if lines else ""


class _StopSignals:
    """Ctrl-C and SIGTERM ask the programs to stop, and the driver to end with its table."""

    requested = False

    def __enter__(self) -> "_StopSignals":
        self.before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number: int, frame: object) -> None:
        self.requested = True

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def _cores() -> list[int]:
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[: int(os.environ.get("CORES", len(allowed)))]


def _gpus() -> list[str]:
    given = os.environ.get("GPUS", os.environ.get("CUDA_VISIBLE_DEVICES"))
    if given is not None:
        return given.replace(",", " ").split()
    try:
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []
