"""EffOPD's search by hand: where the weights end, where the next displacement starts, and what the moments become.

Evaluations are scripted, and the weights small numbers; whole runs are in test_windows_and_jumps.py.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.config import parse_settings
from opd.errors import ConfigError
from student.data.report import EvalReport
from student.methods.jumps.effopd import EffOpd, EffOpdSettings

MOVED, HELD = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"


class Scripted:
    """A student of two tensors, whose evaluations are given; it notes where the moved one stood at each."""

    def __init__(self, anchor: float, accuracies: Sequence[float], dtype: torch.dtype = torch.float32) -> None:
        self.weights = {name: torch.tensor([anchor], dtype=dtype) for name in (MOVED, HELD)}
        self.moments = {
            name: {"exp_avg": torch.tensor([1.0]), "exp_avg_sq": torch.tensor([2.0])} for name in self.weights
        }
        self.accuracies = list(accuracies)
        self.seen: list[float] = []
        self.seeds: list[tuple[object, ...]] = []

    @property
    def at(self) -> float:
        return float(self.weights[MOVED])

    def move(self, to: float) -> None:
        self.weights[MOVED].fill_(to)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights.items())

    def optimizer_moments(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        return iter(self.moments.items())

    def training_prompts(self, count: int, *, seed_names: Sequence[object]) -> list[Any]:
        return [None] * count

    def evaluate(self, prompts: Sequence[Any], *, seed_names: tuple[object, ...], **_: Any) -> EvalReport:
        self.seen.append(self.at)
        self.seeds.append(seed_names)
        accuracy = self.accuracies.pop(0)
        if accuracy < 0:
            raise KeyboardInterrupt
        return EvalReport(accuracy, (accuracy, accuracy), 10.0, 0.0, None, 0)


def started(student: Scripted, saved: dict[str, Any] | None = None, **settings: Any) -> EffOpd:
    method = EffOpd(parse_settings(EffOpdSettings, {"name": "effopd", **settings}))
    if saved is not None:
        method.load_state_dict(saved)
    method.start(student)  # type: ignore[arg-type]
    return method


def search(method: EffOpd, student: Scripted, step: int) -> dict[str, float]:
    return method.after_update(step, student)  # type: ignore[arg-type]


def test_the_search_ends_at_the_first_refused_candidate_and_the_last_accepted_one_stays() -> None:
    student = Scripted(1.0, [0.5, 0.6, 0.7, 0.7])
    method = started(student)
    student.move(3.0)
    found = search(method, student, 0)
    assert student.seen == [3.0, 7.0, 11.0, 15.0]  # 3 + 2k (3 - 1); a draw is refused
    assert student.at == 11.0 and float(student.weights[HELD]) == 1.0
    assert found == {
        "effopd/displacement": 5.0,
        "effopd/accepted": 2.0,
        "effopd/tried": 3.0,
        "effopd/jumps": 1.0,
        "effopd/gate_accuracy_before": 0.5,
        "effopd/gate_accuracy": 0.7,
    }


@pytest.mark.parametrize(("anchor", "candidate"), [("kept", 8.0 + 2 * (8.0 - 7.0)), ("raw", 8.0 + 2 * (8.0 - 3.0))])
def test_the_next_displacement_starts_where_the_last_search_ended_or_began(anchor: str, candidate: float) -> None:
    student = Scripted(1.0, [0.5, 0.6, 0.5, 0.5, 0.5])
    method = started(student, anchor=anchor)
    student.move(3.0)
    search(method, student, 0)
    assert student.at == 7.0
    student.move(8.0)
    resumed = started(student, method.state_dict(), anchor=anchor)
    found = search(resumed, student, 1)
    assert student.seen[-2:] == [8.0, candidate]
    assert student.at == 8.0 and found["effopd/displacement"] == 1.0 and found["effopd/jumps"] == 1.0


@pytest.mark.parametrize(
    ("moments", "expected"), [("keep", (1.0, 2.0)), ("reset", (0.0, 0.0)), ("rescale", (1 / 5, 2.0))]
)
def test_moments_of_what_jumped_are_kept_reset_or_rescaled_by_the_growth(
    moments: str, expected: tuple[float, float]
) -> None:
    student = Scripted(1.0, [0.5, 0.6, 0.7, 0.6, 0.5, 0.5])
    method = started(student, moments=moments)
    student.move(3.0)
    for step in (0, 1):  # the second search is refused, and changes no moments
        search(method, student, step)
        assert [float(value) for value in student.moments[MOVED].values()] == pytest.approx(expected)
        assert [float(value) for value in student.moments[HELD].values()] == [1.0, 2.0]


def test_no_search_is_made_between_powers_of_two_or_after_the_last_update_for_one() -> None:
    student = Scripted(0.0, [1.0] * 99)
    method = started(student, until=4)
    searched = [step + 1 for step in range(17) if search(method, student, step)]
    assert searched == [1, 2, 4]


@pytest.mark.parametrize(("kind", "alike"), [("accuracy", False), ("paired", True)])
def test_candidates_share_their_random_numbers_but_for_the_gate_of_the_paper(kind: str, alike: bool) -> None:
    student = Scripted(0.0, [0.5, 0.4, 0.5, 0.4])
    method = started(student, gate={"kind": kind})
    for step in (0, 1):
        search(method, student, step)
    first, second, other, _ = student.seeds
    assert (first == second) == alike and first != other


def test_an_interrupted_search_leaves_the_weights_that_it_began_with() -> None:
    student = Scripted(1.0, [0.5, 0.6, -1.0])
    method = started(student)
    student.move(3.0)
    before = method.state_dict()
    with pytest.raises(KeyboardInterrupt):
        search(method, student, 0)
    assert student.seen[-1] == 11.0 and student.at == 3.0 and method.state_dict() == before


def test_a_jump_of_bfloat16_weights_is_rounded_once() -> None:
    student = Scripted(0.5, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], torch.bfloat16)
    method = started(student)
    student.move(1.0078125)
    search(method, student, 0)
    exact = 1.0078125 + 10 * (1.0078125 - 0.5)
    assert student.at == float(torch.tensor(exact).bfloat16()) != float(torch.tensor(1.0078125 + 5.0625).bfloat16())


def test_a_gate_that_cannot_be_measured_and_a_student_of_other_names_are_refused() -> None:
    student = Scripted(0.0, [float("nan")])
    with pytest.raises(ConfigError, match="gate accuracy"):
        search(started(student), student, 0)
    student = Scripted(0.0, [0.5])
    with pytest.raises(ConfigError, match="gate reverse_kl cannot be measured"):
        search(started(student, gate={"kind": "reverse_kl"}), student, 0)
    student.weights = {HELD: torch.zeros(1)}
    with pytest.raises(ConfigError, match="attention or MLP tensors"):
        started(student)
    assert started(student, tensors="all").state_dict()["anchor"].keys() == {HELD}
