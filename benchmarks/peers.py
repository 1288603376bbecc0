"""A step of on-policy distillation against TRL's: the same models, prompts, batch, optimizer, float32, one thread.

    make bench-peers
    python benchmarks/peers.py --world mid --rounds 2 --steps 7
    python benchmarks/peers.py --sides TRL "opd gather" --rounds 1 --cores 1
    python benchmarks/peers.py --sides "opd self served" "opd self local"

TRL's `DistillationTrainer` has the teacher in its own process and computes the exact reverse KL (beta 1), with neither
gradient checkpointing nor logging nor checkpoints. opd asks a teacher server in a process of its own, for the ids of
`gather` and for `hidden` states (exact, as TRL's). `opd batched` asks for gather of a server without `--deterministic`.
Two sides show what the server costs; their teacher is the initial student. `opd self served` asks a server for its
scores, `opd self local` keeps it in its process (`reference: initial`); both ask for gather.

World tiny: the trained test world, prompts of additions, 12 new tokens at most; the trained student is measured
against the teacher, exactly, on its own sampled answers to 128 prompts that no side trained on. World mid: random
models of 23 and 41 M parameters, 32,768 ids, 32 new tokens. Every side of a round runs in a process of its own, one
after the other. A step is the time from one update's end to the next's; the first steps and the start are left out.
CPU seconds are the student's process and the server's, all threads. Ratios are TRL's over ours within a round, with
the lowest and the highest: above 1, opd is the faster; without TRL they are the first side's. `--cores 1` binds all
processes of a side to one core, where nothing runs in parallel.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from opd.config import parse_settings
from student.data.report import StepReport
from student.plugin.controllers import Controller, ControllerSettings
from student.settings.recipe import Recipe

WARM = 3
"""Steps that are left out."""
SIDES = ("TRL", "opd gather", "opd hidden", "opd batched", "opd self served", "opd self local")
BATCH, LEARNING_RATE = 32, 1e-4
NEW_TOKENS = {"tiny": 12, "mid": 32}
MICRO_BATCH = {"tiny": 16_384, "mid": 360}
"""Tokens of one of our micro-batches: those of world mid are learnt from while the teacher scores the others."""
KEPT = {"tiny": 8, "mid": 64}
HELD_OUT = 128
"""Prompts of world tiny on which the trained student is measured."""


class Marks:
    """Time, and CPU time of this process and its children, after each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.tokens: list[float] = []

    def mark(self, tokens: float) -> None:
        """A step has ended; `tokens` is the mean length of its answers."""
        own = psutil.Process()
        busy = [process.cpu_times() for process in [own, *own.children(recursive=True)]]
        self.steps.append((time.monotonic(), sum(one.user + one.system for one in busy)))
        self.tokens.append(tokens)

    def figures(self) -> dict[str, float]:
        """Seconds and CPU seconds of a step, and tokens of an answer."""
        steps = self.steps[WARM:]
        seconds = statistics.median(b[0] - a[0] for a, b in pairwise(steps))
        cpu = (steps[-1][1] - steps[0][1]) / (len(steps) - 1)
        return {"seconds": seconds, "cpu": cpu, "tokens": statistics.mean(self.tokens[WARM:])}


MARKS = Marks()


class MarkStep(Controller):
    """Marks the end of each step."""

    settings_type = ControllerSettings

    def observe(self, report: StepReport) -> None:
        MARKS.mark(statistics.mean(outcome.length for outcome in report.outcomes))


def run_opd(world: Path, name: str, side: str, steps: int, scratch: Path) -> Path:
    """Whole `opd train`, with a server of its own unless it is local; returns the trained model's folder."""
    from student.job.session import train
    from student.run.local_server import CPU, served

    kind = side.removeprefix("opd ")
    flags = CPU if kind != "batched" else tuple(flag for flag in CPU if flag != "--deterministic")
    payload = "hidden" if kind == "hidden" else "gather"
    teacher = world / ("student" if kind == "self served" else "teacher")
    with ExitStack() as stack:
        teachers: dict[str, Any] = {"reference": "initial"}
        if kind != "self local":
            address = stack.enter_context(served({"teacher": teacher}, scratch / "server", flags))
            teachers = {"endpoints": [address], "default": "teacher"}
        recipe = {
            "run": str(scratch / "run"),
            "model": {"path": str(world / "student")},
            "teachers": teachers,
            "prompts": {"file": str(world / "prompts.jsonl"), "heldout": 0},
            "rollout": {"prompts_per_step": BATCH, "max_new_tokens": NEW_TOKENS[name], "max_prompt_tokens": 32},
            "objective": [
                {"name": "opd", "payload": payload}
                | ({"k": KEPT[name]} if payload == "gather" else {})
                | ({"role": "initial"} if kind == "self local" else {}),
            ],
            "methods": [{"name": "peers:MarkStep"}],
            "train": {
                "steps": steps,
                "threads": 1,
                "learning_rate": LEARNING_RATE,
                "micro_batch_tokens": MICRO_BATCH[name],
            },
            "eval": {"prompts": 0},
            "samples": {"every": 0},
        }
        return Path(train(parse_settings(Recipe, recipe))["checkpoint"]) / "model"


def run_trl(world: Path, name: str, steps: int, scratch: Path) -> Path:
    """TRL's trainer with the teacher in its process; returns the trained model's folder."""
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    torch.set_num_threads(1)

    class Mark(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            lengths = trainer._metrics["train"].get("completions/mean_length", [0.0])
            MARKS.mark(float(lengths[-1]))

    options = DistillationConfig(
        output_dir=str(scratch / "run"),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_completion_length=NEW_TOKENS[name],
        temperature=1.0,
        beta=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(world / "student", padding_side="left")
    trainer = DistillationTrainer(
        model=str(world / "student"),
        teacher_model=str(world / "teacher"),
        args=options,
        train_dataset=load_dataset("json", data_files=str(world / "prompts.jsonl"), split="train"),
        processing_class=tokenizer,
        callbacks=[Mark()],
    )
    trainer.train()
    trainer.save_model(str(scratch / "trained"))
    return scratch / "trained"


def held_out_kl(world: Path, trained: Path) -> float:
    """KL(student || teacher) in nats per token of the student's sampled answers, exact; plain transformers, seed 0."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world / "student", padding_side="left")
    student, teacher = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (trained, world / "teacher"))
    lines = (world / "heldout.jsonl").read_text().splitlines()[:HELD_OUT]
    prompts = tokenizer([json.loads(line)["prompt"] for line in lines], return_tensors="pt", padding=True)
    width = prompts["input_ids"].shape[1]
    torch.manual_seed(0)
    with torch.no_grad():
        ids = student.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS["tiny"])
        answers = ids[:, width:]
        ended = (answers == tokenizer.eos_token_id).cumsum(1)
        live = (ended == 0) | ((ended == 1) & (answers == tokenizer.eos_token_id))
        seen = torch.cat([prompts["attention_mask"], live.long()], 1)
        places = (seen.cumsum(1) - 1).clamp(min=0)
        p, q = (
            model(ids, attention_mask=seen, position_ids=places).logits[:, width - 1 : -1].double().log_softmax(-1)
            for model in (student, teacher)
        )
        return float((p.exp() * (p - q)).sum(-1)[live].mean())


def one_side(options: argparse.Namespace) -> None:
    """One side in this process; prints its figures as JSON."""
    if options.cores:
        psutil.Process().cpu_affinity(list(range(options.cores)))
    with tempfile.TemporaryDirectory() as scratch:
        if options.side == "TRL":
            trained = run_trl(options.folder, options.world, options.steps, Path(scratch))
        else:
            trained = run_opd(options.folder, options.world, options.side, options.steps, Path(scratch))
        figures = MARKS.figures()
        if options.world == "tiny":
            figures["kl"] = held_out_kl(options.folder, trained)
    print(json.dumps(figures))


def make_world(name: str, folder: Path) -> Path:
    """Models and prompts."""
    from student_overlap import mid_world

    from opd_lab.tiny.build import build_world

    build_world(folder / "tiny", "test", seed=0)
    world = folder / "tiny" if name == "tiny" else mid_world(folder / "tiny", folder / "mid")
    lines: dict[str, list[str]] = {"prompts": [], "heldout": []}
    for a in range(10, 100):
        for b in range(10, 100):
            lines["heldout" if (a + b) % 8 == 0 else "prompts"].append(json.dumps({"prompt": f"{a}+{b}="}))
    for kind, found in lines.items():
        (world / f"{kind}.jsonl").write_text("\n".join(found) + "\n")
    return world


def measure(world: Path, side: str, options: argparse.Namespace) -> dict[str, float]:
    """The figures of a side, from a process of its own."""
    named = ["--side", side, "--world", options.world, "--steps", str(options.steps), "--folder", str(world)]
    named += ["--cores", str(options.cores)]
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, __file__, *named], check=False, env=here, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Run all sides in turn, round after round, and print medians, and ratios with their spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=list(NEW_TOKENS), default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=23)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES[:4])
    parser.add_argument("--cores", type=int, default=0, help="number of cores that a side may use; 0 means all")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        one_side(options)
        return
    with tempfile.TemporaryDirectory() as scratch:
        world = make_world(options.world, Path(scratch))
        rounds = [{side: measure(world, side, options) for side in options.sides} for _ in range(options.rounds)]
    print(f"world {options.world}, load {os.getloadavg()[0]:.0f}; medians of {options.rounds} rounds")
    for side in options.sides:
        step, cpu, tokens = (
            statistics.median(one[side][what] for one in rounds) for what in ("seconds", "cpu", "tokens")
        )
        line = f"{side:12} {step:7.3f} s, {cpu:7.3f} CPU s a step, {tokens:4.1f} tokens an answer"
        if options.world == "tiny":
            line += f", held-out KL {statistics.median(one[side]['kl'] for one in rounds):.3f}"
        base = "TRL" if "TRL" in options.sides else options.sides[0]
        for what, label in ("seconds", "speed"), ("cpu", "CPU"):
            ratios = sorted(one[base][what] / one[side][what] for one in rounds)
            line += f"; {label} {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(line)


if __name__ == "__main__":
    sys.modules["peers"] = sys.modules["__main__"]
    main()
