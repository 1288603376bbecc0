"""The penalty for moving away from a reference."""

from typing import Any

import torch
from gradients import expectation, gradient, logp

from student.data.needs import REFERENCE, TEACHER


def test_the_reference_penalty_is_the_divergence_to_the_reference(toy: Any) -> None:
    made, swapped = toy(), toy()
    swapped.models[TEACHER] = swapped.models[REFERENCE]
    for payload in ("sampled", "gather", "hidden"):
        torch.testing.assert_close(
            gradient(made, name="reference_kl", payload=payload), gradient(swapped, name="opd", payload=payload)
        )


def test_k3_as_grpo_differentiates_it_has_the_forward_gradient(toy: Any) -> None:
    made = toy(masked=False)
    p, r = logp(made).exp(), made.logp(*made.models[REFERENCE]).exp()
    forward = (p - r) @ made.head.detach() / len(made.row)
    actual = expectation(made, name="reference_kl", form="k3_loss")
    torch.testing.assert_close(actual, forward, rtol=1e-5, atol=1e-8)
