"""A head sharded over two ranks, as FSDP2 holds it, in processes of their own."""

import json

import forked
import pytest

WORKER = """
import json, sys, torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from opd.maths import linear_divergence, linear_token_scores

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
generator = torch.Generator().manual_seed(0)
head, teacher_head = torch.randn(11, 4, generator=generator), torch.randn(11, 3, generator=generator)
hidden, teacher = torch.randn(2, 5, 4, generator=generator), torch.randn(2, 5, 3, generator=generator)

# What one process without sharding computes from the mean of the ranks' losses.
whole = head.clone().requires_grad_()
sum(linear_divergence(hidden[r], whole, teacher[r], teacher_head).mean / 2 for r in range(2)).backward()
sum(linear_token_scores(hidden[r], whole).log_z.mean() / 2 for r in range(2)).backward()

sharded = distribute_tensor(head, mesh, [Shard(0)]).requires_grad_()
theirs = distribute_tensor(teacher_head, mesh, [Shard(0)])
traffic = []
for recompute, tile in ((False, 1), (False, None), (True, 1)):
    sharded.grad = None
    whole_theirs = theirs.full_tensor()
    with CommDebugMode() as seen:
        linear_divergence(
            hidden[rank], sharded, teacher[rank], whole_theirs, recompute=recompute, scratch_bytes=tile
        ).mean.backward()
    traffic.append(sorted((str(op).split(".")[-1], count) for op, count in seen.get_comm_counts().items()))
sharded.grad = None
linear_divergence(hidden[rank], sharded, teacher[rank], theirs).mean.backward()
linear_token_scores(hidden[rank], sharded).log_z.mean().backward()
error = (sharded.grad.full_tensor() - whole.grad).abs().max().item()
print(json.dumps([error, list(sharded.grad.to_local().shape), traffic]))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_sharded_head_is_gathered_and_gets_the_mean_of_the_ranks_gradients(tmp_path):
    found = [json.loads(lines[-1]) for lines in forked.ranks(WORKER, tmp_path / "rendezvous")]
    assert [error for error, *_ in found] == pytest.approx([0, 0], abs=1e-6)
    assert sorted(shape for _, shape, _ in found) == [[5, 4], [6, 4]]
    # In many tiles, in one, and projected again in the backward pass: there and back once.
    once = [["all_gather_into_tensor", 1], ["reduce_scatter_tensor", 1]]
    assert all(traffic == [once] * 3 for *_, traffic in found)
