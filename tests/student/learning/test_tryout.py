"""A dry run calls every term once on two invented tokens, before any model is loaded."""

from typing import Any

import pytest
import torch

from opd.errors import PluginError
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import SCORES, TEACHER, Needs, SignalNeed
from student.data.token_batch import TokenBatch
from student.learning.tryout import try_terms
from student.plugin.terms import OBJECTIVES, Term, TermOutput, build_terms


@pytest.mark.parametrize("name", [entry.name for entry in OBJECTIVES])
def test_every_registered_term_computes_its_loss_on_invented_tokens(name: str) -> None:
    assert list(try_terms(build_terms([{"name": name}]))) == []


class Careless(Term):
    """Declares log-probs of sampled tokens, and reads hidden states."""

    def needs(self) -> Needs:
        return Needs(signals=(SignalNeed(TEACHER, PayloadSpec.sampled()),), student=frozenset({SCORES}))

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        return TermOutput(batch.signal(PayloadKind.HIDDEN).hidden)


class Summing(Term):
    """Returns one number for all positions."""

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        return TermOutput(torch.zeros(()))


class Broken(Term):
    """Has a mistake of its own."""

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        return TermOutput(batch.rows[0].notes["gap"] * batch.weights)


def entry(cls: type[Term]) -> list[dict[str, Any]]:
    return [{"name": f"{__name__}:{cls.__name__}"}]


@pytest.mark.parametrize(("cls", "said"), [(Careless, "read hidden from the teacher"), (Summing, "2 positions")])
def test_what_a_term_reads_undeclared_or_returns_in_another_shape_is_refused(cls: type[Term], said: str) -> None:
    with pytest.raises(PluginError, match=said):
        list(try_terms(build_terms(entry(cls))))


def test_a_failure_that_an_invented_row_may_explain_is_only_said() -> None:
    (remark,) = try_terms(build_terms(entry(Broken)))
    assert "KeyError: 'gap'" in remark
