import pytest
import torch
from torch.testing import assert_close

from opd.heads import OutputHead
from opd.maths import exact
from opd.maths.diagnostics import topk_figures
from opd.maths.linear.divergence import Reference, linear_divergence
from opd.maths.linear.project import Projection
from opd.maths.linear.scores import linear_token_scores
from opd.maths.pointwise import divergence_spec

N, V, HS, HT = 13, 31, 6, 4
KINDS = [
    ("forward_kl", None),
    ("reverse_kl", None),
    ("jsd", 0.3),
    ("skew_forward_kl", 0.2),
    ("skew_reverse_kl", 0.2),
    ("total_variation", None),
]


@pytest.fixture
def parts(make_logits):
    """Student hidden states, head and bias with gradient; teacher hidden states and head."""
    student = [make_logits(*shape, seed=i).requires_grad_() for i, shape in enumerate([(N, HS), (V, HS), (V,)])]
    return *student, make_logits(N, HT, seed=3), make_logits(V, HT, seed=4)


def materialised(student_logits, teacher_logits, kind, weight, **settings):
    name = {"jsd": "beta", "skew_forward_kl": "alpha", "skew_reverse_kl": "alpha"}.get(kind)
    extra = {name: weight} if name else {}
    return getattr(exact, kind)(student_logits, teacher_logits, **extra, **settings)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("kind", "weight"), KINDS)
def test_values_gradients_and_entropies_equal_the_materialised_form(kind, weight, recompute, parts):
    hidden, head, bias, teacher_hidden, teacher_head = parts
    weights = torch.rand(N, dtype=torch.float64)
    got = linear_divergence(
        hidden,
        OutputHead(head, bias, scale=1.3, soft_cap=5.0),
        teacher_hidden,
        OutputHead(teacher_head, scale=0.7, soft_cap=9.0),
        kind=kind,
        weight=weight,
        temperature=0.8,
        token_weights=weights,
        recompute=recompute,
    )
    student_logits = 5.0 * torch.tanh((hidden @ head.T + bias) * 1.3 / 5.0)
    teacher_logits = 9.0 * torch.tanh((teacher_hidden @ teacher_head.T) * 0.7 / 9.0)
    want = materialised(student_logits, teacher_logits, kind, weight, temperature=0.8)
    assert_close(got.per_token, want.per_token)
    assert_close(got.total, (want.per_token * weights).sum())
    assert_close(got.student_entropy, want.student_entropy)
    assert_close(got.teacher_entropy, want.teacher_entropy)
    have = torch.autograd.grad(3.0 * got.total, [hidden, head, bias])
    true = torch.autograd.grad(3.0 * (want.per_token * weights).sum(), [hidden, head, bias])
    for one, other in zip(have, true, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("scratch", [1, 2 * 8 * V * 5, 1 << 20])
def test_the_size_of_the_tiles_changes_nothing(scratch, parts):
    hidden, head, _, teacher_hidden, teacher_head = parts
    whole = linear_divergence(hidden, head, teacher_hidden, teacher_head)
    tiled = linear_divergence(hidden, head, teacher_hidden, teacher_head, scratch_bytes=scratch)
    assert_close(tiled.per_token, whole.per_token)
    for one, other in zip(*(torch.autograd.grad(r.mean, [hidden, head]) for r in (tiled, whole)), strict=True):
        assert_close(one, other)


def test_the_normalised_jsd_is_scaled_in_value_and_gradient(parts):
    hidden, head, _, *teacher = parts
    got = linear_divergence(hidden, head, *teacher, kind="jsd", weight=0.2, normalised=True)
    want = exact.jsd(hidden @ head.T, teacher[0] @ teacher[1].T, beta=0.2, normalised=True)
    assert_close(got.per_token, want.per_token)
    assert_close(torch.autograd.grad(got.mean, head)[0], torch.autograd.grad(want.mean, head)[0])


def test_gradcheck(make_logits):
    hidden, head = make_logits(3, 4).requires_grad_(), make_logits(5, 4, seed=1).requires_grad_()
    teacher = make_logits(3, 2, seed=2), make_logits(5, 2, seed=3)

    def total(h, w):
        return linear_divergence(h, w, *teacher, kind="jsd", weight=0.4, recompute=True).total

    assert torch.autograd.gradcheck(total, (hidden, head))


def test_recomputation_makes_single_tokens_differentiable_and_the_default_does_not(parts):
    hidden, head, _, *teacher = parts
    assert not linear_divergence(hidden, head, *teacher).per_token.requires_grad
    result = linear_divergence(hidden, head, *teacher, recompute=True)
    upstream = torch.randn(N, dtype=torch.float64)
    want = exact.reverse_kl(hidden @ head.T, teacher[0] @ teacher[1].T).per_token
    for _ in range(2):
        have = torch.autograd.grad(result.per_token, [hidden, head], upstream, retain_graph=True)
        true = torch.autograd.grad(want, [hidden, head], upstream, retain_graph=True)
        for one, other in zip(have, true, strict=True):
            assert_close(one, other)


def test_a_second_backward_pass_of_the_fused_form_is_refused_and_not_wrong(parts):
    hidden, head, _, *teacher = parts
    result = linear_divergence(hidden, head, *teacher)
    result.total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        result.total.backward()


def test_masked_rows_are_dropped_before_the_projection(parts):
    hidden, head, _, teacher_hidden, teacher_head = parts
    mask = torch.arange(N) % 3 != 1
    dirty = hidden.detach().clone()
    dirty[~mask] = torch.nan
    dirty.requires_grad_()
    got = linear_divergence(dirty, head, teacher_hidden, teacher_head, mask=mask)
    want = exact.reverse_kl(hidden @ head.T, teacher_hidden @ teacher_head.T, mask=mask)
    assert got.count == want.count
    assert_close(got.per_token, want.per_token)
    assert_close(got.mean, want.mean)
    got.mean.backward()
    assert_close(dirty.grad, torch.autograd.grad(want.mean, hidden)[0])


def test_an_empty_mask_gives_zero_loss_zero_gradient_and_count_zero(parts):
    hidden, head, _, *teacher = parts
    result = linear_divergence(hidden, head, *teacher, mask=torch.zeros(N, dtype=torch.bool))
    result.mean.backward()
    assert (result.mean.item(), result.count.item()) == (0.0, 0)
    assert (hidden.grad == 0).all()
    assert (head.grad == 0).all()


def test_padding_rows_of_unequal_heads_do_not_count_and_get_no_gradient(parts, make_logits):
    hidden, head, bias, *teacher = parts
    teacher_hidden, teacher_head = teacher
    padded = torch.cat([head, 10 * make_logits(5, HS, seed=9)]).detach().requires_grad_()
    got = linear_divergence(hidden, padded, teacher_hidden, teacher_head)
    want = linear_divergence(hidden, head, teacher_hidden, teacher_head)
    assert_close(got.per_token, want.per_token)
    got.total.backward()
    assert (padded.grad[V:] == 0).all()
    told = linear_divergence(hidden, OutputHead(padded, padding=len(padded) - V), teacher_hidden, teacher_head)
    assert_close(told.per_token, want.per_token)
    smaller = linear_divergence(hidden, padded, teacher_hidden, teacher_head, vocab_size=20)
    assert_close(smaller.per_token, linear_divergence(hidden, head[:20], teacher_hidden, teacher_head[:20]).per_token)
    assert bias.grad is None
    biased = linear_divergence(hidden, OutputHead(padded, torch.cat([bias, bias[:5]])), *teacher, vocab_size=20)
    cut = linear_divergence(hidden, OutputHead(head[:20], bias[:20]), teacher_hidden, teacher_head[:20])
    assert_close(biased.per_token, cut.per_token)
    gradients = (torch.autograd.grad(one.total, bias)[0] for one in (biased, cut))
    assert_close(*gradients)


@pytest.mark.parametrize("recompute", [False, True])
def test_tiles_keep_to_the_scratch_that_is_asked_for(recompute, parts, monkeypatch):
    hidden, head, _, *teacher = parts
    rows, write = [], Projection.write
    monkeypatch.setattr(Projection, "write", lambda self, tile, out: (rows.append(len(out)), write(self, tile, out)))
    # Two buffers of two rows; the scores have one buffer, of four.
    linear_divergence(hidden, head, *teacher, scratch_bytes=2 * 2 * V * 8, recompute=recompute).total.backward()
    assert set(rows) == {1, 2} and len(rows) == 2 * 7 * (1 + recompute)
    rows.clear()
    linear_token_scores(hidden, head, sampled_ids=torch.arange(N), scratch_bytes=4 * V * 8).sampled.sum().backward()
    assert set(rows) == {4, 1} and len(rows) == 2 * 4


def test_a_tied_head_collects_its_gradient_on_the_embedding(parts):
    hidden, embedding, _, *teacher = parts
    ids = torch.arange(N)

    def gradient(divergence):
        inputs = embedding[ids] + hidden.detach()
        return torch.autograd.grad(divergence(inputs), embedding)[0]

    fused = gradient(lambda h: linear_divergence(h, embedding, *teacher).mean)
    plain = gradient(lambda h: exact.reverse_kl(h @ embedding.T, teacher[0] @ teacher[1].T).mean)
    assert_close(fused, plain)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 1.25])
def test_a_reference_turns_the_target_into_the_normalised_product_of_powers(power, parts, make_logits):
    hidden, head, _, teacher_hidden, teacher_head = parts
    reference_hidden, reference_head = make_logits(N, 3, seed=7), make_logits(V, 3, seed=8)
    reference = Reference(reference_hidden, OutputHead(reference_head, soft_cap=4.0), power)
    got = linear_divergence(hidden, head, teacher_hidden, teacher_head, reference=reference)
    reference_logits = 4.0 * torch.tanh(reference_hidden @ reference_head.T / 4.0)
    target = power * (teacher_hidden @ teacher_head.T).log_softmax(-1) + (1 - power) * reference_logits.log_softmax(-1)
    want = exact.reverse_kl(hidden @ head.T, target)
    assert_close(got.per_token, want.per_token)
    assert_close(torch.autograd.grad(got.mean, hidden)[0], torch.autograd.grad(want.mean, hidden)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_projected_and_accumulated_in_float32(dtype, make_logits):
    shapes = [(5, 64), (9000, 64), (5, 32), (9000, 32)]
    hidden, head, *teacher = (make_logits(*shape, seed=i, scale=0.5).to(dtype) for i, shape in enumerate(shapes))
    leaves = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    got = linear_divergence(*leaves, *teacher)
    wide = hidden.double().requires_grad_(), head.double().requires_grad_()
    want = linear_divergence(*wide, teacher[0].double(), teacher[1].double())
    assert_close(got.per_token.double(), want.per_token, rtol=1e-5, atol=1e-5)
    got.mean.backward()
    want.mean.backward()
    for one, other in zip(leaves, wide, strict=True):
        assert one.grad.dtype == dtype
        assert_close(one.grad.double(), other.grad, rtol=1e-2, atol=1e-5)


def test_autocast_projects_in_half_precision_and_returns_float32_gradients(make_logits):
    hidden, head = make_logits(6, 16).float().requires_grad_(), make_logits(50, 16, seed=1).float().requires_grad_()
    teacher = make_logits(6, 8, seed=2).float(), make_logits(50, 8, seed=3).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = linear_divergence(hidden, head, *teacher)
    result.mean.backward()
    halves = [tensor.detach().bfloat16().double() for tensor in (hidden, head, *teacher)]
    assert_close(result.per_token.double(), linear_divergence(*halves).per_token, rtol=1e-5, atol=1e-5)
    assert result.per_token.dtype == head.grad.dtype == hidden.grad.dtype == torch.float32


def test_only_wanted_gradients_are_computed(parts):
    hidden, head, _, *teacher = parts
    frozen = linear_divergence(hidden, head.detach(), *teacher)
    assert_close(
        torch.autograd.grad(frozen.total, hidden)[0],
        torch.autograd.grad(linear_divergence(hidden, head, *teacher).total, hidden)[0],
    )
    with torch.no_grad():
        assert not linear_divergence(hidden, head, *teacher).total.requires_grad


def test_the_operator_passes_torchs_own_checks(make_logits):
    from opd.maths.linear.op import linear_divergence_op

    spec = divergence_spec("reverse_kl")
    tensors = [make_logits(4, 3).requires_grad_(), make_logits(6, 3, seed=1).requires_grad_(), None]
    tensors += [make_logits(4, 2, seed=2), make_logits(6, 2, seed=3), None, None, None, None, torch.ones(4).double()]
    settings = [spec.kind.value, 0.0, 1.0, 1.0, 1.0, [1.0, 1.0], [0.0, 0.0], [True, True, False], True, 0, "torch", 2]
    torch.library.opcheck(linear_divergence_op, (*tensors, *settings), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"student_hidden": torch.zeros(2, 5)}, r"student_hidden \(float32 \[2, 5\]\) must have shape \[2, 3\]"),
        ({"teacher_hidden": torch.zeros(3, 4)}, r"teacher_hidden \(float32 \[3, 4\]\) must have shape \[2, 4\]"),
        ({"student_head": torch.zeros(7, 3, 1)}, r"student_head .* must be a floating-point matrix"),
        (
            {"student_head": OutputHead(torch.zeros(7, 3), torch.zeros(6))},
            r"student_head.bias .* must have shape \[7\]",
        ),
        ({"teacher_head": OutputHead(torch.zeros(7, 4), soft_cap=-1.0)}, "teacher_head .* -1.0"),
        ({"student_head": OutputHead(torch.zeros(7, 3), scale=0.0)}, "student_head .* 0.0"),
        ({"vocab_size": 8}, r"vocab_size must be an integer in \[1, 7\].* 8"),
        ({"vocab_size": 0}, "vocab_size .* 0"),
        ({"kind": "kl"}, "kind must be one of"),
        ({"temperature": -1.0}, "temperature .* -1.0"),
        ({"token_weights": torch.ones(3)}, r"token_weights .* must have shape \[2\]"),
        ({"mask": torch.ones(2)}, "mask .* must be bool"),
        ({"student_hidden": torch.full((2, 3), torch.nan)}, r"student_hidden \(float32 \[2, 3\]\) .* nan in row 0"),
        ({"backend": "cuda"}, "backend must be one of .* 'cuda'"),
    ],
)
def test_bad_input_is_refused_with_name_shape_and_value(changes, words):
    good = {
        "student_hidden": torch.zeros(2, 3),
        "student_head": torch.zeros(7, 3),
        "teacher_hidden": torch.zeros(2, 4),
        "teacher_head": torch.zeros(7, 4),
    }
    with pytest.raises(ValueError, match=words):
        linear_divergence(**(good | changes))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("scratch", [None, 1])
def test_topk_figures_come_from_the_tiles_and_leave_value_and_gradient(scratch, recompute, parts):
    hidden, head, _, teacher_hidden, teacher_head = parts
    mask = torch.arange(N) % 3 != 1
    common = {"mask": mask, "recompute": recompute, "temperature": 0.8, "scratch_bytes": scratch}
    plain = linear_divergence(hidden, head, teacher_hidden, teacher_head, **common)
    got = linear_divergence(hidden, head, teacher_hidden, teacher_head, topk=5, **common)
    want = topk_figures(hidden @ head.T, teacher_hidden @ teacher_head.T, 5, temperature=0.8, mask=mask)
    assert not plain.diagnostics
    assert set(got.diagnostics) == set(want)
    for name, row in want.items():
        assert_close(got.diagnostics[name], row)
    assert_close(got.per_token, plain.per_token)
    for one, other in zip(*(torch.autograd.grad(r.mean, [hidden, head]) for r in (got, plain)), strict=True):
        assert_close(one, other)


def test_the_triton_backend_is_refused_where_it_cannot_run(parts):
    hidden, head, _, *teacher = parts
    with pytest.raises(ValueError, match=r"backend 'triton' needs CUDA .* student_hidden \(float64 \[13, 6\]\)"):
        linear_divergence(hidden, head, *teacher, backend="triton")
