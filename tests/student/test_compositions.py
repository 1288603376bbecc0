"""Whatever parts a recipe puts together, it is refused at the start in a sentence, or it trains and can be resumed.

Recipes are drawn at random (tests/support/compositions.py). A drawn one that is refused loses what the refusal names
until it runs. `make fuzz` draws some hundreds (OPD_FUZZ_RECIPES); the suite draws a few.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from compositions import ANSWERING, Drawing, Drawn, lightened, write_prompts
from judge_servers import serving
from run_records import records
from safetensors.torch import load_file
from simulated_world import simulate
from slow_cases import slow

from opd.config import parse_settings
from opd.errors import OpdError
from student.commands.dry_run import check
from student.job.session import train
from student.settings.recipe import Recipe

RECIPES = int(os.environ.get("OPD_FUZZ_RECIPES", "6"))
TRIES = 25
DATA = [
    "had no effect in",  # tt_opd, of a mechanism that the answers never needed
    "fits a density to rewards from",  # bnpo, of rewards whose range no setting tells
]
"""What may end a run after its start: facts of the answers, which no look at the recipe tells."""


def says(path: str, body: Any) -> Any:
    """What every judge and chat model is told: a function of what it is asked."""
    if "prompt" in body:
        return {"choices": [{"text": "1"}]}
    asked = body.get("messages", [{"role": "user", "content": ""}])
    text = asked[-1]["content"]
    if asked[0]["role"] == "system" and asked[0]["content"].startswith(("You write", "You play", "You judge")):
        answer = simulate(asked)
    else:
        answer = (
            "Yes." if "yes" in text else '{"good": ["1"], "bad": []}' if "Quote" in text else f"Grade: {len(text) % 10}"
        )
    return {"score": 0.5, "choices": [{"message": {"content": answer}}]}


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    with serving() as server:
        server.say = says
        yield server.url


def refusal(data: Drawn) -> str:
    """Why the recipe is refused, "" where it is not: a sentence that names a key or a plug-in of the recipe."""
    try:
        recipe = parse_settings(Recipe, data)
        check(recipe, offline=False)
    except OpdError as error:
        said = str(error)
        # Groups of the recipe with their keys, and plug-ins with those of their settings that are drawn.
        known = set(re.findall(r"\w{3,}", json.dumps(data))) | set(Recipe.model_fields)
        assert said.endswith(".") and "\n" not in said and known & set(re.findall(r"\w+", said)), said
        return said
    return ""


def runnable(data: Drawn, random: Random) -> tuple[Drawn | None, int]:
    """The recipe without what is refused of it, None where nothing is left, and how often it was refused."""
    left: Drawn | None = data
    for refused in range(TRIES):
        said = refusal(left) if left is not None else ""
        if not said or left is None:
            return left, refused
        left = lightened(left, said, random)
    return None, TRIES


def hashes(checkpoint: Path) -> dict[str, str]:
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {str(file.relative_to(checkpoint)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def lines(recipe: Recipe) -> list[dict[str, Any]]:
    """The metrics of all steps, without calls to services: a process that goes on has no answers in memory."""
    return [{k: v for k, v in line.items() if not k.endswith(("_calls", "_kept"))} for line in records(recipe)]


def trains_and_resumes_alike(data: Drawn) -> None:
    """Train two steps, and the second one again from the checkpoint of the first, to the same bits."""
    recipe = parse_settings(Recipe, data)
    try:
        last = Path(train(recipe)["checkpoint"])
    except OpdError as error:
        assert any(said in str(error) for said in DATA), f"{error} {json.dumps(data)}"
        return
    straight, kept = lines(recipe), hashes(last)
    assert all(math.isfinite(value) for line in straight for value in line.values() if isinstance(value, float)), data
    weights = [tensor for file in last.rglob("*.safetensors") for tensor in load_file(file).values()]
    assert all(torch.isfinite(tensor).all() for tensor in weights if tensor.is_floating_point()), data
    if last.name != "step-000002":  # the recipe itself ends a run of one step
        return
    shutil.rmtree(last)
    again = Path(train(recipe, resume=True)["checkpoint"])
    assert hashes(again) == kept, f"a resumed run has other weights: {json.dumps(data)}"
    assert lines(recipe) == straight, f"a resumed run has other metrics: {json.dumps(data)}"


@pytest.mark.parametrize("seed", [*range(3), *slow(*range(3, RECIPES))])
def test_a_drawn_recipe_is_refused_in_a_sentence_or_trains_and_resumes_alike(
    world: Path, experts: Path, teacher: Any, judge: str, tmp_path: Path, seed: int
) -> None:
    drawing = Drawing(seed)
    data = drawing.recipe(world, experts, teacher.address, write_prompts(tmp_path / "prompts.jsonl"))
    data = json.loads(json.dumps({**data, "run": str(tmp_path / "run")}).replace(ANSWERING, judge))
    found, _ = runnable(data, drawing.random)
    if found is not None:
        trains_and_resumes_alike(found)
