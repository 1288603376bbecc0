"""Gradients from tiles of logits, and what an accelerator would be asked to do.

There need be no GPU: its path runs on meta tensors, which have shapes, strides and dtypes but no values, and its
arithmetic, the joining of half-precision tiles, runs on CPU.
"""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from opd.heads import OutputHead
from opd.maths.linear import gradients as linear_gradients
from opd.maths.linear import tiles
from opd.maths.linear.divergence import linear_divergence
from opd.maths.linear.gradients import LogitGradients
from opd.maths.linear.project import GPU_SCRATCH, Projection
from opd.maths.linear.tiles import run_tiles
from opd.maths.pointwise import divergence_spec

QWEN3_IDS = 151_669  # of the tokenizer: odd, where the head has 151,936 rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("joined", [1, 3, 4, 100])
def test_joined_tiles_give_the_gradients_of_single_tiles(joined, dtype):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 6, generator=generator).to(dtype) for rows in (10, 33))
    model = Projection(hidden, OutputHead(weight, torch.zeros(33, dtype=dtype)))
    d_logits = torch.randn(10, 33, generator=generator).to(dtype).float()  # so that the cast loses nothing
    together, single = LogitGradients(model, (True, True, True), joined), LogitGradients(model, (True, True, True))
    size = min(joined, 3)
    for start in range(0, 10, size):
        tile = slice(start, min(start + size, 10))
        together.add(tile, buffer := d_logits[tile].clone())
        buffer.fill_(torch.nan)  # the tile's buffer is used again
        single.add(tile, d_logits[tile])
    for have, want in zip(together.tensors(), single.tensors(), strict=True):
        assert have.dtype == want.dtype == (dtype if have.shape == (10, 6) else torch.float32)
        assert_close(have, want)


@pytest.mark.parametrize(("tokens", "rows"), [(3, 3), (100, 7)])
def test_what_joins_tiles_is_no_larger_than_all_tokens_take(monkeypatch, tokens, rows):
    monkeypatch.setattr(linear_gradients, "joins_tiles", lambda student: True)
    model = Projection(torch.zeros(tokens, 6).bfloat16(), OutputHead(torch.zeros(33, 6).bfloat16()))
    gradients, left = linear_gradients.gradients_within(model, (True, True, False), 2 * 7 * 33 * 2)
    assert gradients._joined.shape == (rows, 33) and left == 7 * 33 * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_whole_divergence_with_joined_tiles_has_the_gradients_of_half_precision(monkeypatch, dtype):
    generator = torch.Generator().manual_seed(1)

    def gradients():
        leaves = [torch.randn(*shape, generator=generator.manual_seed(2)).to(dtype) for shape in ((20, 8), (50, 8))]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        teacher = [torch.randn(*shape, generator=generator).to(dtype) for shape in ((20, 8), (50, 8))]
        # Weights as of a mean over a large batch: in float16 the gradients on the logits would be zeros.
        weights = torch.linspace(1e-6, 2e-6, 20)
        result = linear_divergence(*leaves, *teacher, token_weights=weights, scratch_bytes=50 * 8 * 8)
        (result.total * 2**16).backward()  # the scale of a mixed-precision loss
        return [leaf.grad for leaf in leaves]

    want = gradients()
    monkeypatch.setattr(linear_gradients, "joins_tiles", lambda student: True)
    have = gradients()
    for one, other in zip(have, want, strict=True):
        assert (one - other).norm() < 1e-2 * other.norm()


def test_the_weight_of_a_masked_row_does_not_make_the_others_underflow():
    generator = torch.Generator().manual_seed(1)
    student = [torch.randn(*shape, generator=generator).half() for shape in ((20, 8), (50, 8))]
    teacher = [torch.randn(*shape, generator=generator).half() for shape in ((20, 8), (50, 8))]
    mask = torch.arange(20) > 0

    def gradients(masked_weight):
        leaves = [leaf.clone().requires_grad_() for leaf in student]
        weights = torch.cat([torch.tensor([masked_weight]), torch.full((19,), 1e-6)])
        result = linear_divergence(*leaves, *teacher, token_weights=weights, mask=mask)
        (result.total * 2**16).backward()
        return [leaf.grad for leaf in leaves]

    want = gradients(1e-6)
    for masked_weight in (1e6, torch.inf, torch.nan):
        assert all(torch.equal(one, other) for one, other in zip(gradients(masked_weight), want, strict=True))
    assert want[0][1:].abs().max() > 0


class Products(TorchDispatchMode):
    """Notes the matrix products of half-precision tensors into float32, and the largest storage of any result.

    Checks what CUDA's operators check and meta tensors do not, and stands in for `addmm` into another dtype.
    """

    def __init__(self):
        super().__init__()
        self.products, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.ops.aten.mm.dtype_out, torch.ops.aten.addmm.dtype_out):
            *rest, left, right, out_dtype = args
            out = kwargs["out"]
            assert left.dtype == right.dtype in (torch.bfloat16, torch.float16)
            assert out.dtype == out_dtype == torch.float32
            assert all(tensor is out for tensor in rest)
            assert out.shape == (len(left), right.shape[1])
            for tensor in (left, right, out):  # what matrix units read: one dense axis, the other aligned to 16 bytes
                assert 1 in tensor.stride()
                assert max(tensor.stride()) * tensor.dtype.itemsize % 16 == 0
            self.products.append((str(func), tuple(left.shape), right.shape[1]))
            return out
        assert func not in (torch.ops.aten.addmm.dtype, torch.ops.aten.mm.dtype), "allocates its result"
        found = func(*args, **kwargs)
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return found


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.fixture
def accelerator(monkeypatch):
    """What is asked of meta tensors; the kernels that fold a tile run on values only (see test_kernels.py)."""
    monkeypatch.setattr(tiles, "fold_tile_", lambda student, *_, **__: student.new_empty(5, len(student)))
    with Products() as seen:
        yield seen


def test_an_accelerator_multiplies_aligned_tiles_and_joins_those_of_the_gradients(accelerator):
    tokens, vocabulary, width = 8192, 151_936, 4096
    student = Projection(meta(tokens, width), OutputHead(meta(vocabulary, width)[:QWEN3_IDS]))
    teacher = Projection(meta(tokens, 5120), OutputHead(meta(vocabulary, 5120)[:QWEN3_IDS]))
    weights = meta(tokens, dtype=torch.float32)
    found = run_tiles(student, teacher, divergence_spec("reverse_kl"), 1.0, weights, wanted=(True, True, False))
    assert found.d_head.shape == (QWEN3_IDS, width)
    projections = [rows for name, (rows, _), _ in accelerator.products if name.startswith("aten.mm")]
    # 8 bytes of student's and teacher's logits in half of the scratch: 440 rows, of which 384 fill the matrix units.
    assert projections == [384, 384] * 21 + [128, 128]
    heads = [inner for _, (rows, inner), _ in accelerator.products if rows == QWEN3_IDS]
    # 2 bytes in the other half: four tiles at once.
    assert heads == [4 * 384] * 5 + [512]
    assert accelerator.largest <= max(GPU_SCRATCH // 2, 4 * vocabulary * width)


@pytest.mark.parametrize("kind", ["forward_kl", "jsd", "total_variation"])
def test_every_option_of_the_tiles_passes_an_accelerators_checks(accelerator, kind):
    tokens, vocabulary = 300, 1_003
    student = Projection(meta(tokens, 64), OutputHead(meta(vocabulary, 64), meta(vocabulary), soft_cap=30.0))
    others = [Projection(meta(tokens, width), OutputHead(meta(vocabulary, width), scale=0.5)) for width in (32, 16)]
    spec = divergence_spec(kind, weight=0.5 if kind == "jsd" else None)
    weights = meta(tokens, dtype=torch.float32)
    for wanted in [(False, False, False), (True, False, False), (True, True, True)]:
        found = run_tiles(student, others[0], spec, 0.7, weights, reference=others[1], wanted=wanted, topk=8)
        assert found.statistics.shape == (5, tokens)
        shapes = (tokens, 64), (vocabulary, 64), (vocabulary,)
        for tensor, want, shape in zip((found.d_hidden, found.d_head, found.d_bias), wanted, shapes, strict=True):
            assert tensor.shape == (shape if want else (0,))
    assert len(accelerator.products) == 3 * 3 + 1 + 2
