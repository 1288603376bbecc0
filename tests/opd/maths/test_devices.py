"""Every device and precision against float64 on the CPU; `make gpu` runs the CUDA half where there is a GPU."""

import pytest
import torch
from torch.testing import assert_close

from opd.heads import OutputHead
from opd.maths import exact
from opd.maths.linear.divergence import Reference, linear_divergence
from opd.maths.linear.project import GPU_SCRATCH
from opd.maths.linear.scores import linear_token_scores, linear_topk
from opd.maths.pointwise import Kind

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
N, V, HS, HT = 150, 1_003, 24, 40
#: Relative error of gradients: of the factors' rounding in half precision, whose sums are in float32.
GRADIENT_ERROR = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request):
    return request.param


@pytest.fixture(params=list(GRADIENT_ERROR), ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


@pytest.fixture
def sides(dtype):
    """Hidden states and head of student, teacher and reference and the student's bias, rounded, in float64."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).to(dtype).double()

    pairs = [(make(N, width), make(V, width, scale=width**-0.5)) for width in (HS, HT, 8)]
    return *(tensor for pair in pairs for tensor in pair), make(V)


def on(device, dtype, tensors, wanted):
    moved = [tensor.detach().to(device, dtype, copy=True) for tensor in tensors]
    for index in wanted:
        moved[index].requires_grad_()
    return moved


def close(have, want, error):
    assert have.isfinite().all()
    assert (have.double().cpu() - want).norm() <= error * want.norm()


@pytest.mark.parametrize("referenced", [False, True])
@pytest.mark.parametrize("kind", list(Kind))
def test_linear_divergences_agree_with_double_precision(device, dtype, sides, kind, referenced):
    def run(student, head, teacher, teacher_head, reference, reference_head, bias):
        return linear_divergence(
            student,
            OutputHead(head, bias, scale=1.5, soft_cap=20.0),
            teacher,
            teacher_head,
            kind=kind.value,
            weight=0.3 if kind.value.startswith(("jsd", "skew")) else None,
            temperature=1.3,
            reference=Reference(reference, reference_head, 1.5) if referenced else None,
            vocab_size=V - 4,
            mask=torch.arange(N, device=student.device) % 5 != 2,
            token_weights=torch.linspace(1e-5, 2e-5, N, device=student.device),
            topk=16,
            scratch_bytes=40 * V * 8,  # several tiles
        )

    results = []
    for where, precision in (("cpu", torch.float64), (device, dtype)):
        leaves = on(where, precision, sides, wanted := (0, 1, 6))
        result = run(*leaves)
        (result.total * 2**14).backward()
        results.append((result, [leaves[index].grad for index in wanted]))
    (want, true), (have, found) = results
    for name in ("per_token", "student_entropy", "teacher_entropy"):
        close(getattr(have, name), getattr(want, name), 1e-4)
    close(have.diagnostics["student_head_mass"], want.diagnostics["student_head_mass"], 1e-4)
    for gradient, truth in zip(found, true, strict=True):
        assert gradient.dtype == dtype
        close(gradient, truth, GRADIENT_ERROR[dtype])


def test_scores_and_top_k_agree_with_double_precision(device, dtype, sides):
    results = []
    ids = linear_topk(*sides[:2], 8)
    for where, precision in (("cpu", torch.float64), (device, dtype)):
        leaves = on(where, precision, sides[:2], (0, 1))
        found = linear_topk(*leaves, 8)
        assert (found.cpu() == ids).float().mean() > 0.99  # entries may change places within the rounding
        scores = linear_token_scores(*leaves, candidate_ids=ids.to(where), sampled_ids=ids[:, 3].to(where))
        (scores.candidates.exp().sum() + scores.log_tail.sum() + scores.sampled.square().sum()).backward()
        results.append((scores, [leaf.grad for leaf in leaves]))
    (want, true), (have, found) = results
    for name in ("candidates", "sampled", "log_tail", "log_z", "entropy"):
        close(getattr(have, name), getattr(want, name), 1e-4)
    for gradient, truth in zip(found, true, strict=True):
        close(gradient, truth, GRADIENT_ERROR[dtype])


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_divergences_of_logits_agree_with_double_precision(device, dtype, name):
    generator = torch.Generator().manual_seed(0)
    logits = [(2 * torch.randn(N, V, generator=generator)).to(dtype).double() for _ in range(2)]
    results = []
    for where, precision in (("cpu", torch.float64), (device, dtype)):
        student, teacher = on(where, precision, logits, (0,))
        result = getattr(exact, name)(student, teacher, **({"beta": 0.5} if name == "jsd" else {}))
        result.total.backward()
        results.append((result.per_token.detach(), student.grad))
    close(results[1][0], results[0][0], 1e-4)
    close(results[1][1], results[0][1], GRADIENT_ERROR[dtype])


@needs_gpu
def test_the_scratch_on_a_gpu_stays_within_its_bound_at_any_number_of_tokens():
    vocabulary, width = 151_936, 64
    peaks = []
    for tokens in (1024, 4096, 16_384):
        shapes = (tokens, width), (vocabulary, width), (tokens, width), (vocabulary, width)
        student, head, *teacher = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in shapes)
        student.requires_grad_(), head.requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_divergence(student, head, *teacher, vocab_size=151_669).mean.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    returned = 6 * width * vocabulary + 2 * width * 16_384  # gradients, that of the head in float32 at first
    assert max(peaks) < GPU_SCRATCH + returned + 2**26
    assert max(peaks) < 1.05 * min(peaks)


@needs_gpu
def test_autocast_on_a_gpu_takes_half_precision_factors_of_float32_weights():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=generator).cuda() for shape in ((N, HS), (V, HS), (N, HT), (V, HT))]
    tensors[1].requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        cast = linear_divergence(*tensors, kind="jsd", weight=0.5)
    want = linear_divergence(*(tensor.detach().bfloat16() for tensor in tensors), kind="jsd", weight=0.5)
    assert_close(cast.per_token, want.per_token)
    cast.mean.backward()
    assert tensors[1].grad.dtype == torch.float32
