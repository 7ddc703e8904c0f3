"""Errors of chess_env: one readable line with the value, what is allowed, and the remedy."""


class ChessEnvError(Exception):
    """Base of every error that chess_env raises itself."""


class ConfigError(ChessEnvError, ValueError):
    """An argument of the environment is outside what it allows."""


class UnknownArgumentError(ConfigError, TypeError):
    """An argument that the environment does not have. A TypeError worded as Python's own, which TorchRL's GymEnv waits for:
    it offers every environment a `frameskip` first, and drops it when it is refused."""


class OptionError(ChessEnvError, ValueError):
    """A reset option is unknown or has a wrong value."""


class ActionError(ChessEnvError, ValueError):
    """An action has a wrong shape or holds a value that is not a finite number."""


class EpisodeError(ChessEnvError, RuntimeError):
    """step() was called before reset(), after the episode's end, or after close()."""


class SceneError(ChessEnvError, RuntimeError):
    """A scene cannot be built or does not settle."""


class RenderingError(ChessEnvError, RuntimeError):
    """No image can be rendered: no OpenGL, a wrong thread, a size that does not fit."""


class WorkerError(ChessEnvError, RuntimeError):
    """A worker process of the vector environment died, raised or did not answer.

    Attributes:
        indices: The sub-environments concerned.
    """

    def __init__(self, message: str, indices: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.indices = indices

    def __reduce__(self) -> tuple[type["WorkerError"], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.indices)
