"""On-policy distillation in one file: sample, ask the fleet, loss, step.

    make demo                                              # once: it leaves its tiny models in runs/demo/world-0
    opd serve --model teacher=runs/demo/world-0/teacher --port 7070
    python examples/one_file.py runs/demo/world-0/student 127.0.0.1:7070

This is what `opd train` does with the default objective, in the same order, but for all that makes a job out of it:
many GPUs, sampling ahead, lost servers, checkpoints that resume bit for bit, evaluations, reports. The student writes
an answer to each prompt. For each of its tokens, the teacher gives its log-probs of the sixteen that the student
found likeliest. The loss is the reverse KL, KL(student || teacher): those sixteen are summed exactly, and the rest is
estimated from the token that was sampled.

Shapes: B rows, P prompt tokens (padded on the left), T response tokens (padded on the right), V ids, K candidates.
"""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import opd
from opd.kv_cache import kept_by, reading
from opd.maths import head_tail_reverse_kl
from opd.tasks import Prompt, TaskSettings, build_prompts, encode_prompt

K = 16
"""Candidates per token: ids at which the teacher's log-probs are asked for."""


@dataclass
class Rows:
    """Responses of the student to a batch of prompts.

    Attributes:
        ids: [B, P + T] prompts and responses.
        read: [B, P + T] True where a token is one, False where it is padding.
        trained: [B, T] True for the tokens of a response, its stop token included.
        candidates: [B, T, K] the likeliest ids of the student at each token, before it was drawn.
        texts: the responses without their stop tokens.
    """

    ids: Tensor
    read: Tensor
    trained: Tensor
    candidates: Tensor
    texts: list[str]


@torch.no_grad()
def sample(student: PreTrainedModel, tokenizer, prompts: list[Prompt], max_new_tokens: int) -> Rows:
    """One response to each prompt, at temperature 1: what the student learns from must be what it would write."""
    encoded = [encode_prompt(prompt, tokenizer) for prompt in prompts]
    width = max(map(len, encoded))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in encoded])
    read = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in encoded])
    running = torch.ones(len(prompts), dtype=torch.bool)
    trained, candidates = [], []
    cache, step = None, ids
    for _ in range(max_new_tokens):
        positions = (read.long().cumsum(-1) - 1).clamp(min=0)[:, -step.shape[1] :]
        out = student(step, attention_mask=read, position_ids=positions, logits_to_keep=1, **reading(student, cache))
        cache, logits = kept_by(out), out.logits[:, -1, : len(tokenizer)].float()
        candidates.append(logits.topk(K).indices)
        drawn = torch.multinomial(logits.softmax(-1), 1)
        step = torch.where(running[:, None], drawn, tokenizer.pad_token_id)
        ids, read = torch.cat((ids, step), 1), torch.cat((read, running[:, None]), 1)
        trained.append(running)
        running = running & (step[:, 0] != tokenizer.eos_token_id)
        if not running.any():
            break
    kept = torch.stack(trained, 1)
    texts = [
        tokenizer.decode(row[mask], skip_special_tokens=True) for row, mask in zip(ids[:, width:], kept, strict=True)
    ]
    return Rows(ids, read, kept, torch.stack(candidates, 1), texts)


def ask(fleet: opd.TeacherFleet, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """The teacher's log-probs at the candidates [B, T, K], of the sampled tokens [B, T], and of all the rest [B, T]."""
    items = []
    for ids, read, trained, candidates in zip(rows.ids, rows.read, rows.trained, rows.candidates, strict=True):
        count = int(trained.sum())
        tokens = ids[read].numpy().astype(np.uint32)
        items.append(opd.ScoreItem(tokens, len(tokens) - count, candidates[:count].numpy().astype(np.uint32)))
    values, sampled, tail = (
        torch.zeros(rows.candidates.shape),
        torch.zeros(rows.trained.shape),
        torch.zeros(rows.trained.shape),
    )
    for row, scores in enumerate(fleet.score("teacher", items, opd.PayloadSpec.gather(K))):
        count = scores.sampled.shape[0]
        values[row, :count] = torch.from_numpy(scores.values.astype(np.float32))
        sampled[row, :count] = torch.from_numpy(scores.sampled)
        tail[row, :count] = torch.from_numpy(scores.log_tail)
    return values, sampled, tail


def loss_of(student: PreTrainedModel, vocabulary: int, rows: Rows, teacher: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Mean reverse KL per response token, in nats; its gradient is unbiased."""
    values, sampled, tail = teacher
    count = rows.trained.shape[1]
    positions = (rows.read.long().cumsum(-1) - 1).clamp(min=0)
    out = student(rows.ids, attention_mask=rows.read, position_ids=positions, logits_to_keep=count + 1, use_cache=False)
    logits = out.logits[:, :-1, :vocabulary]  # the logits at a token predict the next one
    written = rows.ids[:, -count:]
    return head_tail_reverse_kl(logits, written, rows.candidates, values, sampled, tail, mask=rows.trained).mean


def main() -> None:
    """Distil, and print the loss and the share of right answers on the way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("student", help="folder of the student's model")
    parser.add_argument("teacher", help="address HOST:PORT of opd serve, with a teacher named teacher")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", help="folder for the trained model")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more than one only slows a model of this size
    tokenizer = AutoTokenizer.from_pretrained(options.student)
    student = AutoModelForCausalLM.from_pretrained(options.student, dtype=torch.float32).eval()  # eval: no dropout
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0)
    source = build_prompts(TaskSettings(task="addition", options={"digits": 2}), seed=0)
    with opd.TeacherFleet.connect(options.teacher) as fleet:
        for step in range(options.steps):
            prompts = source.prompts("train", 96, start=96 * step)
            rows = sample(student, tokenizer, prompts, max_new_tokens=12)
            loss = loss_of(student, len(tokenizer), rows, ask(fleet, rows))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            if step % 10 == 0 or step == options.steps - 1:
                right = [
                    source.verify(prompt, text).value == 1 for prompt, text in zip(prompts, rows.texts, strict=True)
                ]
                print(f"step {step + 1}: reverse KL {loss.item():.3f} nats a token, {sum(right)} of {len(right)} right")
    if options.out:
        student.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
