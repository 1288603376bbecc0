"""A loss that is a plain function, named in a recipe by its path."""

from typing import Any

import pytest
import torch
from torch import Tensor

from opd.errors import ConfigError, PluginError
from student.plugin.terms import build_terms

PATH = f"{__name__}:"


def reinforce(log_ratio: Tensor, advantage: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    return -advantage * logp


def summed(log_ratio: Tensor, advantage: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    return (-advantage * logp).sum()


def of_two(log_ratio: Tensor, advantage: Tensor) -> Tensor:
    return -advantage


def test_a_function_gives_the_gradient_of_the_same_formula(toy: Any) -> None:
    plain = {"name": "policy_gradient", "ratio": "none"}
    mine = toy().gradient(build_terms([{**plain, "loss": PATH + "reinforce"}]))
    theirs = toy().gradient(build_terms([plain]))
    assert mine[0].abs().max() > 0
    for found, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("nowhere:loss", "'nowhere:loss' cannot be imported"),
        ("reinforce", "package.module:function"),
        (PATH + "of_two", "log_ratio, advantage, logp and mask"),
    ],
)
def test_a_path_that_leads_to_no_such_function_is_refused(loss: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_terms([{"name": "policy_gradient", "loss": loss}])


def test_a_function_that_sums_over_positions_is_named(toy: Any) -> None:
    with pytest.raises(PluginError, match=r"summed.*number per position"):
        toy().gradient(build_terms([{"name": "policy_gradient", "loss": PATH + "summed"}]))


@pytest.mark.parametrize("entry", [{"name": "dispo"}, {"name": "grpo", "clip_high": 0.3}])
def test_a_function_beside_a_formula_or_bounds_that_it_replaces_is_refused(entry: dict[str, Any]) -> None:
    (term,) = build_terms([{**entry, "loss": PATH + "reinforce"}])
    with pytest.raises(ConfigError, match="loss does not use"):
        term.check(None, [term])  # type: ignore[arg-type]
