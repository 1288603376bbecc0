"""A student and a teacher that end their answers with different tokens."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import slow
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd.doctor import doctor
from opd.doctor.fleet import examine_fleet
from opd.doctor.stops import StopExaminer
from opd.errors import ConfigError, TeacherNotFoundError
from opd.fleet.client import TeacherFleet
from opd.wire.v1 import teacher_pb2 as pb
from student.commands.dry_run import check
from student.job.session import train
from student.settings.recipe import Recipe

END, OTHER = 1, 0


@pytest.fixture(scope="module")
def renamed(world: Path, serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The test world's teacher, which ends with <|pad|> where the original ends with <|end|>."""
    folder = tmp_path_factory.mktemp("renamed") / "teacher"
    shutil.copytree(world / "teacher", folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[[END, OTHER]] = head[[OTHER, END]].clone()
    model.generation_config.eos_token_id = model.config.eos_token_id = OTHER
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<|pad|>"
    tokenizer.save_pretrained(folder)
    return serve("--model", f"teacher={folder}", "--deterministic")


@pytest.fixture
def run(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[dict[str, float], str]]:
    """Train one step; gives its metrics and what the terminal showed."""

    def make(server: Any, payload: str, **teachers: Any) -> tuple[dict[str, float], str]:
        name = f"run{len(list(tmp_path.iterdir()))}"
        k = {"k": 16} if payload in ("gather", "topk") else {}
        recipe = make_recipe(
            run=str(tmp_path / name),
            teachers={"endpoints": [server.address], **teachers},
            objective=[{"name": "opd", "payload": payload, **k}],
            rollout={"prompts_per_step": 32, "max_new_tokens": 40},
            train={"steps": 1},
            eval={"prompts": 0},
        )
        train(recipe)
        (line,) = (recipe.run / "metrics.jsonl").read_text().splitlines()
        return json.loads(line), capsys.readouterr().err

    return make


@pytest.mark.parametrize("payload", ["hidden", *slow("sampled", "gather", "topk")])
def test_the_log_ratio_at_stop_positions_is_measured_and_explained(
    run: Callable[..., tuple[dict[str, float], str]], teacher: Any, renamed: Any, payload: str
) -> None:
    original, said = run(teacher, payload)
    assert "answers end, log T - log S is " in said and "different" not in said
    assert "nats (teacher): good, the teacher ends answers there too" in said
    metrics, said = run(renamed, payload)
    assert metrics["stop_log_ratio"] < original["stop_log_ratio"] - 2
    assert "if the teacher's own stop tokens count too: the two end with different tokens" in said
    assert "rollout.stop_tokens" in said and "teachers.map_stops" in said


@pytest.mark.parametrize("payload", ["gather", *slow("sampled", "topk")])
def test_a_mapped_teacher_teaches_as_if_it_ended_with_the_students_token(
    run: Callable[..., tuple[dict[str, float], str]], teacher: Any, renamed: Any, payload: str
) -> None:
    original, _ = run(teacher, payload)
    mapped, said = run(renamed, payload, map_stops=True)
    assert "as they do with teachers.map_stops" in said
    for name in ("reverse_kl", "grad_norm", "stop_log_ratio"):
        # What the original gives the other token, a hundredth where it ends, counts too.
        assert mapped[name] == pytest.approx(original[name], rel=0.02, abs=0.03), name


def test_hidden_states_are_refused_with_a_map(make_recipe: Callable[..., Recipe], renamed: Any) -> None:
    recipe = make_recipe(
        teachers={"endpoints": [renamed.address], "map_stops": True}, objective=[{"name": "opd", "payload": "hidden"}]
    )
    for start in (lambda: check(recipe, offline=False), lambda: train(recipe)):
        with pytest.raises(ConfigError, match="map_stops cannot change payload hidden"):
            start()


def test_too_few_candidates_are_refused_with_a_map(make_recipe: Callable[..., Recipe], renamed: Any) -> None:
    recipe = make_recipe(
        teachers={"endpoints": [renamed.address], "map_stops": True},
        objective=[{"name": "opd", "payload": "gather", "k": 2}],
    )
    with pytest.raises(ConfigError, match=r"2 stop tokens .* k is 2"):
        check(recipe, offline=False)


def test_the_dry_run_names_stop_tokens_of_the_teacher_that_do_not_stop_the_student(
    make_recipe: Callable[..., Recipe], teacher: Any, renamed: Any
) -> None:
    assert "also ends with" not in check(make_recipe(), offline=False)
    text = check(make_recipe(teachers={"endpoints": [renamed.address]}), offline=False)
    assert "teacher teacher also ends with '<|pad|>', after which the student continues: if it ends" in text
    named = make_recipe(teachers={"endpoints": [renamed.address]}, rollout={"stop_tokens": ["<|pad|>"]})
    assert "also ends with" not in check(named, offline=False)


def test_the_doctor_compares_the_ends_of_a_students_answers(
    world: Path, teacher: Any, renamed: Any, tmp_path: Path
) -> None:
    student = tmp_path / "student"
    shutil.copytree(world / "student", student)
    (student / "chat_template.jinja").unlink()  # it was taught plain text
    for server, differs in ((teacher, False), (renamed, True)):
        findings = list(examine_fleet([server.address], None, str(student), ["1+1=", "12+34=", "7+7="]))
        assert findings[0].subject == "student" and "'<|end|>' (id 1, from tokenizer and gen" in findings[0].text
        texts = [finding.text for finding in findings if finding.subject == "teacher"]
        assert any("also ends with '<|pad|>'" in text for text in texts) == differs
        (measured,) = [text for text in texts if "log T - log S is" in text]
        assert ("own stop tokens count too" in measured) == differs, measured


def test_the_doctor_measures_ends_where_a_teacher_scores_no_chosen_ids(
    world: Path, renamed: Any, tmp_path: Path
) -> None:
    student = tmp_path / "student"
    shutil.copytree(world / "student", student)
    (student / "chat_template.jinja").unlink()  # it was taught plain text
    examiner = StopExaminer(str(student), ["1+1=", "12+34=", "7+7="])
    with TeacherFleet.connect(renamed.address) as fleet:
        info = fleet.describe("teacher")
        del info.payloads[:]
        info.payloads.append(pb.PAYLOAD_KIND_SAMPLED)
        found = list(examiner.examine(fleet, info))
        assert "also ends with" in found[0][1]
        assert found[1][0] and "log T - log S is" in found[1][1] and "count too" not in found[1][1]
        info.name = "another"
        with pytest.raises(TeacherNotFoundError):
            list(examiner.examine(fleet, info))


def test_the_doctor_needs_a_fleet_for_a_student_and_names_one_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--fleet"):
        doctor(student="x")
    with pytest.raises(ConfigError, match="does not hold a model"):
        list(examine_fleet(["127.0.0.1:9"], None, str(tmp_path)))
