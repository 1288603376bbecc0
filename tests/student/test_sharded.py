"""The student under FSDP2 (`fully_shard`), two ranks in processes of their own: gradients and jumps of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SETUP = """
import json, sys, torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from transformers import Qwen3Config, Qwen3ForCausalLM
from opd.maths import linear_divergence
from student.controllers import EvalReport
from student.methods.jumps.effopd import EffOpd, EffOpdSettings
from student.learning.model import Student

rendezvous, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

def build(tied):
    torch.manual_seed(0)
    return Student(Qwen3ForCausalLM(Qwen3Config(
        vocab_size=38, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=tied,
    )))

def shard(student, reshard):
    for layer in student.lm.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(student, mesh=mesh, reshard_after_forward=reshard)
"""

GRADIENTS = """
torch.manual_seed(1)
ids = torch.randint(0, 38, (2, 3, 7))
teacher_hidden, teacher_head = torch.randn(2, 6, 5), torch.randn(38, 5)
row, source = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([3, 4, 3, 5, 2, 6])

def loss_of(student, part):
    hidden = student(ids[part], torch.ones_like(ids[part]), row, source)
    head = student.head()
    return linear_divergence(hidden, head.weight, teacher_hidden[part], teacher_head).mean

def worst(tied, reshard):
    whole = build(tied)
    (sum(loss_of(whole, part) for part in range(2)) / 2).backward()
    sharded = shard(build(tied), reshard)
    with CommDebugMode() as traffic:
        loss_of(sharded, rank).backward()
    # FSDP's own collectives are of another kind: these are the head's, there and back.
    counts = {str(op): count for op, count in traffic.get_comm_counts().items()}
    of_head = [counts.get(f"c10d_functional.{op}", 0) for op in ("all_gather_into_tensor", "reduce_scatter_tensor")]
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    errors = {
        name: (p.grad.full_tensor() - wanted[name]).abs().max().item() for name, p in sharded.named_parameters()
    }
    least = min(g.abs().max().item() for g in wanted.values())
    return [max(errors.values()), len(errors), least, of_head, [1, 1] if reshard else [0, 0]]

print(json.dumps([worst(tied, reshard) for tied in (True, False) for reshard in (True, False)]))
dist.destroy_process_group()
"""

JUMPS = """
def report(accuracy):
    return EvalReport(accuracy=accuracy, per_prompt=(), mean_length=1.0, truncated=0.0, reverse_kl=None, tokens=1)

class Fake:
    def __init__(self, student):
        self.lm = student.lm
        self.optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
        self.script = []

    def parameters(self):
        return self.lm.named_parameters()

    def optimizer_moments(self):
        return ((name, self.optimizer.state.get(p, {})) for name, p in self.parameters())

    def training_prompts(self, count, seed_names):
        return []

    def evaluate(self, prompts, **names):
        return report(self.script.pop(0))

    def update(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for _, p in self.parameters():
            p.grad = torch.zeros_like(p)
            whole = torch.randn(p.shape, generator=generator)
            p.grad.copy_(distribute_tensor(whole, mesh, p.placements) if isinstance(p, DTensor) else whole)
        self.optimizer.step()

def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

def jumped(student, moments):
    services = Fake(student)
    method = EffOpd(EffOpdSettings.model_validate({"name": "effopd", "moments": moments}))
    method.start(services)
    found = []
    # Two jumps accepted and the third refused; then none accepted; then all five.
    for updates, script in enumerate([[0.1, 0.2, 0.3, 0.3], [0.5, 0.4], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]):
        services.update(updates)
        before = {name: full(p).clone() for name, p in services.parameters()}
        services.script = script
        metrics = method.after_update(2**updates - 1, services)
        assert not services.script and isinstance(metrics["effopd/accepted"], float)
        changed = sum((full(p) != before[name]).any().item() for name, p in services.parameters())
        found.append([metrics["effopd/accepted"], changed])
    state = {f"{n}/{key}": full(value) for n, values in services.optimizer_moments() for key, value in values.items()}
    return found, {name: full(p).detach() for name, p in services.parameters()} | state

from torch.distributed.tensor import DTensor, distribute_tensor
def compare(moments):
    found, wanted = jumped(build(True), moments)
    again, got = jumped(shard(build(True), True), moments)
    equal = set(got) == set(wanted) and all(torch.equal(got[name], wanted[name]) for name in wanted)
    return [found, again, equal, len(wanted)]

print(json.dumps([compare(moments) for moments in ("keep", "reset", "rescale")]))
dist.destroy_process_group()
"""


def run(script: str, folder: Path) -> list[list[Any]]:
    """What two ranks of the script print."""
    command = [sys.executable, "-W", "ignore", "-c", SETUP + script, str(folder / "rendezvous")]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment) for rank in range(2)
    ]
    try:
        return [json.loads(process.communicate(timeout=240)[0].splitlines()[-1]) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_fully_sharded_student_gets_the_gradients_of_one_process(tmp_path: Path) -> None:
    """Tied and untied heads; weights kept whole after the forward, or the head gathered once for the loss."""
    for cases in run(GRADIENTS, tmp_path):
        assert len(cases) == 4
        for error, count, least, of_head, once in cases:
            assert error < 1e-6 and count >= 20 and least > 1e-5
            assert of_head == once


@pytest.mark.slow
def test_jumps_of_a_fully_sharded_student_are_those_of_one_process_bit_for_bit(tmp_path: Path) -> None:
    """With the optimizer's moments kept, reset and rescaled."""
    for cases in run(JUMPS, tmp_path):
        assert len(cases) == 3
        for one, two, equal, count in cases:
            # Seven matrices in each of two layers move; a refused jump leaves every tensor as it was.
            assert one == two == [[2.0, 14], [0.0, 0], [5.0, 14]]
            assert equal and count > 60
