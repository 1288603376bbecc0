"""Run folders for tests of what reads them."""

import json
from pathlib import Path
from typing import Any

RECIPE = """run: runs/first
seed: 3
model: {path: models/student}
teachers: {endpoints: [node1:7070], default: teacher}
prompts: {task: addition}
objective: [{name: opd}]
train: {steps: 40, learning_rate: 0.001}
rollout: {prompts_per_step: 8, samples_per_prompt: 2, max_new_tokens: 12}
"""


def step(number: int, **more: Any) -> dict[str, Any]:
    return {
        "step": number,
        "reverse_kl": 1 / number,
        "loss/opd": 0.5 / number,
        "grad_norm": 1.0,
        "response_tokens": 100.0,
        "clipped_share": 0.0,
        "cost/train/sampled_tokens": 100.0,
        "domain_tokens/code": 40.0,
        "domain_tokens/sums": 60.0,
        "seconds": {"rollout": 1.0, "learn": 0.5},
        **more,
    }


def answer(index: int, label: str, length: int = 6) -> dict[str, Any]:
    piece = ["<b>&", -0.7, [["<i>", 0.9], ["x", 0.05]]]
    return {
        "step": 0 if label == "before" else 40,
        "label": label,
        "uid": str(index),
        "prompt": "1 < 2 & 3?",
        "answer": "<b>&" * length,
        "verdict": "correct",
        "kl": 0.4,
        "tokens": length,
        "measure": "reverse_kl",
        "pieces": [["ok", 0.01, [["ok", 0.99]]], ["?", None, []], *[piece] * (length - 2)],
    }


def folder(path: Path, steps: int = 40, samples: list[dict[str, Any]] | None = None) -> Path:
    path.mkdir()
    (path / "recipe.yaml").write_text(RECIPE)
    records = [step(n) for n in range(1, steps + 1)]
    for record in records[9::10]:
        record |= {"eval/accuracy": record["step"] / 50, "eval/accuracy_half_width": 0.1}
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = [answer(i, label) for label in ("before", "after") for i in range(2)] if samples is None else samples
    (path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
