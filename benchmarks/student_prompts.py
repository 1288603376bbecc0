"""What reading a group's prompt once saves the learner, against reading it with each of the group's rows.

    python benchmarks/student_prompts.py                 # the shape of SmolLM2-135M
    python benchmarks/student_prompts.py --layers 6      # the same with few layers

Random weights and ids, one group of 8 rows per step: prompts of 512, 128 and 37 tokens, responses of 256, 64 and 22.
Loss and gradient of `opd` with payload sampled, in float32 on the CPU, with `train.shared_prompts` on and off in turn.
Printed per shape: CPU seconds of both, the median of the ratios within a round, the share of positions that was not
read again, and the relative distance of the two gradients.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from opd.heads import OutputHead
from opd.tasks.prompt import Prompt
from opd.wire.types import PayloadKind, Scores
from student.data.needs import TEACHER, merge
from student.data.row import Row, RowKey
from student.job.plugins import build_terms
from student.learning.learner import Learner
from student.learning.objective import Objective
from student.model.model import Student
from student.settings.train import TrainSettings

SHAPES = [(512, 256), (128, 64), (37, 22)]
VOCABULARY = 49_152


def no_head(role: str, row: Row) -> OutputHead:
    raise NotImplementedError("payload sampled has none")


def learner(*, shared: bool, lm: LlamaForCausalLM) -> Learner:
    objective = Objective(build_terms([{"name": "opd", "payload": "sampled"}]), length_limit=256)
    return Learner(
        Student(lm),
        objective,
        merge([objective.needs()]),
        TrainSettings(shared_prompts=shared, micro_batch_tokens=8192),
        Accelerator(cpu=True),
        valid_vocab=VOCABULARY,
        temperature=1.0,
        head_of=no_head,
    )


def rows(prompt: int, response: int, samples: int) -> list[Row]:
    """A group of rows with the log-probs of an invented teacher."""
    rng, text = np.random.default_rng(0), Prompt.make("?")
    ids = rng.integers(0, VOCABULARY, prompt).astype(np.uint32)
    made = []
    for sample in range(samples):
        row = Row(
            key=RowKey(0, text.uid, sample),
            prompt=text,
            prompt_ids=ids,
            response_ids=rng.integers(0, VOCABULARY, response).astype(np.uint32),
            behaviour_logp=np.full(response, -10.0, np.float32),
            policy_version=np.zeros(response, np.int32),
            loss_mask=np.ones(response, np.bool_),
            truncated=False,
            text="",
        )
        row.signals[TEACHER, PayloadKind.SAMPLED] = Scores(sampled=rng.normal(-10.0, 1.0, response).astype(np.float32))
        made.append(row)
    return made


def gradient(one: Learner, batch: list[Row]) -> tuple[float, torch.Tensor, float]:
    """CPU seconds, the gradient, and the share of positions that was not read again."""
    one.optimizer.zero_grad(set_to_none=True)
    begin = time.process_time()
    found = one.accumulate(batch) or {}
    seconds = time.process_time() - begin
    top, bottom = found.get("positions_shared", (0.0, 1.0))
    return (
        seconds,
        torch.cat([p.grad.flatten() for p in one.student.lm.parameters() if p.grad is not None]),
        top / bottom,
    )


def main() -> None:
    """Print a line per shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lm = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=options.layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
        )
    )
    both = {shared: learner(shared=shared, lm=lm) for shared in (False, True)}
    for prompt, response in SHAPES:
        batch = rows(prompt, response, options.samples)
        found = [{shared: gradient(one, batch) for shared, one in both.items()} for _ in range(options.rounds)]
        whole, shared = found[-1][False][1], found[-1][True][1]
        seconds = {way: statistics.median(one[way][0] for one in found) for way in both}
        ratio = statistics.median(one[False][0] / one[True][0] for one in found)
        print(
            f"{options.samples} samples, prompt {prompt}, response {response}: whole {seconds[False]:.2f} s, shared "
            f"{seconds[True]:.2f} s of CPU, {ratio:.2f} times as fast, {found[-1][True][2]:.0%} not read again, "
            f"gradients {float((whole - shared).norm() / whole.norm()):.1e} apart",
            flush=True,
        )


if __name__ == "__main__":
    main()
