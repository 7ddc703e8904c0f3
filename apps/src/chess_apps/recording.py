"""The scripted expert, recorded: one episode from (seed, index), many episodes from a pool of processes."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
from tqdm import tqdm

from chess_apps.config import RecordConfig
from chess_apps.demonstrations import EpisodeRecord
from chess_env import so101
from chess_env.env import CAMERAS, ChessPickEnv
from chess_env.expert import Expert, ExpertConfig
from chess_env.layout import check_seed
from flowrl.errors import FlowRLError

FPS = 30
JOINT_NAMES = tuple(f"{name}.pos" for name in so101.JOINT_NAMES)
_EXPERT_STREAM = 1


class Recorder:
    """Records episodes in one environment of its own.

    An episode is a pure function of (seed, index) and of the expert's manners. Observations are taken before every
    ``stride``-th control frame and before the first; which ones, is drawn per episode.
    """

    def __init__(self, config: RecordConfig, *, stride: int) -> None:
        self.config, self.stride = config, stride
        self.env = ChessPickEnv(image_size=config.image_size, distractors=config.distractors, measure=False)
        self.expert: Expert | None = None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.env.close()

    def record(self, index: int) -> EpisodeRecord | None:
        """The expert's episode in scene ``index``, or None when it was no clean lift."""
        config, simulation = self.config, self.env.simulation
        rng = np.random.default_rng(np.random.SeedSequence([config.seed, index], spawn_key=(_EXPERT_STREAM,)))
        _, info = self.env.reset(seed=config.seed, options={"index": index})
        if self.expert is None:
            self.expert = Expert(simulation.scene, expert_config(config))
        if rng.random() < config.near_fraction:
            simulation.restart(self.expert.sample_near_start(simulation.data, simulation.target_slot, rng))
        plan = self.expert.plan(simulation.data, simulation.target_slot, rng)
        if plan is None:
            return None
        plan = np.clip(plan, so101.JOINT_LOW, so101.JOINT_HIGH)
        phase = int(rng.integers(self.stride))
        frames, images, state = [], [], []
        executed = 0
        for frame, target in enumerate(plan):
            if frame == 0 or (frame + phase) % self.stride == 0:
                observation = self.env.observe()
                frames.append(frame)
                images.append(np.stack([observation["pixels"][camera] for camera in CAMERAS]))
                state.append(observation["agent_pos"])
            executed += 1
            if simulation.run_frame(target) is not None:
                break
        episode = simulation.episode
        if not episode.success or episode.disturbed:
            return None
        return EpisodeRecord(
            index=index,
            task=info["task"],
            targets=so101.to_units(plan[:executed]).astype(np.float32),
            frames=np.array(frames, np.int32),
            images=np.stack(images),
            state=np.stack(state).astype(np.float32),
        )


def check_recording(config: RecordConfig) -> None:
    """Refuse, in one line, what no worker could record, before anything is written.

    Raises:
        FlowRLError: A number is outside what is allowed.
        ChessEnvError: The environment or the expert refuses its part of the flags.
    """
    for name in ("episodes", "workers"):
        if getattr(config, name) < 1:
            raise FlowRLError(f"--record.{name} {getattr(config, name)}: at least 1 is needed")
    if not 0 <= config.near_fraction <= 1:
        raise FlowRLError(f"--record.near-fraction {config.near_fraction}: a share from 0 to 1 is needed")
    check_seed(config.seed)
    check_seed(config.first_index, "first_index")
    expert_config(config)
    Recorder(config, stride=1).env.close()


def expert_config(config: RecordConfig) -> ExpertConfig:
    """The expert's part of the recording flags."""
    return ExpertConfig(
        variety=config.variety,
        aim_error_mm=config.aim_error_mm,
        hesitation_frames=config.hesitation_frames,
        close_early_late_frames=config.close_shift_frames,
    )


@contextmanager
def worker_pool(
    num_workers: int, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """Spawned processes: nothing of this process (OpenGL, torch, threads) is inherited.

    An error or Ctrl-C in the body ends the workers at once, whatever they are doing, and without a word of theirs.

    Raises:
        FlowRLError: A worker died.
    """
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        num_workers,
        multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(initializer, initargs),
    )
    try:
        yield pool
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise FlowRLError(
                f"one of {num_workers} worker processes died, perhaps for lack of memory: run it again with fewer workers"
            ) from error
        raise
    finally:
        pool.shutdown()


def _begin_worker(initializer: Callable[..., None] | None, initargs: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair: it ends the workers
    if initializer is not None:
        initializer(*initargs)


def record_episodes(config: RecordConfig, *, stride: int) -> Iterator[EpisodeRecord]:
    """The expert's clean lifts among ``config.episodes`` scenes, in the order of their indices."""
    indices = range(config.first_index, config.first_index + config.episodes)
    kept = 0
    with (
        worker_pool(config.workers, _start_worker, (config, stride)) as pool,
        tqdm(total=config.episodes, desc="recording", unit="scene", mininterval=1.0, disable=None) as bar,
    ):
        for episode in pool.map(_record, indices, chunksize=4):
            bar.update()
            if episode is not None:
                kept += 1
                yield episode
    print(f"recorded {kept} clean lifts in {config.episodes} scenes")


_recorder: Recorder | None = None


def _start_worker(config: RecordConfig, stride: int) -> None:
    global _recorder  # one environment per process; a pool gives its workers no other place
    _recorder = Recorder(config, stride=stride)


def _record(index: int) -> EpisodeRecord | None:
    assert _recorder is not None
    return _recorder.record(index)
