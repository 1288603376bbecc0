"""A short distillation from a served teacher: tokens per second, the teacher's share, MFU, and what `opd plan` said.

    python benchmarks/student_job.py --json job.json   # on a GPU: 2B parameters from 8B, 64 rows of 256 + 512 tokens
    python benchmarks/student_job.py --reduced         # tiny models and few rows, in seconds

A whole run of `opd train` (`opd` on gather) on random weights of Qwen3's architecture, with a teacher server in a
process of its own on the same device. A step is the wall-clock time from the end of one to the end of the next; figures
are medians of the steps after the first. The teacher's time is how long its engine was busy, by its own counter. MFU
counts two operations per weight of the layers for each token and per weight of the head for each response token, three
times as many in learning, and no attention, over the device's peak (student/sizing/hardware.py; measured on a CPU).
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from engines_race import LARGE

from opd.config import parse_settings
from opd_lab.tiny.tokenizer import make_tokenizer
from student.data.report import StepReport
from student.job.plugins import build_plugins
from student.job.session import train
from student.plugin.controllers import Controller, ControllerSettings
from student.run.local_server import CPU, served
from student.settings.model import ModelSettings
from student.settings.recipe import Recipe
from student.sizing.hardware import Hardware, here
from student.sizing.plan import shape_of
from student.sizing.shape import ModelShape
from student.sizing.teachers import Fleet
from student.sizing.times import times_of
from support.models import save_model

K = 64


@dataclass(frozen=True)
class Size:
    """A job: shapes of both models, and of a step.

    Attributes:
        student: sizes in its config.
        teacher: sizes in its config, with the same vocabulary.
        prompts: per step.
        samples: per prompt.
        prompt: tokens.
        response: tokens, unless the response ends earlier.
        micro_batch: `train.micro_batch_tokens`.
        steps: of the run.
    """

    student: Mapping[str, int]
    teacher: Mapping[str, int]
    prompts: int
    samples: int
    prompt: int
    response: int
    micro_batch: int
    steps: int


def shape(width: int, layers: int, heads: int, ids: int, head_dim: int = 64) -> dict[str, int]:
    """Sizes of a config whose MLP is three times as wide and which has half as many key-value heads."""
    return {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head_dim,
        "vocab_size": ids,
    }


SIZES = {
    "gpu": Size(shape(2048, 28, 16, LARGE["vocab_size"], 128), LARGE, 16, 4, 256, 512, 4096, 6),
    "cpu": Size(shape(384, 6, 6, 32_768), shape(512, 8, 8, 32_768), 8, 2, 32, 64, 2048, 6),
    "reduced": Size(shape(64, 2, 2, 1024, 32), shape(128, 2, 4, 1024, 32), 2, 2, 8, 12, 512, 4),
}


@dataclass
class Marks:
    """When each step ended, and how long the teacher's engine had been busy by then, seconds."""

    metrics: str = ""
    ends: list[tuple[float, float]] = field(default_factory=list)

    def mark(self) -> None:
        """A step has ended."""
        with urllib.request.urlopen(self.metrics) as page:
            lines = page.read().decode().splitlines()
        busy = [line for line in lines if line.startswith("opd_teacher_engine_busy_seconds_total{")]
        self.ends.append((time.perf_counter(), sum(float(line.rsplit(" ", 1)[1]) for line in busy)))


MARKS = Marks()


class MarkStep(Controller):
    """Marks the end of each step."""

    settings_type = ControllerSettings

    def observe(self, report: StepReport) -> None:
        MARKS.mark()


def make_models(folder: Path, size: Size) -> None:
    """Folders `student`, in float32, and `teacher`, with one tokenizer most of whose ids no text encodes to."""
    on_gpu = torch.cuda.is_available()
    for name, sizes, dtype in (
        ("student", size.student, torch.float32),
        ("teacher", size.teacher, torch.bfloat16 if on_gpu else torch.float32),
    ):
        save_model(folder / name, dict(sizes), dtype)
        make_tokenizer(max_length=4096).save_pretrained(folder / name)
        path = folder / name / "tokenizer.json"
        made = json.loads(path.read_text())
        known = made["model"]["vocab"]
        known |= {f"<{number}>": number for number in range(len(known), sizes["vocab_size"])}
        path.write_text(json.dumps(made))
    if on_gpu:
        torch.cuda.empty_cache()  # the teacher's process needs the memory
    lines = (json.dumps({"prompt": f"{number:0{size.prompt}}"}) for number in range(size.prompts * size.steps))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def recipe(folder: Path, address: str, size: Size) -> Recipe:
    """The job."""
    return parse_settings(
        Recipe,
        {
            "run": str(folder / "run"),
            "model": {"path": str(folder / "student"), "gradient_checkpointing": size is SIZES["gpu"]},
            "teachers": {"endpoints": [address], "default": "teacher"},
            "prompts": {"file": str(folder / "prompts.jsonl"), "heldout": 0},
            "rollout": {
                "prompts_per_step": size.prompts,
                "samples_per_prompt": size.samples,
                "max_new_tokens": size.response,
                "max_prompt_tokens": 2 * size.prompt,
            },
            "objective": [{"name": "opd", "payload": "gather", "k": K}],
            "methods": [{"name": "student_job:MarkStep"}],
            "train": {"steps": size.steps, "micro_batch_tokens": size.micro_batch},
            "eval": {"prompts": 0},
            "samples": {"every": 0},
        },
    )


def measure(folder: Path, size: Size) -> tuple[Recipe, list[dict[str, Any]]]:
    """Run the job; returns seconds, stages, the teacher's seconds and response tokens of each step after the first."""
    device = ("--device", "cuda", "--dtype", "bf16") if torch.cuda.is_available() else CPU
    with served({"teacher": folder / "teacher"}, folder / "server", (*device, "--metrics-port", "0")) as address:
        port = (folder / "server" / "server.ports").read_text().split()[1]
        MARKS.metrics = f"http://127.0.0.1:{port}/metrics"
        job = recipe(folder, address, size)
        train(job)
    lines = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    return job, [
        {"seconds": end - begin, "stages": line["seconds"], "teacher": busy - before, "tokens": line["response_tokens"]}
        for ((begin, before), (end, busy)), line in zip(pairwise(MARKS.ends), lines[1:], strict=True)
    ]


def operations(of: ModelShape, tokens: float, responses: float) -> float:
    """Operations of a forward pass: two per weight and token, those of the head for response tokens alone."""
    return 2 * ((of.total - of.outside) * tokens + of.vocabulary * of.hidden * responses)


def figures(
    job: Recipe, teacher_folder: Path, size: Size, steps: list[dict[str, Any]], device: Hardware
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """What the job reached, and the planned and measured time of each stage."""

    def median(value: Any) -> float:
        return statistics.median(value(step) for step in steps)

    seconds, teacher = median(lambda step: step["seconds"]), median(lambda step: step["teacher"])
    responses, rows = median(lambda step: step["tokens"]), size.prompts * size.samples
    tokens, read = rows * size.prompt + responses, size.prompts * size.prompt + responses
    student, asked = shape_of(job, device), ModelShape(ModelSettings(path=str(teacher_folder)))
    learn = median(lambda step: step["stages"]["learn"])
    learning = 3 * operations(student, tokens, responses)
    whole = learning + operations(student, read, responses) + operations(asked, tokens, responses)
    fleet = Fleet({"": asked}, device)
    planned = times_of(job, student, build_plugins(job).needs, device, mean=responses / rows, ranks=1, fleet=fleet)
    measured = {"rollout": median(lambda step: step["stages"]["rollout"]), "learn": learn, "teachers": teacher}
    reached = {
        "step_seconds": seconds,
        "response_tokens_per_second": responses / seconds,
        "teacher_seconds": teacher,
        "teacher_share": teacher / seconds,
        "wait_share": median(lambda step: step["stages"].get("wait_teacher", 0.0)) / seconds,
        "mfu": whole / seconds / device.flops,
        "learn_mfu": learning / learn / device.flops,
    }
    return reached, [
        {"stage": name, "planned_seconds": value, "seconds": measured[name], "ratio": value / measured[name]}
        for name, value in planned.stages.items()
    ]


def check_space(folder: Path) -> None:
    """Exit with a sentence if the checkpoint that the run ends with, weights and two moments, does not fit the disk."""
    needed = 3 * sum(file.stat().st_size for file in (folder / "student").iterdir())
    if (free := shutil.disk_usage(folder).free) < needed:
        sys.exit(f"{folder} has {free / 2**30:.0f} GiB left, but the run's checkpoint takes {needed / 2**30:.0f}.")


def main() -> None:
    """Run the job, print its figures and the plan's, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="use tiny models and few rows")
    parser.add_argument("--json", type=Path, default=None, help="file to write the figures to as well")
    options = parser.parse_args()
    size = SIZES["reduced" if options.reduced else "gpu" if torch.cuda.is_available() else "cpu"]
    device = here()
    with tempfile.TemporaryDirectory() as scratch:
        make_models(Path(scratch), size)
        check_space(Path(scratch))
        job, steps = measure(Path(scratch), size)
        reached, plan = figures(job, Path(scratch) / "teacher", size, steps, device)
    print(f"{device.name}; {size.prompts} x {size.samples} rows of {size.prompt} + {size.response} tokens, gather {K}")
    for name, value in reached.items():
        print(f"{name:28} {value:.4g}")
    for line in plan:
        print(f"{line['stage']}: planned {line['planned_seconds']:.4g} s, took {line['seconds']:.4g} s")
    if options.json:
        step = {"prompts": size.prompts, "samples": size.samples, "prompt": size.prompt, "response": size.response}
        told = {"device": device.name, "peak_flops": device.flops, "payload": f"gather {K}", "step": step}
        models = {"student": dict(size.student), "teacher": dict(size.teacher)}
        options.json.write_text(json.dumps({"shape": told | models, "figures": [reached], "plan": plan}, indent=1))


if __name__ == "__main__":
    sys.modules["student_job"] = sys.modules["__main__"]
    main()
