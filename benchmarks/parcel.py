"""Results of `gain.py` in few files that are small enough to carry: archives in parts, policies as their difference to the start."""

import hashlib
import io
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

PART_BYTES = 15_000_000
ARCHIVE = "gain.tar.gz"
WEIGHTS, CHANGED, DIGEST = "model.safetensors", "changed.safetensors", "weights.sha256"
RESULT_FILES = ("log.jsonl", "args.json", "eval_results.json", "clone.json", "filtered_cloning.json")


def pack_gain(out: Path, dest: Path, start: str) -> None:
    """Packs logs, results, final policies, and what unfinished runs go on from, into `dest`/gain.tar.gz.00, .01, ..."""
    files = {path: path.relative_to(out) for name in RESULT_FILES for path in sorted(out.rglob(name))}
    files |= {path: path.relative_to(out) for path in (out / "logs").glob("*.log")}
    files |= {path: path.relative_to(out) for path in out.glob("*.jsonl")}
    policies = sorted(path for path in (out / "final").glob("*") if (path / WEIGHTS).is_file())
    policies += unfinished_runs(out)
    with tempfile.TemporaryDirectory() as scratch:
        for number, policy in enumerate(policies):
            changed = Path(scratch) / str(number)
            changed.mkdir()
            write_difference(Path(start), policy, changed)
            small = [path for path in policy.rglob("*") if path.is_file() and path.name != WEIGHTS]
            files |= {path: path.relative_to(out) for path in small}
            files |= {path: policy.relative_to(out) / path.name for path in changed.iterdir()}
        write_parts(files, dest / ARCHIVE)
    for path in sorted(dest.glob(f"{ARCHIVE}.*")):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    print(
        f"packed {len(files)} files; policies: {', '.join(str(p.relative_to(out)) for p in policies) or 'none'}"
    )


def unfinished_runs(out: Path) -> list[Path]:
    """Last checkpoints of runs that are to go on: neither exported nor, as an ablation, evaluated."""
    return sorted(
        path.parent
        for path in out.glob(f"runs/*/last/{WEIGHTS}")
        if not (out / "final" / path.parts[-3]).is_dir()
        and not (out / "validation" / path.parts[-3] / "eval_results.json").is_file()
    )


def unpack_gain(dest: Path, out: Path, start: str) -> None:
    """The contrary of `pack_gain`, into OUT; a policy whose weights do not come out as packed is refused.

    What OUT's records (stages.jsonl, jobs.jsonl) tell of other machines stays in them.
    """
    before = {path: path.read_text().splitlines() for path in out.glob("*.jsonl")}
    read_parts(dest / ARCHIVE, out)
    for path, lines in before.items():
        lines += [line for line in path.read_text().splitlines() if line not in lines]
        path.write_text("".join(f"{line}\n" for line in lines))
    for changed in sorted(out.rglob(CHANGED)):
        rebuild(Path(start), changed.parent)
        print(f"{changed.parent}")


def write_parts(files: dict[Path, Path], archive: Path) -> None:
    """A compressed archive of the files, by their names in it, cut into parts `<archive>.00`, `.01`, ... of PART_BYTES."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        for path, name in files.items():
            tar.add(path, arcname=str(name))
    for old in archive.parent.glob(f"{archive.name}.*"):
        old.unlink()
    data = buffer.getvalue()
    for number, first in enumerate(range(0, len(data), PART_BYTES)):
        archive.with_name(f"{archive.name}.{number:02d}").write_bytes(data[first : first + PART_BYTES])


def read_parts(archive: Path, out: Path) -> None:
    """Unpacks what `write_parts` wrote.

    Raises:
        SystemExit: no part there.
    """
    parts = sorted(archive.parent.glob(f"{archive.name}.*"))
    if not parts:
        raise SystemExit(f"error: {archive}.00 is missing; give the folder that `collect` wrote")
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(b"".join(path.read_bytes() for path in parts))) as tar:
        tar.extractall(out, filter="data")


def write_difference(start: Path, policy: Path, dest: Path) -> int:
    """Writes the tensors of `policy` that are not the start's, bit for bit, and a digest of all; returns how many they are."""
    from safetensors.torch import load_file, save_file

    before, after = load_file(start / WEIGHTS), load_file(policy / WEIGHTS)
    changed = {name: after[name] for name in different(start, policy)}
    save_file(changed, dest / CHANGED, {"format": "pt"})
    (dest / DIGEST).write_text(digest(after.items()) + "\n")
    assert set(before) == set(after), "checked by `different`"
    return len(changed)


def rebuild(start: Path, policy: Path) -> None:
    """Makes model.safetensors of `policy` from the start's and its difference.

    Raises:
        SystemExit: the start is another one than the policy was packed with.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    tensors = load_file(start / WEIGHTS) | load_file(policy / CHANGED)
    if digest(tensors.items()) != (policy / DIGEST).read_text().strip():
        raise SystemExit(f"error: {policy}: was packed with other weights than {start} as its start")
    with safe_open(start / WEIGHTS, "pt") as file:
        metadata = file.metadata()
    save_file(tensors, policy / WEIGHTS, metadata)
    for name in (CHANGED, DIGEST):
        (policy / name).unlink()


def different(start: Path, policy: Path) -> list[str]:
    """Names of the tensors of two policies of the same architecture that are not equal in every bit.

    Raises:
        ValueError: other tensors, shapes or dtypes.
    """
    from safetensors.torch import load_file

    before, after = load_file(start / WEIGHTS), load_file(policy / WEIGHTS)
    shapes = [
        {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} for state in (before, after)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{policy} has other tensors than {start}")
    return sorted(name for name in after if digest([("", after[name])]) != digest([("", before[name])]))


def digest(tensors: Iterable[tuple[str, object]]) -> str:
    """SHA-256 of names and bytes, in the order of the names."""
    import torch

    total = hashlib.sha256()
    for name, tensor in sorted(tensors):
        assert isinstance(tensor, torch.Tensor)
        total.update(name.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
