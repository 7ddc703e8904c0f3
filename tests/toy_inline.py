"""The toy environment stepped in the trainer's own process, and a trainer that can be killed: both start in no time.

As a program, this is a nursery: it imports torch once, then forks a trainer for every request on its standard input,
kills it as asked, and answers with the exit status. It never imports LeRobot.
"""

import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from flowrl import checkpoint, record
from flowrl import train as training
from flowrl.config import TrainConfig
from flowrl.prefix import Prefix
from flowrl.sub_environment import SubEnvironmentMaker
from toy import ToyPolicy, load_toy
from toy_env import CHUNK_SIZE, KWARGS

TRACED = {module.__file__ for module in (checkpoint, record, training)}


class InlineVectorEnv(SyncVectorEnv):
    """Gymnasium's, but an ended environment may be stepped along, as in AsyncVectorEnv: SubEnvironment lets it rest."""

    def step(self, actions: Any) -> Any:
        self._autoreset_envs[:] = False
        return super().step(actions)


def make_inline(num_envs: int, **kwargs: Any) -> SyncVectorEnv:
    makers = [
        SubEnvironmentMaker("ToyReach-v0", number, kwargs, CHUNK_SIZE, CHUNK_SIZE)
        for number in range(num_envs)
    ]
    return InlineVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)


if "ToyInline-v0" not in gymnasium.registry:  # as a program, this file is imported a second time by its name
    gymnasium.register(
        "ToyInline-v0",
        entry_point="toy_env:ToyReachEnv",
        vector_entry_point="toy_inline:make_inline",
        kwargs=KWARGS,
    )


class DrawingPolicy(ToyPolicy):
    """Its encoder draws from the global generators of torch, numpy and Python."""

    def encode(self, observation: Mapping[str, Any], tasks: Sequence[str]) -> Prefix:
        prefix = super().encode(observation, tasks)
        drawn = float(torch.randn(())) + np.random.standard_normal() + random.gauss(0, 1)  # noqa: NPY002
        return Prefix({"state": prefix.tensors["state"] + 0.05 * drawn})


def load(path: Path | str, **_: Any) -> ToyPolicy:
    return load_toy(path)


def load_drawing(path: Path | str, **_: Any) -> ToyPolicy:
    policy = DrawingPolicy()
    policy.module.load_state_dict(load_toy(path).module.state_dict())
    return policy


def kill_after_lines(count: int) -> None:
    """SIGKILL before the count-th line of the modules that write a run's files, and of shutil, is executed."""
    left = count

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in TRACED and not frame.f_code.co_filename.endswith("shutil.py"):
            return None
        if event == "line":
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def run_child(request: dict[str, Any]) -> int:
    """Trains in a forked process; returns its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if request.get("lines"):
                kill_after_lines(request["lines"])
            training.train(TrainConfig(**{**request["config"], "rename": ()}), load_drawing)
            code = 0
        finally:
            if code:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
    if request.get("seconds"):
        time.sleep(request["seconds"])
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # the optimizer does, which would take every child seconds
    torch.set_num_threads(1)
    for request_line in sys.stdin:
        print(run_child(json.loads(request_line)), flush=True)
