"""The times that `opd plan` predicts for a step's stages, against those measured on this machine.

    python benchmarks/student_plan.py

Whole runs of `opd train` without teachers (term `sft` on the student's own rows), with random models of three shapes
and one thread. Measured are processor seconds of the stages, median of the steps after the first two; planned are those
of `opd plan --hardware here` for responses as long as the run's. Such a plan measures the machine's speed with a matrix
product.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from transformers import AutoTokenizer

from opd.config import parse_settings
from opd_lab.tiny.build import build_world
from opd_lab.tiny.model import make_model
from opd_lab.tiny.plans import Shape
from student.job.plugins import build_plugins
from student.job.session import train
from student.settings.recipe import Recipe
from student.sizing.hardware import here
from student.sizing.shape import ModelShape
from student.sizing.times import times_of

WARM = 2
"""Steps that are left out."""
CASES: dict[str, tuple[Shape, int, int]] = {
    "narrow, many rows": (Shape(128, 4, 4, 2048), 64, 48),
    "long answers": (Shape(256, 6, 8, 8192), 8, 256),
    "large vocabulary": (Shape(384, 6, 6, 32_768), 16, 32),
}
"""Shape (width, layers, heads, ids), rows of a step, tokens of a row."""


def model(folder: Path, shape: Shape, tokenizer: Path) -> Path:
    """A random model that never ends by itself, with the ids of a tiny world's tokenizer and many more."""
    made = AutoTokenizer.from_pretrained(tokenizer)
    made.add_tokens([f"<{number}>" for number in range(shape.vocabulary - len(made))])
    make_model(shape, 0).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def recipe(run: Path, path: Path, rows: int, tokens: int, steps: int) -> Recipe:
    return parse_settings(
        Recipe,
        {
            "run": str(run),
            "model": {"path": str(path)},
            "prompts": {"task": "addition", "options": {"digits": 2}},
            "rollout": {
                "prompts_per_step": rows,
                "max_new_tokens": tokens,
                "max_prompt_tokens": 16,
                "batch_rows": rows,
            },
            "objective": [{"name": "sft", "rows": "all"}],
            "train": {"steps": steps, "threads": 1, "mixed_precision": "no"},
            "eval": {"prompts": 0},
            "samples": {"every": 0},
        },
    )


def measured(one: Recipe) -> tuple[dict[str, float], float]:
    """Processor seconds of the stages, medians, and the mean length of the responses."""
    # Nothing waits for another process here.
    with mock.patch("student.report.telemetry.time", SimpleNamespace(monotonic=time.process_time)):
        train(one)
    lines = [json.loads(line) for line in (one.run / "metrics.jsonl").read_text().splitlines()][WARM:]
    stages = {name: [line["seconds"][name] for line in lines] for name in ("rollout", "learn")}
    length = statistics.mean(line["response_length"] for line in lines)
    return {name: statistics.median(values) for name, values in stages.items()}, length


def main() -> None:
    """Run each case in turn, round after round, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ratios: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        world = Path(scratch) / "world"
        build_world(world, "test", seed=0)
        paths = {name: model(Path(scratch) / name, case[0], world / "student") for name, case in CASES.items()}
        for number in range(options.rounds):
            for name, (_, rows, tokens) in CASES.items():
                one = recipe(Path(scratch) / f"run-{name}-{number}", paths[name], rows, tokens, options.steps)
                found, length = measured(one)
                shape, needs = ModelShape(one.model), build_plugins(one).needs
                planned = times_of(one, shape, needs, here(), mean=length, ranks=1).stages
                for stage, seconds in found.items():
                    ratios.setdefault((name, stage), []).append(planned[stage] / seconds)
                    print(
                        f"{name}: {stage} {seconds:.3f} s, planned {planned[stage]:.3f} s ({length:.0f} tokens a row)",
                        flush=True,
                    )
    for (name, stage), values in ratios.items():
        low, high = min(values), max(values)
        print(f"{name}, {stage}: planned {statistics.median(values):.2f} of measured, {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
