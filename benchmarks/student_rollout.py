"""What refilling slots saves a rollout, against batches that run until their longest row ends.

    python benchmarks/student_rollout.py

A random model of 7 M parameters (width 256, 6 layers, vocabulary 8,192, float32) samples 96 rows whose lengths are
log-normal (4 to 256 tokens, median 32), 32 at a time, by `SlotDecoder` and by `BatchDecoder`, which keeps finished rows
in its batch until they are half of it. Rows come in the same order and from the same random streams. Printed per round:
CPU seconds, forwards, rows in them, and whether both sampled the same ids.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from opd.tasks.prompt import Prompt
from opd_lab.tiny.model import make_model
from opd_lab.tiny.plans import Shape
from student.data.plan import PlannedRow
from student.data.row import RowKey
from student.rollout.batches import BatchDecoder
from student.rollout.requests import Request, RolloutSpec
from student.rollout.slots import SlotDecoder, takes_slots

VOCABULARY = 8192


class Ids:
    """A tokenizer whose texts are numbers."""

    eos_token_id = None

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        """The ids of each text."""
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


def requests(rows: int, spec: RolloutSpec) -> list[Request]:
    """Prompts of 8 to 48 tokens, shortest first as rollouts order them, and lengths that are not known in advance."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(32), 1.0, rows), 4, 256).astype(int)
    sizes = np.sort(rng.integers(8, 49, rows))
    made = []
    for number, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
        prompt = Prompt.make(" ".join(map(str, rng.integers(0, VOCABULARY, size))))
        planned = PlannedRow(RowKey(0, prompt.uid, number), prompt, int(length), 1.0)
        made.append(Request(planned, Ids(), spec, ("rollout",)))  # type: ignore[arg-type]
    return made


def slots(model: Any, asked: Sequence[Request], spec: RolloutSpec) -> None:
    """By slots."""
    SlotDecoder(model, asked, spec).run(lambda index: None)


def batches(model: Any, asked: Sequence[Request], spec: RolloutSpec) -> None:
    """In batches."""
    for start in range(0, len(asked), spec.batch_rows):
        BatchDecoder(model, asked[start : start + spec.batch_rows], spec).run(lambda index: None)


def measure(model: Any, way: Any, rows: int, spec: RolloutSpec) -> tuple[float, int, int, list[list[int]]]:
    """CPU seconds, forwards, rows in forwards, and the ids."""
    asked, seen = requests(rows, spec), [0, 0]

    def count(module: Any, arguments: Any, keywords: Any) -> None:
        ids = keywords.get("input_ids", arguments[0] if arguments else None)
        seen[0] += 1
        seen[1] += len(ids)

    hook = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    begin = time.process_time()
    way(model, asked, spec)
    seconds = time.process_time() - begin
    hook.remove()
    return seconds, seen[0], seen[1], [request.ids for request in asked]


def main() -> None:
    """Run both ways in turn and print a line for each round, then the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model(Shape(256, 6, 8, VOCABULARY), 0)
    spec = RolloutSpec(0, batch_rows=32, candidates=0, valid_vocab=VOCABULARY, max_prompt_tokens=64)
    assert takes_slots(model)  # the trial of slots is made here, not in the first round
    ratios = []
    for _ in range(options.rounds):
        with torch.no_grad():
            refilled = measure(model, slots, options.rows, spec)
            held = measure(model, batches, options.rows, spec)
        ratios.append(held[0] / refilled[0])
        for name, (seconds, forwards, rows, _) in (("slots", refilled), ("batches", held)):
            print(f"{name:8} {seconds:6.2f} s of CPU, {forwards} forwards of {rows} rows together")
        print(f"the same ids: {refilled[3] == held[3]}; batches take {ratios[-1]:.2f} times the CPU", flush=True)
    print(f"median {statistics.median(ratios):.2f} of {options.rounds} rounds, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
