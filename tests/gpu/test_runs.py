"""Short trainings of a student on a GPU with a served teacher."""

from collections.abc import Callable

import pytest
from run_records import metrics_of

from student.job.session import train
from student.settings.recipe import Recipe

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_learns_and_goes_on_from_its_checkpoint(recipe: Callable[..., Recipe], staleness: int) -> None:
    job = recipe(max_staleness=staleness)
    train(job)
    longer = job.model_copy(update={"train": job.train.model_copy(update={"steps": 5})})
    summary = train(longer, resume=True)
    lines = metrics_of(job.run)
    assert summary["steps"] == 5 and [line["step"] for line in lines] == list(range(1, 6))
    assert all(line["grad_norm"] > 0 and line["loss/opd"] < float("inf") for line in lines)
    # What the learner computes is what was sampled, up to half precision.
    assert all(line["mismatch/log_ratio"] < 0.05 for line in lines)
