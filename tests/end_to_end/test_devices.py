"""A whole run on an accelerator that is not a GPU: a tensor left on the CPU ends it, and the numbers are the CPU's."""

import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import forked
import pytest
from run_records import records
from slow_cases import slow
from torch.utils import backend_registration

from opd.config import parse_settings
from student.job.session import train
from student.settings.recipe import Recipe

ON_DEVICE = """
import sys
import pretend_device
import json
from opd.config import parse_settings
from student.job import session
from student.settings.recipe import Recipe

build = session.build_job

def told(*given, **named):
    job = build(*given, **named)
    print({str(parameter.device) for parameter in job.learner.student.parameters()})
    return job

session.build_job = told
session.train(parse_settings(Recipe, json.loads(sys.argv[1])))
"""
pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no backends in Python",
)


def on_device(script: str, *arguments: str) -> CompletedProcess[str]:
    """Run a script in a process of its own, because a backend of torch's is there for good."""
    support = Path(__file__).parents[1] / "support"
    code = f"import sys; sys.path.insert(0, {str(support)!r})\n{script}"
    return forked.run([sys.executable, "-c", code, *arguments])


@pytest.mark.parametrize("staleness", [1, *slow(0)])
def test_a_run_on_an_accelerator_learns_what_a_run_on_the_cpu_does(
    make_recipe: Callable[..., Recipe], tmp_path: Path, staleness: int
) -> None:
    objective = [{"name": "opd", "k": 8, "importance_cap": 2.0}]
    recipe = make_recipe(objective=objective, train={"steps": 3, "max_staleness": staleness})
    train(recipe)
    there = parse_settings(Recipe, recipe.model_dump(mode="json") | {"run": str(tmp_path / "there")})
    done = on_device(ON_DEVICE, there.model_dump_json())
    assert done.returncode == 0, done.stderr[-3000:]
    assert "{'pretend:0'}" in done.stdout
    told = ("loss/opd", "reverse_kl", "student_entropy", "grad_norm", "response_length")
    for here, gone in zip(records(recipe), records(there), strict=True):
        assert {name: gone[name] for name in told} == pytest.approx({name: here[name] for name in told}, rel=1e-3)


def test_a_tensor_left_on_the_cpu_is_refused_as_on_a_gpu() -> None:
    done = on_device("import pretend_device, torch; torch.ones(2, device='pretend') + torch.ones(2)")
    assert done.returncode == 1 and "Expected all tensors to be on the same device" in done.stderr
