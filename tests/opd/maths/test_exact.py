import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opd.maths import exact
from opd.maths.exact import forward_kl, jsd, reverse_kl, skew_forward_kl, skew_reverse_kl, total_variation

CASES = [
    ("forward_kl", {}),
    ("reverse_kl", {}),
    ("jsd", {"beta": 0.5}),
    ("jsd", {"beta": 0.1}),
    ("skew_forward_kl", {"alpha": 0.3}),
    ("skew_reverse_kl", {"alpha": 0.3}),
    ("total_variation", {}),
]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("name", "settings_"), CASES)
def test_value_and_gradient_agree_with_the_textbook(name, settings_, temperature, make_logits, closed_form):
    student, teacher = make_logits(6, 9, seed=1).requires_grad_(), make_logits(6, 9, seed=2)
    weight = next(iter(settings_.values()), 0.0)
    truth = closed_form[name]((student / temperature).softmax(-1), (teacher / temperature).softmax(-1), weight)
    got = getattr(exact, name)(student, teacher, temperature=temperature, **settings_)
    torch.testing.assert_close(got.per_token, truth, rtol=1e-10, atol=1e-12)
    upstream = torch.rand(6, dtype=torch.float64)
    (want,) = torch.autograd.grad(truth, student, upstream, retain_graph=True)
    (have,) = torch.autograd.grad(got.per_token, student, upstream)
    torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "settings_"), CASES)
def test_gradcheck(name, settings_, make_logits):
    student, teacher = make_logits(3, 5, seed=3).requires_grad_(), make_logits(3, 5, seed=4)
    mask = torch.tensor([True, False, True])
    function = getattr(exact, name)
    assert torch.autograd.gradcheck(lambda z: function(z, teacher, mask=mask, **settings_).total, (student,))


@given(
    values=st.lists(st.lists(st.floats(-30, 30), min_size=4, max_size=4), min_size=2, max_size=2),
    shift=st.floats(-50, 50),
    case=st.sampled_from(CASES),
)
def test_divergences_are_non_negative_and_do_not_see_a_shift_of_the_logits(values, shift, case):
    name, settings_ = case
    student, teacher = torch.tensor(values, dtype=torch.float64).unsqueeze(1)
    function = getattr(exact, name)
    here = function(student, teacher, **settings_).total
    assert here >= -1e-12
    torch.testing.assert_close(function(student + shift, teacher, **settings_).total, here, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "settings_"), CASES)
def test_a_divergence_is_zero_iff_student_and_teacher_are_equal(name, settings_, make_logits):
    logits = make_logits(4, 6, seed=5)
    function = getattr(exact, name)
    same = logits.clone().requires_grad_()
    result = function(same, logits + 3.0, **settings_)
    (gradient,) = torch.autograd.grad(result.total, same)
    assert result.total.abs() < 1e-12
    if name != "total_variation":  # has a kink here
        assert gradient.abs().max() < 1e-12
    moved = logits.clone()
    moved[:, 0] += 0.1
    assert (function(moved, logits, **settings_).per_token > 1e-6).all()


def test_forward_and_reverse_are_each_others_mirror(make_logits):
    a, b = make_logits(4, 6, seed=6), make_logits(4, 6, seed=7)
    torch.testing.assert_close(forward_kl(a, b).per_token, reverse_kl(b, a).per_token)
    torch.testing.assert_close(jsd(a, b, beta=0.2).per_token, jsd(b, a, beta=0.8).per_token)


def test_normalised_jsd_is_continuous_at_both_ends_and_four_jsd_in_the_middle(make_logits):
    student, teacher = make_logits(8, 12, seed=8).float(), make_logits(8, 12, seed=9).float()

    def at(beta):
        return jsd(student, teacher, beta=beta, normalised=True).per_token

    torch.testing.assert_close(at(1e-7), forward_kl(student, teacher).per_token, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(at(1 - 1e-7), reverse_kl(student, teacher).per_token, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(at(0.0), forward_kl(student, teacher).per_token)
    torch.testing.assert_close(at(1.0), reverse_kl(student, teacher).per_token)
    torch.testing.assert_close(at(0.5), 4 * jsd(student, teacher, beta=0.5).per_token)


def test_bounded_divergences_stay_within_their_bounds_for_opposite_one_hots():
    student, teacher = torch.tensor([[200.0, 0, 0]]), torch.tensor([[0.0, 200, 0]])
    assert jsd(student, teacher, beta=0.5).mean.item() == pytest.approx(math.log(2))
    assert total_variation(student, teacher).mean.item() == pytest.approx(1.0)
    assert skew_forward_kl(student, teacher, alpha=0.1).mean.item() == pytest.approx(-math.log(0.1))
    assert skew_reverse_kl(student, teacher, alpha=0.1).mean.item() == pytest.approx(-math.log(0.1))
    assert forward_kl(student, teacher).mean.item() == pytest.approx(200.0)


@pytest.mark.parametrize(("name", "settings_"), CASES)
def test_entries_excluded_on_both_sides_change_nothing(name, settings_, make_logits):
    student, teacher = make_logits(3, 5, seed=10), make_logits(3, 5, seed=11)
    excluded = torch.full((3, 2), -torch.inf, dtype=torch.float64)
    padded = torch.cat([student, excluded], -1).requires_grad_()
    function = getattr(exact, name)
    result = function(padded, torch.cat([teacher, excluded], -1), **settings_)
    torch.testing.assert_close(result.per_token, function(student, teacher, **settings_).per_token)
    result.total.backward()
    assert (padded.grad[:, 5:] == 0).all()
    assert padded.grad.isfinite().all()


def test_a_teacher_that_excludes_an_entry_gives_finite_forward_kl_and_infinite_reverse_kl(make_logits):
    student, teacher = make_logits(2, 4, seed=12), make_logits(2, 4, seed=13)
    teacher[:, 0] = -torch.inf
    assert forward_kl(student, teacher).mean.isfinite()
    assert jsd(student, teacher).mean.isfinite()
    assert reverse_kl(student, teacher).mean.isposinf()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_accumulated_in_float32(dtype, make_logits):
    student, teacher = (
        make_logits(4, 5000, seed=14, scale=3).to(dtype),
        make_logits(4, 5000, seed=15, scale=3).to(dtype),
    )
    got = reverse_kl(student, teacher)
    assert got.per_token.dtype == torch.float32
    want = reverse_kl(student.double(), teacher.double()).per_token
    torch.testing.assert_close(got.per_token.double(), want, rtol=1e-5, atol=1e-5)
    leaf = student.clone().requires_grad_()
    reverse_kl(leaf, teacher).total.backward()
    assert leaf.grad.dtype == dtype


def test_a_real_vocabulary_agrees_with_float64(make_logits):
    student, teacher = make_logits(2, 151_936, seed=16, scale=6), make_logits(2, 151_936, seed=17, scale=6)
    for name, settings_ in CASES:
        function = getattr(exact, name)
        got = function(student.float(), teacher.float(), **settings_).per_token.double()
        want = function(student, teacher, **settings_).per_token
        torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-6)


def test_masked_rows_count_nothing_whatever_they_hold(make_logits):
    student, teacher = make_logits(2, 3, 5, seed=18), make_logits(2, 3, 5, seed=19)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    dirty = student.clone()
    dirty[~mask] = torch.nan
    dirty.requires_grad_()
    result = reverse_kl(dirty, teacher, mask=mask)
    result.mean.backward()
    want = reverse_kl(student[mask], teacher[mask])
    assert result.count == 3
    torch.testing.assert_close(result.mean, want.mean)
    assert (result.per_token[~mask] == 0).all()
    assert (dirty.grad[~mask] == 0).all()
    assert dirty.grad.isfinite().all()


def test_an_empty_mask_gives_zero_loss_zero_gradient_and_count_zero(make_logits):
    student = make_logits(3, 5).requires_grad_()
    result = forward_kl(student, make_logits(3, 5, seed=1), mask=torch.zeros(3, dtype=torch.bool))
    result.mean.backward()
    assert (result.mean.item(), result.total.item(), result.count.item()) == (0.0, 0.0, 0)
    assert (student.grad == 0).all()


def test_no_rows_at_all_give_zero_and_not_nan():
    student = torch.zeros(0, 5, requires_grad=True)
    result = reverse_kl(student, torch.zeros(0, 5))
    result.mean.backward()
    assert result.mean.item() == 0
    assert student.grad.shape == (0, 5)


def test_splitting_rows_into_blocks_changes_nothing(make_logits, monkeypatch):
    from opd.maths import blocks

    student, teacher = make_logits(33, 7, seed=20).float().requires_grad_(), make_logits(33, 7, seed=21).float()
    whole = reverse_kl(student, teacher)
    (gradient,) = torch.autograd.grad(whole.total, student)
    monkeypatch.setattr(blocks, "_CPU_BLOCK", 20)
    parts = reverse_kl(student, teacher)
    torch.testing.assert_close(parts.per_token, whole.per_token, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.autograd.grad(parts.total, student)[0], gradient, rtol=1e-6, atol=1e-7)


def test_entropies_are_those_of_the_tempered_distributions(make_logits):
    student, teacher = make_logits(4, 6, seed=22), make_logits(4, 6, seed=23)
    result = forward_kl(student, teacher, temperature=2.0)
    for got, logits in ((result.student_entropy, student), (result.teacher_entropy, teacher)):
        torch.testing.assert_close(got, torch.distributions.Categorical(logits=logits / 2).entropy())
    assert not result.student_entropy.requires_grad


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"teacher_logits": torch.zeros(2, 4)}, r"teacher_logits \(float32 \[2, 4\]\) must have shape \[2, 3\]"),
        ({"student_logits": torch.zeros(2, 3, dtype=torch.int64)}, r"student_logits \(int64 \[2, 3\]\)"),
        ({"teacher_logits": torch.zeros(2, 3, dtype=torch.int64)}, r"teacher_logits \(int64 \[2, 3\]\)"),
        ({"temperature": 0.0}, r"temperature .* 0\.0"),
        ({"temperature": math.nan}, "temperature .* nan"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask \(bool \[3\]\) must have shape \[2\]"),
        ({"mask": torch.ones(2)}, r"mask \(float32 \[2\]\) must be bool"),
        ({"student_logits": torch.tensor([[0.0, 1, 2], [0, torch.nan, 0]])}, r"student_logits .* NaN in row 1"),
        ({"teacher_logits": torch.tensor([[0.0, 1, 2], [0, torch.inf, 0]])}, r"teacher_logits .* \+inf in row 1"),
        ({"student_logits": torch.full((2, 3), -torch.inf)}, "only -inf in row 0"),
    ],
)
def test_bad_input_is_refused_with_name_shape_and_value(arguments, words):
    good = {"student_logits": torch.zeros(2, 3), "teacher_logits": torch.zeros(2, 3)}
    with pytest.raises(ValueError, match=words):
        reverse_kl(**(good | arguments))


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, 1.1, math.nan])
def test_jsd_refuses_ends_and_nonsense(beta):
    with pytest.raises(ValueError, match="beta"):
        jsd(torch.zeros(2, 3), torch.zeros(2, 3), beta=beta)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_autocast_does_not_touch_the_precision(name, make_logits):
    student, teacher = make_logits(3, 500, seed=30).float(), make_logits(3, 500, seed=31).float()
    function = getattr(exact, name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = function(student, teacher)
    torch.testing.assert_close(inside.per_token, function(student, teacher).per_token, rtol=0, atol=0)
    torch.testing.assert_close(inside.student_entropy, function(student, teacher).student_entropy, rtol=0, atol=0)


def test_annotated_shapes_are_checked_in_these_tests():
    with pytest.raises(Exception, match=r"(?s)forward_kl.*teacher_logits"):
        forward_kl(torch.zeros(2, 3), torch.zeros(2, 4))
