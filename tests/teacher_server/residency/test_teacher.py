"""The self-test that a teacher must pass before it serves."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from opd.errors import UnavailableError
from opd.wire.types import PayloadKind
from teacher_server.residency.teacher import self_test


@pytest.mark.parametrize(
    ("deterministic", "nats", "passes"),
    [(True, 0.0, True), (True, 1e-3, False), (False, 0.04, True), (False, 9.0, False)],
)
@pytest.mark.parametrize("kind", [PayloadKind.SAMPLED, PayloadKind.TOPK, PayloadKind.HIDDEN])
def test_scores_that_differ_when_repeated_fail_the_self_test_of_a_deterministic_engine_or_if_they_are_far_apart(
    kind: PayloadKind, deterministic: bool, nats: float, passes: bool, numpy_engine: Any
) -> None:
    class Wavering(numpy_engine):
        """Its second answer of one kind is lower than its first."""

        asked = 0

        @property
        def info(self) -> Any:
            return dataclasses.replace(super().info, deterministic=deterministic)

        def _one(self, entry: Any) -> Any:
            scores = super()._one(entry)
            if entry.spec.kind is kind:
                self.asked += 1
                name = "hidden" if kind is PayloadKind.HIDDEN else "sampled"
                lower = getattr(scores, name) - np.float32(nats * (self.asked - 1))
                return dataclasses.replace(scores, **{name: lower})
            return scores

    engine = Wavering()
    if passes:
        self_test(engine, "t")
        assert engine.asked == 2
    else:
        with pytest.raises(UnavailableError, match=f"'t' failed .* payload {kind}: .* differed"):
            self_test(engine, "t")


def test_an_engine_that_leaves_a_sequence_out_fails_the_self_test(numpy_engine: Any) -> None:
    engine = numpy_engine()
    engine.score = lambda batch: [None]
    with pytest.raises(UnavailableError, match=r"payload sampled: .* engine"):
        self_test(engine, "t")
