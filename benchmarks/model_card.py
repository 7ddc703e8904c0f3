"""The README of an exported policy, its numbers filled in from the results."""

from pathlib import Path

from result_data import START, Results, read_results
from result_tables import compared, rate

from flowrl.errors import FlowRLError


def model_card(results_folder: Path, model: str, out: Path) -> str:
    """Markdown: what it is, how it was made, its test results beside the start's, and how to repeat them.

    Args:
        results_folder: What `results.py` reads.
        model: The run, which has been evaluated on the test scenes.
        out: The policy folder that the card will lie in, for its commands.

    Raises:
        FlowRLError: the results do not have the run, its test, or the start's.
    """
    results = read_results(results_folder, Path("models/chess-tiny"))
    tests = results.tests.get("test", {})
    if missing := [name for name in (START, model) if name not in tests]:
        raise FlowRLError(
            f"{results_folder}: no test results of {', '.join(missing)}; run `gain.py test` first"
        )
    if model not in results.runs:
        raise FlowRLError(
            f"{results_folder}: no log of {model}; `results.py --save` it from OUT of `gain.py`"
        )
    run, start = results.runs[model], str(results.runs[model].args["flags"]["policy"])
    flags, machine = run.args["flags"], run.args.get("device_name") or "a CPU"
    count, seed = len(tests[START].success), tests[START].seed
    return f"""# {out.name}

`{start}` after {run.episodes:,} training episodes of PPO (`flowrl-train`): {run.iterations} iterations of {flags["episodes"]} episodes, training
seed {flags["train_seed"]}, and the settings in `preset.json`. Only the action expert was trained; vision and language are the start's. The weights are
the last checkpoint's, which was declared before the run{averaged(flags)}.

## Success without exploration noise

{count} test scenes (seed {seed}, index 0-{count - 1}), `--fast --expert-fp32`, on {tests[model].facts.get("device_name") or "a CPU"}; intervals are 95 %
(Wilson for rates, normal for the paired difference), p is McNemar's exact test.

{table(results, model, start)}
## How to repeat it

Trained on {machine}, commit {results.commit or "not recorded"}, as `{model}` of

```bash
python benchmarks/gain.py train 560
```

A comparison on other machines, whose renderer changes single scenes:

```bash
uv run flowrl-eval --policy {out} --versus {start} --seed {seed} --episodes 300 --fast --out runs/eval-{out.name}
```

Licence: Apache-2.0.
"""


def averaged(flags: dict[str, object]) -> str:
    """What the weights are, for the sentence on them."""
    decay = flags.get("average_decay", 0)
    return f" (a moving average, decay {decay})" if decay else ""


def table(results: Results, model: str, start: str) -> str:
    """Rows: the start and the model."""
    tests = results.tests["test"]
    success, difference, p, pairs = compared(tests[model], tests[START])
    rows = (
        ("policy", "success", "difference [points]", "p", "only this / only the start"),
        ("---", "---", "---", "---", "---"),
        (f"`{start}`", rate(tests[START].success), "", "", ""),
        ("this", success, difference, p, pairs),
    )
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)
