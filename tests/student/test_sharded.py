"""The student under FSDP2 (`fully_shard`), two ranks in processes of their own: the gradients of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import json, sys, torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM
from opd.maths import linear_divergence
from student.model import Student

rendezvous, rank, tied, reshard = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "tied", sys.argv[4] == "reshard"
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

def build():
    torch.manual_seed(0)
    return Student(Qwen3ForCausalLM(Qwen3Config(
        vocab_size=38, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=tied,
    )))

torch.manual_seed(1)
ids = torch.randint(0, 38, (2, 3, 7))
teacher_hidden, teacher_head = torch.randn(2, 6, 5), torch.randn(38, 5)
row, source = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([3, 4, 3, 5, 2, 6])

def loss_of(student, part):
    hidden = student(ids[part], torch.ones_like(ids[part]), row, source)
    head = student.head()
    return linear_divergence(hidden, head.weight, teacher_hidden[part], teacher_head).mean

whole = build()
(sum(loss_of(whole, part) for part in range(2)) / 2).backward()

sharded = build()
for layer in sharded.lm.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh, reshard_after_forward=reshard)
loss_of(sharded, rank).backward()
wanted = {name: p.grad for name, p in whole.named_parameters()}
errors = {
    name: (p.grad.full_tensor() - wanted[name]).abs().max().item() for name, p in sharded.named_parameters()
}
print(json.dumps([max(errors.values()), len(errors), min(g.abs().max().item() for g in wanted.values())]))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("tied", ["tied", "untied"])
@pytest.mark.parametrize("reshard", ["reshard", "keep"])
def test_a_fully_sharded_student_gets_the_gradients_of_one_process(tmp_path: Path, tied: str, reshard: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", WORKER, str(tmp_path / "rendezvous")]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), tied, reshard], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    try:
        found = [json.loads(process.communicate(timeout=240)[0]) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for error, count, least in found:
        assert error < 1e-6 and count >= 20 and least > 1e-5
