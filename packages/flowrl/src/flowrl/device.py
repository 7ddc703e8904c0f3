"""Where the policy runs, and torch's settings there."""

import torch

from flowrl.errors import FlowRLError


def prepare_torch(device: str, num_threads: int) -> torch.device:
    """Chooses the device and sets what likelihoods depend on: float32 products in float32, never TF32.

    Raises:
        FlowRLError: CUDA is asked for and not there.
    """
    torch.set_num_threads(num_threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        number = int(device.partition(":")[2] or 0)
        if not torch.cuda.is_available() or number >= torch.cuda.device_count():
            raise FlowRLError(
                f"--device {device}: torch sees {torch.cuda.device_count()} CUDA devices here; use --device cpu or auto"
            )
    return torch.device(device)
