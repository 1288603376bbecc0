"""What the tiles hold: never tokens x vocabulary."""

import pytest
import torch
from slow_cases import slow
from torch.utils._python_dispatch import TorchDispatchMode

from opd.heads import OutputHead
from opd.maths.linear.project import Projection
from opd.maths.linear.tiles import run_tiles
from opd.maths.pointwise import divergence_spec

N, V, H, ROWS = 96, 700, 4, 8


class Largest(TorchDispatchMode):
    """The largest storage that any operation returned, in bytes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, torch.Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("topk", [0, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
@pytest.mark.parametrize("kind", ["reverse_kl", "jsd"])
@pytest.mark.parametrize("tokens", [4 * N, *slow(N)])
def test_no_tensor_outgrows_a_tile_or_the_gradients_however_many_tokens(tokens, kind, dtype, topk):
    generator = torch.Generator().manual_seed(0)

    def random(rows):
        return torch.randn(rows, H, generator=generator).to(dtype)

    models = [Projection(random(tokens), OutputHead(random(V), soft_cap=5.0)) for _ in "ST"]
    spec = divergence_spec(kind, weight=0.5 if kind == "jsd" else None)
    with Largest() as held:
        run_tiles(
            *models,
            spec,
            0.7,
            torch.ones(tokens),
            wanted=(True, True, False),
            scratch_bytes=2 * 4 * V * ROWS,
            topk=topk,
        )
    # A tile, twice as wide where ids of the top k are sorted in int64, or the gradient of head or hidden states.
    assert held.nbytes <= max(2 * 4 * V * ROWS, 4 * V * H, 4 * tokens * max(H, 7))
    assert held.nbytes < 4 * tokens * V / 4
