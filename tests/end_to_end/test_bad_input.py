"""Wrong inputs: one clear sentence, an exit code of its own, nothing lost."""

import itertools
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import yaml

from opd import PayloadSpec, ScoreItem, TeacherFleet, errors
from student.state.parts import Part

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def opd(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call the command line in this process; gives exit code and what it wrote to stderr."""

    def run(*arguments: str) -> tuple[int, str]:
        import opd.cli

        monkeypatch.setattr(sys, "argv", ["opd", *arguments])
        with pytest.raises(SystemExit) as caught:
            opd.cli.main()
        return int(caught.value.code or 0), capsys.readouterr().err

    return run


@pytest.fixture
def recipe_file(recipe_data: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_data))
    return path


def one_sentence(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    return len(lines) == 1 and text.rstrip().endswith(lines[0]) and "Traceback" not in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.learning_rat=1", ["train.learning_rat", "learning_rate"]),
        ("rolout.max_new_tokens=1", ["rolout", "rollout"]),
        ("objective.0.paylod=hidden", ["paylod", "payload"]),
        ("objective.0.name=opdd", ["opdd", "'opd'"]),
        ("objective.0.divergence=jsd", ["mixture"]),
        ("train.steps=0", ["train.steps", "greater than or equal to 1"]),
        ("seed=9223372036854775808", ["seed", "less than 9223372036854775808"]),
        ("train.warmup_steps=1000", ["warmup_steps", "lower it"]),
        ("objective.0.aggregation=median", ["median", "token_mean"]),
        ("teachers=null", ["teachers.endpoints"]),
        ("prompts={task: adition}", ["adition", "addition"]),
        ("prompts={}", ["dataset, file, task or mix"]),
        ("train.betas=[0.9, 1.0]", ["train.betas.1", "less than 1"]),
        ("--offline", ["--dry-run"]),
        ("train.threads=1000000", ["train.threads", "1024"]),
        ("objective=[{name: sft}]", ["expert_rows"]),
        ("objective=opd", ["it must be a list, in [brackets], for example [{name: opd}]"]),
        ("objective=[opd]", ["objective.0", "a group of keys, in {braces}, for example [{name: opd}]"]),
        ("methods=adwin", ["it must be a list, in [brackets], for example [{name: adwin}]"]),
        ("train=3", ["train = 3", "it must be a group of keys"]),
        ("model.path=studnet", ["'studnet' is not a folder here", "Qwen/Qwen3-1.7B"]),
        ("objective=[{name: grpo}]", ["grpo", "rollout.samples_per_prompt is 1"]),
        ("objective=[{name: rloo}]", ["rloo", "rollout.samples_per_prompt is 1"]),
        ("methods=[{name: expert_rows, share: 0.01}]", ["share 0.01 of method expert_rows", "none of the 8 rows"]),
        ("objective=[{name: opd, payload: hidden, watch_topk: 4000}]", ["watch_topk", "4000", "260"]),
    ],
)
def test_a_wrong_recipe_exits_with_2_and_names_key_and_fix(
    opd: Run, recipe_file: Path, override: str, words: list[str]
) -> None:
    code, err = opd("train", str(recipe_file), override)
    assert code == 2 and one_sentence(err), err
    assert all(word in err for word in words), err


MISTAKES = [
    "train RECIPE train.stepz=1",
    "train RECIPE objective.0.paylod=hidden",
    "train RECIPE model.path=studnet",
    "plan RECIPE train.stepz=1",
    "plan RECIPE objective.0.paylod=hidden",
    "plan RECIPE model.path=studnet",
    "eval MODEL --recipe RECIPE train.stepz=1",
    "answers RECIPE --model MODEL train.stepz=1",
    "answers RECIPE --model studnet",
    "answers RECIPE --model MODEL --how nicely",
    "premise RECIPE train.stepz=1",
    "premise RECIPE --rows 7",
    "premise RECIPE --teacher studnet",
    "merge OUT MODEL studnt",
    "lab run baslines",
    "lab run baselines --arms nobody",
    "lab premise baslines",
    "lab report baslines",
]


def test_a_mistake_is_refused_before_torch_is_even_imported(recipe_file: Path, world: Path) -> None:
    # All in one process: where the first of them that imports torch stands is seen, too.
    code = (
        "import sys, opd.cli\nfor line in sys.argv[1:]:\n    sys.argv = ['opd', *line.split()]\n"
        "    try:\n        opd.cli.main()\n"
        "    except SystemExit as stop:\n        print(stop.code, 'torch' in sys.modules)"
    )
    named = {"RECIPE": str(recipe_file), "MODEL": str(world / "student"), "OUT": str(recipe_file.with_name("out"))}
    lines = [" ".join(named.get(word, word) for word in command.split()) for command in MISTAKES]
    out = subprocess.run([sys.executable, "-c", code, *lines], capture_output=True, text=True, check=True)
    said = dict(zip(MISTAKES, out.stdout.splitlines(), strict=True))
    assert said == dict.fromkeys(MISTAKES, "2 False"), out.stderr


def test_an_unreachable_teacher_exits_with_7_and_names_the_address(opd: Run, recipe_file: Path) -> None:
    code, err = opd("train", str(recipe_file), "teachers.endpoints=[127.0.0.1:9]", "teachers.fleet.connect_seconds=0.5")
    assert code == 7 and one_sentence(err) and "127.0.0.1:9" in err, err


def test_a_teacher_that_is_not_served_exits_with_4_and_lists_those_that_are(opd: Run, recipe_file: Path) -> None:
    code, err = opd("train", str(recipe_file), "teachers.default=plato")
    assert code == 4 and one_sentence(err) and "plato" in err and "student, teacher" in err, err


def test_another_tokenizer_exits_with_5_and_names_both_sides(opd: Run, recipe_file: Path, world: Path) -> None:
    code, err = opd("train", str(recipe_file), f"model.path={world / 'stranger'}")
    assert code == 5 and one_sentence(err), err
    assert "stranger" in err and "'teacher'" in err and "tokenizer" in err


def test_padded_vocabulary_rows_are_tolerated_on_both_sides(
    opd: Run, recipe_file: Path, world: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = opd("train", str(recipe_file), f"model.path={world / 'padded'}", "train.steps=1", "eval.prompts=0")
    assert code == 0
    server = serve("--model", f"teacher={world / 'padded'}")
    code, err = opd(
        "train",
        str(recipe_file),
        f"teachers.endpoints=[{server.address}]",
        "train.steps=1",
        f"run={world.parent / 'pad'}",
    )
    shutil.rmtree(world.parent / "pad", ignore_errors=True)
    assert code == 0, err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.max_new_tokens=4000", ["4032 tokens", "512"]),
        ("objective.0.k=4000", ["4000", "260"]),
    ],
)
def test_limits_of_the_teacher_exit_with_5_before_the_first_step(
    opd: Run, recipe_file: Path, override: str, words: list[str]
) -> None:
    code, err = opd("train", str(recipe_file), override)
    assert code == 5 and one_sentence(err) and all(word in err for word in words), err


def test_an_existing_run_folder_exits_with_13(opd: Run, recipe_file: Path, recipe_data: dict[str, Any]) -> None:
    folder = Path(recipe_data["run"])
    folder.mkdir()
    (folder / "notes").write_text("mine")
    for flags in ([], ["--dry-run"]):
        code, err = opd("train", str(recipe_file), *flags)
        assert code == 13 and one_sentence(err) and (folder / "notes").read_text() == "mine", err


def onto_full_disks(monkeypatch: pytest.MonkeyPatch, saves: int) -> None:
    """Have the first `saves` checkpoints meet a full disk, half-way."""
    import student.job.saving

    original, begun = student.job.saving.state_parts, itertools.count()

    def parts(name: str, state: dict[str, Any], **more: Any) -> list[Part]:
        first, *rest = original(name, state, **more)
        full = next(begun) < saves

        def write(folder: Path) -> Iterable[Path]:
            (folder / name).parent.mkdir(exist_ok=True)
            if full:
                (folder / f"{name}.json").symlink_to("/dev/full")
            return first.write(folder)

        return [Part(first.name, write), *rest]

    monkeypatch.setattr(student.job.saving, "state_parts", parts)


def test_a_full_disk_that_stays_full_exits_with_13_and_keeps_the_checkpoints_before(
    opd: Run, recipe_file: Path, recipe_data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opd("train", str(recipe_file), "train.steps=2", "eval.prompts=0")[0] == 0
    onto_full_disks(monkeypatch, 99)
    more = ["train.steps=3", "eval.prompts=0", "train.disk_patience=0", "--resume"]
    code, err = opd("train", str(recipe_file), *more)
    assert code == 13 and one_sentence(err) and "No space left" in err and "step-000003" in err, err
    folder = Path(recipe_data["run"])
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000001", "step-000002"]


def test_a_run_waits_for_space_on_a_full_disk_and_goes_on(
    opd: Run, recipe_file: Path, recipe_data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    onto_full_disks(monkeypatch, 2)
    code, err = opd("train", str(recipe_file), "train.steps=2", "eval.prompts=0")
    said = " ".join(err.split())
    assert code == 0 and "step-000001" in said, err
    assert "No space left on device" in said and "the run waits up to 3600 s (train.disk_patience) for space" in said
    assert "there is space again after" in said and said.count("the run waits") == 1
    folder = Path(recipe_data["run"])
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000001", "step-000002"]


def test_a_resume_that_does_not_fit_the_run_is_refused_as_a_dry_run_says(
    opd: Run, recipe_file: Path, recipe_data: dict[str, Any], world: Path, tmp_path: Path
) -> None:
    first = Path(recipe_data["run"])
    assert opd("train", str(recipe_file), "train.steps=2", "eval.prompts=0")[0] == 0
    kept = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    link = tmp_path / "link"
    link.symlink_to(world / "student")
    other = str(world / "padded")
    for changes, code, said in (
        (["train.steps=1"], 2, ["train.steps is 1", "step 2", "to 2 to end the run there"]),
        ([f"model.path={other}"], 12, ["model.path was", str(world / "student"), other, "a link at its old place"]),
        (["model.revision=v2"], 12, ["model.revision was null", "'v2'"]),
        (["train.steps=2", f"model.path={link}"], 0, []),
    ):
        for dry in (["--dry-run"], [] if code else ["--dry-run", "train.steps=3"]):
            found, err = opd("train", str(recipe_file), "--resume", *changes, *dry)
            assert found == code and all(word in err for word in said), (changes, dry, err)
            assert one_sentence(err) or not code
    assert {path: path.read_bytes() for path in kept} == kept


def test_damaged_checkpoints_exit_with_12_and_stay_for_a_look(
    opd: Run, recipe_file: Path, recipe_data: dict[str, Any]
) -> None:
    assert opd("train", str(recipe_file), "train.steps=1", "eval.prompts=0")[0] == 0
    manifest = next(Path(recipe_data["run"]).glob("checkpoints/*/trainer/learner.safetensors"))
    manifest.write_bytes(b"")
    for dry in ([], ["--dry-run"]):
        code, err = opd("train", str(recipe_file), "--resume", *dry)
        assert code == 12 and one_sentence(err) and "learner.safetensors" in err and manifest.exists(), err


def test_a_missing_prompt_file_exits_with_16(opd: Run, recipe_file: Path) -> None:
    code, err = opd("train", str(recipe_file), "prompts={file: nowhere.jsonl}")
    assert code == 16 and one_sentence(err) and "nowhere.jsonl" in err, err


def test_too_few_heldout_prompts_exit_with_16_before_the_run_folder_is_made(
    opd: Run, recipe_file: Path, recipe_data: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "1+2="}\n')
    code, err = opd("train", str(recipe_file), f"prompts={{file: {tmp_path / 'p.jsonl'}}}", "eval.prompts=8")
    assert code == 16 and one_sentence(err) and "held-out" in err, err
    assert not Path(recipe_data["run"]).exists()


@pytest.mark.parametrize(
    ("method", "code", "words"),
    [
        ("objective=[{name: grpo}]", 16, ["rewards", "answer_column"]),
        ("methods=[{name: effopd}]", 2, ["gate accuracy", "reverse_kl"]),
        ("methods=[{name: effopd, gate: {kind: paired}}]", 2, ["gate paired", "reverse_kl"]),
    ],
)
def test_what_needs_verdicts_is_refused_on_prompts_without_answers(
    opd: Run, recipe_file: Path, tmp_path: Path, method: str, code: int, words: list[str]
) -> None:
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{i}+1="}}\n' for i in range(200)))
    prompts = f"prompts={{file: {tmp_path / 'p.jsonl'}}}"
    found, err = opd("train", str(recipe_file), prompts, method, "rollout.samples_per_prompt=2", "eval.prompts=0")
    assert found == code and one_sentence(err) and all(word in err for word in words), err


@pytest.mark.parametrize("attention", ["flash_attention_2", "nonsense"])
def test_an_attention_that_is_not_there_exits_with_2(opd: Run, recipe_file: Path, attention: str) -> None:
    code, err = opd("train", str(recipe_file), f"model.attention={attention}")
    assert code == 2 and one_sentence(err) and attention.split("_", maxsplit=1)[0] in err.lower(), err


def test_damaged_weights_of_a_student_exit_with_2(opd: Run, recipe_file: Path, world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "student", tmp_path / "student")
    weights = tmp_path / "student" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    code, err = opd("train", str(recipe_file), f"model.path={tmp_path / 'student'}")
    assert code == 2 and one_sentence(err) and str(tmp_path / "student") in err, err


def test_a_missing_student_exits_with_2(opd: Run, recipe_file: Path) -> None:
    code, err = opd("train", str(recipe_file), "model.path=/nowhere/student")
    assert code == 2 and one_sentence(err) and "/nowhere/student" in err, err


def test_a_port_in_use_exits_with_14(world: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "teacher_server", "--model", str(world / "teacher"), "--port", port]
        out = forked.run(command)
    assert out.returncode == 14 and port in out.stderr and "Traceback" not in out.stderr, out.stderr


ROW = np.arange(4, 14, dtype=np.uint32)


@pytest.mark.parametrize(
    ("item", "spec", "word"),
    [
        (ScoreItem(np.array([1, 2, 260], np.uint32), 1), PayloadSpec.sampled(), "260"),
        (ScoreItem(ROW, 10), PayloadSpec.sampled(), "response"),
        (ScoreItem(ROW, 0), PayloadSpec.sampled(), "prompt"),
        (ScoreItem(np.ones(513, np.uint32), 1), PayloadSpec.sampled(), "512"),
        (ScoreItem(ROW, 1), PayloadSpec.topk(261), "261"),
        (ScoreItem(ROW, 1), PayloadSpec.gather(2), "gather_ids"),
        (ScoreItem(ROW, 9, np.array([[3, 300]], np.uint32)), PayloadSpec.gather(2), "300"),
        (ScoreItem(ROW, 9, np.array([[3, 3]], np.uint32)), PayloadSpec.gather(2), "distinct"),
    ],
)
def test_a_row_that_can_never_be_scored_is_refused_in_words(
    teacher: Any, item: ScoreItem, spec: PayloadSpec, word: str
) -> None:
    with TeacherFleet.connect(teacher.address) as fleet:
        with pytest.raises(errors.InvalidRequestError, match=word):
            fleet.score("teacher", [item], spec)
        assert fleet.score("teacher", [ScoreItem(ROW, 1)], PayloadSpec.sampled())[0].sampled is not None


def test_a_teacher_with_nan_weights_is_refused_or_fails_without_poisoning_a_step(
    world: Path, tmp_path: Path, serve: Any
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(world / "teacher", broken)
    tensors = load_file(broken / "model.safetensors")
    name = next(n for n in tensors if "mlp" in n)
    tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"(?i)nan|finite"):
        serve("--model", f"teacher={broken}")
