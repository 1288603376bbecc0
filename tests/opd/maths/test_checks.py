"""Every public function refuses what cannot work with a ValueError that names argument, shape and value."""

import math

import pytest
import torch

from opd import maths
from opd.heads import OutputHead
from opd.maths import LossWeights, Reference

N, V, K = 3, 5, 2
NAN = torch.tensor([0.0, torch.nan, 0.0])
# Users call without the run-time type checker of these tests.
pytestmark = pytest.mark.usefixtures("unchecked_types")


def good(function):
    """Arguments that work, by name of the function."""
    student, teacher = torch.linspace(-1, 1, N * V).view(N, V), torch.linspace(1, -2, N * V).view(N, V)
    ids, y = torch.tensor([[0, 1]] * N), torch.tensor([0, 3, 4])
    log_q = teacher.log_softmax(-1)
    payload = {"teacher_log_probs": log_q.gather(1, ids), "teacher_log_tail": log_q[:, K:].logsumexp(-1)}
    at_y = log_q.gather(1, y[:, None]).squeeze(1)
    hidden, head = torch.linspace(-1, 1, N * 4).view(N, 4), torch.linspace(-1, 1, V * 4).view(V, 4)
    linear = {"student_hidden": hidden, "student_head": head, "teacher_hidden": -hidden, "teacher_head": head**2}
    pair = {"student_logits": student, "teacher_logits": teacher}
    reference = {name.replace("teacher", "reference"): values for name, values in payload.items()}
    return {
        "score_tokens": {"logits": student, "candidate_ids": ids, "sampled_ids": y},
        "head_tail_reverse_kl": {"student": student, "sampled_ids": y, "candidate_ids": ids, **payload}
        | {"teacher_sampled": at_y},
        "sampled_reverse_kl": {"student": student, "sampled_ids": y, "teacher_sampled": at_y},
        "span_reverse_kl": {"student": maths.score_tokens(student, candidate_ids=ids, sampled_ids=y)}
        | {"span": torch.arange(N), "teacher_sampled": at_y},
        "topk_divergence": {"student": student, "candidate_ids": ids, **payload},
        "linear_divergence": linear,
        "linear_token_scores": {"hidden": hidden, "head": head, "candidate_ids": ids, "sampled_ids": y},
        "linear_topk": {"hidden": hidden, "head": head, "k": 2},
        "expected_embedding": {"hidden": hidden, "head": head},
        "adjusted_log_probs": {"teacher": log_q, "reference": log_q, "power": 1.2},
        "adjusted_logits": {"teacher_logits": teacher, "reference_logits": student, "power": 1.2},
        "adjusted_payload": {**payload, "teacher_sampled": at_y, **reference, "reference_sampled": at_y, "power": 1.2},
        "topk_figures": {**pair, "k": 2},
        "support_figures": {**payload, "student_log_probs": payload["teacher_log_probs"]}
        | {"student_log_tail": payload["teacher_log_tail"]},
        "topk_overlap": {"student_ids": ids, "teacher_ids": ids},
        "position_profile": {"per_token": student[:, 0], "position": y},
    }.get(function, pair)


def shaped(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


LOGITS = [
    ({"teacher_logits": shaped(N, V - 1)}, r"teacher_logits \(float32 \[3, 4\]\) must have shape \[3, 5\]"),
    ({"student_logits": shaped(N, V, dtype=torch.int64)}, r"student_logits \(int64 \[3, 5\]\) must be floating"),
    ({"student_logits": shaped(), "teacher_logits": shaped()}, r"student_logits \(float32 \[\]\) needs a last axis"),
    ({"student_logits": shaped(N, 0), "teacher_logits": shaped(N, 0)}, r"student_logits \(float32 \[3, 0\]\)"),
    ({"temperature": 0.0}, r"temperature .* 0\.0"),
    ({"temperature": -math.inf}, "temperature .* -inf"),
    ({"temperature": "hot"}, "temperature .* 'hot'"),
    ({"mask": shaped(N)}, r"mask \(float32 \[3\]\) must be bool"),
    ({"mask": shaped(2, dtype=torch.bool)}, r"mask \(bool \[2\]\) must have shape \[3\]"),
]
VALUES = [
    ({"student_logits": NAN[:, None].expand(N, V)}, "student_logits .* NaN in row 1"),
    ({"teacher_logits": shaped(N, V) + torch.inf}, r"teacher_logits .* \+inf in row 0"),
    ({"teacher_logits": shaped(N, V) - torch.inf}, "teacher_logits .* only -inf in row 0"),
]
TAIL = [
    ({"teacher_log_tail": NAN}, r"teacher_log_tail \(float32 \[3\]\) holds nan at \[1\]"),
    ({"teacher_log_tail": shaped(N, dtype=torch.int64)}, "teacher_log_tail .* must be floating point"),
    ({"teacher_log_tail": shaped(2)}, r"teacher_log_tail .* must have shape \[3\]"),
    ({"teacher_log_probs": shaped(N, 3)}, r"teacher_log_probs .* must have shape \[3, 2\]"),
    ({"teacher_log_probs": torch.full((N, K), math.inf)}, r"teacher_log_probs .* holds inf at \[0, 0\]"),
    ({"candidate_ids": torch.tensor(1)}, r"candidate_ids \(int64 \[\]\) must have shape \[3, K\]"),
    ({"candidate_ids": shaped(N, K, dtype=torch.int64)}, "candidate_ids .* repeats an id in row 0"),
    ({"mask": shaped(2, dtype=torch.bool)}, r"mask \(bool \[2\]\) must have shape \[3\]"),
    ({"mask": shaped(N)}, "mask .* must be bool"),
    ({"temperature": math.nan}, "temperature .* nan"),
]
STALE = [
    ({"behaviour_log_probs": NAN}, r"behaviour_log_probs \(float32 \[3\]\) holds nan at \[1\]"),
    ({"behaviour_log_probs": shaped(N) + 5}, r"behaviour_log_probs .* holds 5.0 at \[0\]"),
    ({"behaviour_log_probs": shaped(2)}, r"behaviour_log_probs .* must have shape \[3\]"),
    ({"behaviour_log_probs": shaped(N), "importance_cap": math.nan}, "importance_cap .* nan"),
    ({"sampled_ids": torch.tensor([0, 1, V])}, "sampled_ids .* holds the id 5, .* the vocabulary of 5"),
]
HEADS = [
    ({"head": OutputHead(shaped(V, 4), scale=0.0)}, r"head must have a finite scale other than 0 .* 0\.0"),
    ({"head": OutputHead(shaped(V, 4), soft_cap=math.nan)}, "head .* nan"),
    ({"head": OutputHead(shaped(V, 4), padding=V)}, r"head.padding must be an integer in \[0, 4\].* 5"),
    ({"hidden": torch.tensor(1.0)}, r"hidden \(float32 \[\]\) must be a floating-point matrix"),
    ({"head": shaped(V, 4, dtype=torch.int64)}, r"head \(int64 \[5, 4\]\) must be a floating-point matrix"),
    ({"hidden": torch.full((N, 4), math.nan)}, r"hidden \(float32 \[3, 4\]\) .* logsumexp nan in row 0"),
    ({"scratch_bytes": 0}, "scratch_bytes must be an integer of at least 1, but is 0"),
    ({"vocab_size": 6}, r"vocab_size must be an integer in \[1, 5\].* 6"),
]
THREE_IDS = {"mode": "sequence_mean", "sequence": torch.tensor([0, 1, 2]), "num_sequences": 2}
EXACT = ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation")
CASES = {
    **dict.fromkeys(
        ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation"), LOGITS + VALUES
    ),
    "topk_figures": [
        *LOGITS,
        ({"k": 0}, r"k must be an integer in \[1, 5\].* 0"),
        ({"k": V + 1}, r"k .* 6"),
        ({"k": 2.0}, r"k .* 2\.0"),
    ],
    "expected_embedding": [*HEADS, ({"temperature": 0}, "temperature must be a finite number above 0, but is 0")],
    "score_tokens": [
        ({"candidate_ids": torch.tensor(1)}, r"candidate_ids \(int64 \[\]\) must have shape \[3, K\]"),
        ({"candidate_ids": shaped(N, K)}, r"candidate_ids \(float32 \[3, 2\]\) must be int64"),
        ({"sampled_ids": torch.tensor([0, -1, 0])}, "sampled_ids .* holds the id -1"),
        ({"logits": torch.full((N, V), math.inf)}, r"logits \(float32 \[3, 5\]\) holds \+inf in row 0"),
    ],
    "head_tail_reverse_kl": TAIL + STALE,
    "topk_divergence": [
        *TAIL,
        ({"kind": "jsd", "weight": math.nan}, "beta must lie in .* nan"),
        ({"kind": "jsd", "weight": "half"}, "beta must lie in .* 'half'"),
        ({"kind": "skew_forward_kl", "weight": 1.0}, r"alpha must lie in \[0, 1\).* 1\.0"),
        ({"tail": "generalised", "teacher_log_tail": shaped(1)}, r"teacher_log_tail .* must have shape \[3\]"),
    ],
    "sampled_reverse_kl": [
        *STALE,
        ({"control_variate": NAN}, r"control_variate \(float32 \[3\]\) holds nan at \[1\], which is not finite"),
        ({"control_variate": shaped(N, dtype=torch.int64)}, "control_variate .* must be floating point"),
        ({"control_variate": shaped(2)}, r"control_variate .* must have shape \[3\]"),
        ({"teacher_sampled": NAN}, r"teacher_sampled .* holds nan at \[1\]"),
        ({"mask": shaped(2, dtype=torch.bool)}, r"mask \(bool \[2\]\) must have shape \[3\]"),
    ],
    "span_reverse_kl": [
        *STALE[:-1],
        ({"span": shaped(2, dtype=torch.int64)}, r"span \(int64 \[2\]\) must have shape \[3\]"),
        ({"teacher_sampled": shaped(2)}, r"teacher_sampled .* must have shape \[3\]"),
        ({"teacher_sampled": NAN}, r"teacher_sampled .* holds nan at \[1\]"),
        ({"mask": shaped(2, dtype=torch.bool)}, r"mask \(bool \[2\]\) must have shape \[3\]"),
    ],
    "linear_divergence": [
        ({"student_hidden": torch.tensor(1.0)}, r"student_hidden \(float32 \[\]\) must be a floating-point matrix"),
        ({"student_head": shaped(0, 4)}, r"vocab_size must be an integer in \[1, 0\]"),
        ({"vocab_size": 2.5}, r"vocab_size .* 2\.5"),
        ({"scratch_bytes": -1}, "scratch_bytes .* -1"),
        ({"topk": V + 1}, r"topk must be an integer in \[1, 5\].* 6"),
        ({"token_weights": NAN}, r"token_weights \(float32 \[3\]\) holds nan at \[1\]"),
        ({"token_weights": shaped(N, dtype=torch.int64)}, "token_weights .* must be floating point"),
        ({"student_head": OutputHead(shaped(V, 4), scale=math.inf)}, "student_head .* finite scale .* inf"),
        ({"teacher_head": OutputHead(shaped(V, 4), soft_cap=math.inf)}, "teacher_head .* finite soft_cap .* inf"),
        ({"reference": Reference(shaped(2, 4), shaped(V, 4), 1.2)}, r"reference_hidden .* must have shape \[3, 4\]"),
        ({"reference": Reference(shaped(N, 4), shaped(V, 4), math.inf)}, "reference.power .* inf"),
        ({"teacher_hidden": torch.full((N, 4), math.inf)}, r"teacher_hidden \(float32 \[3, 4\]\) .* in row 0"),
    ],
    "linear_token_scores": [*HEADS, ({"candidate_ids": torch.tensor(3)}, r"candidate_ids .* \[3, K\]")],
    "linear_topk": [*HEADS, ({"k": True}, "k must be an integer .* True"), ({"k": V + 1}, "k .* 6")],
    "adjusted_log_probs": [
        ({"power": math.inf}, "power must be at least 0 and finite, but is inf"),
        ({"power": math.nan}, "power .* nan"),
        ({"teacher": shaped(N, V, dtype=torch.int64)}, r"teacher \(int64 \[3, 5\]\) must be floating point"),
        ({"reference": shaped(2, V)}, r"reference .* must have shape \[3, 5\]"),
    ],
    "adjusted_logits": [({"reference_logits": shaped(N, 4)}, r"reference .* must have shape \[3, 5\]")],
    "adjusted_payload": [
        ({"teacher_sampled": shaped(2)}, r"teacher_log_probs .* must have shape \[2, K\]"),
        ({"teacher_log_tail": shaped(2)}, r"teacher_log_tail .* must have shape \[3\]"),
        ({"reference_sampled": shaped(2)}, r"reference_sampled .* must have shape \[3\]"),
        ({"reference_log_probs": shaped(N, 3)}, r"reference_log_probs .* must have shape \[3, 2\]"),
    ],
    "support_figures": [
        ({"teacher_log_probs": shaped(N, 1)}, r"teacher_log_probs .* must have shape \[3, 2\]"),
        ({"student_log_tail": shaped(2)}, r"student_log_probs .* must have shape \[2, K\]"),
        ({"teacher_log_probs": shaped(N, K, dtype=torch.int64)}, "teacher_log_probs .* must be floating point"),
    ],
    "topk_overlap": [
        ({"teacher_ids": shaped(2, K, dtype=torch.int64)}, r"teacher_ids .* must have shape \[3, K\]"),
        ({"student_ids": shaped(N, K)}, r"student_ids \(float32 \[3, 2\]\) must be integers"),
        ({"student_ids": torch.tensor(1)}, r"student_ids \(int64 \[\]\) must be integers"),
    ],
    "position_profile": [
        ({"position": shaped(N)}, r"position \(float32 \[3\]\) must be integers"),
        ({"per_token": shaped(N, 1), "position": shaped(N, 1).long()}, r"per_token \(float32 \[3, 1\]\) must .* \[N\]"),
    ],
}


@pytest.mark.parametrize(
    ("function", "changes", "words"),
    [(function, *case) for function, cases in CASES.items() for case in cases],
)
def test_what_cannot_work_is_refused_by_name_shape_and_value(function, changes, words):
    extra = {"alpha": 0.1} if function.startswith("skew") else {}
    getattr(maths, function)(**good(function), **extra)
    with pytest.raises(ValueError, match=words):
        getattr(maths, function)(**(good(function) | extra | changes))


def test_every_public_function_has_such_cases():
    functions = {name for name in maths.__all__ if name[0].islower()}
    assert functions - set(CASES) == {"token_weights", "sum_over_spans"}  # below: it takes terms; no values are refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, r"mask of term 'x' \(bool \[2, 2\]\) must have shape \[N\]"),
        (THREE_IDS, "sequence of term 'x' .* holds the id 2, which is outside num_sequences of 2"),
        (THREE_IDS | {"sequence": torch.tensor([0, -1, 0])}, "sequence of term 'x' .* holds the id -1"),
        (THREE_IDS | {"sequence": torch.zeros(3)}, "sequence of term 'x' .* must be int64"),
        ({"num_strata": 0}, "num_strata of term 'x' must be an integer of at least 1, but is 0"),
        (THREE_IDS | {"num_sequences": 3, "mode": "balanced", "stratum": torch.tensor([0, 1, 4])}, "stratum .* id 4"),
    ],
)
def test_terms_with_indices_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        maths.token_weights({"x": LossWeights(**({"mask": torch.ones(3, dtype=torch.bool)} | arguments))})


def test_the_row_that_is_named_is_the_callers_row_also_behind_a_mask():
    arguments = good("linear_divergence")
    arguments["student_hidden"] = arguments["student_hidden"].clone()
    arguments["student_hidden"][2] = math.nan
    with pytest.raises(ValueError, match="logsumexp nan in row 2"):
        maths.linear_divergence(**arguments, mask=torch.tensor([False, True, True]))
    maths.linear_divergence(**arguments, mask=torch.tensor([True, True, False]))


def test_profiles_of_different_edges_are_not_added():
    one, other = (maths.position_profile(torch.ones(1), torch.zeros(1).long(), edges=e) for e in ((0,), (0, 4)))
    with pytest.raises(ValueError, match=r"edges .* \(0,\) and \(0, 4\)"):
        one + other
