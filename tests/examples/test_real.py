"""examples/real.py: its prompts, its gate, and, where the package has been fetched, two layers of the real model."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import byte_fallback

from opd.config import load_settings
from opd.pretrained import read_causal_lm, read_config, read_tokenizer
from opd.tasks.encode import encode_prompt
from opd.tasks.prompt import Prompt
from opd.tasks.stops import generation_stops, stop_set
from opd.wire.fingerprint import token_bytes
from opd.wire.types import PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb
from student.commands.convert import convert
from student.commands.prune import prune
from student.job.session import train
from student.run.local_server import served
from student.scoring.translate import Translator
from student.settings.recipe import Recipe
from teacher_server.engines.base import EngineItem
from teacher_server.engines.transformers import TransformersEngine

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GGUF = Path(sys.prefix) / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real tokenizer and template, and the first two layers of the real weights."""
    if not GGUF.is_file():
        pytest.skip(f"{GGUF.name} is not in the environment; make real fetches it")
    folder = tmp_path_factory.mktemp("smollm2")
    found = convert(GGUF, folder / "whole")
    assert found.answer == "The capital of France is Paris." and found.license == "apache-2.0"
    prune(str(folder / "whole"), folder / "cut", drop=range(2, 30))
    return folder / "cut"


def test_the_prompts_differ_take_turns_by_domain_and_hold_their_answers(tmp_path: Path) -> None:
    from real_prompts import write

    train_rows, heldout = ([json.loads(line) for line in file.open()] for file in write(tmp_path))
    texts = [row["prompt"] for row in (*train_rows, *heldout)]
    assert len(set(texts)) == len(texts) and len(train_rows) > 2 * len(heldout) - 12 > 100
    assert [row["domain"] for row in heldout[:6]] == ["capital", "continent", "copy", "opposite", "sum", "open"]
    assert all(("answer" in row) == (row["domain"] != "open") for row in (*train_rows, *heldout))


@pytest.mark.parametrize(
    ("left", "gained", "passed"), [(0.58, 0.3, True), (0.7, 0.16, True), (0.71, 0.3, False), (0.5, 0.15, False)]
)
def test_the_gate_asks_for_both_a_smaller_divergence_and_more_right_answers(
    left: float, gained: float, passed: bool
) -> None:
    import real

    before, after = {"reverse_kl": 0.5, "accuracy": 0.0}, {"reverse_kl": 0.5 * left, "accuracy": gained}
    assert real.gate(before, after)[2] is passed


def test_the_french_verifier_takes_french_for_french_alone() -> None:
    from opd.tasks.function import load_verifier

    recipe: Any = load_settings(Recipe, EXAMPLES / "recipes" / "smollm2-135m-french.yaml")
    judge = load_verifier("regex", 5.0, recipe.prompts.verifier_options)
    for text, right in (
        ("Bonjour, le capital de Norway est Oslo.", True),
        ("La mer est un grand espace.", True),
        ("The capital of Norway is Oslo.", False),
        ("Les Paul played the guitar.", False),
    ):
        assert (judge.verify(Prompt.make("q"), text).status == "correct") is right, text


@pytest.mark.slow
def test_a_chat_is_rendered_and_ended_as_the_model_was_trained(cut: Path) -> None:
    tokenizer = read_tokenizer(cut)
    ids = encode_prompt(Prompt.make([{"role": "user", "content": "Hi 123"}]), tokenizer)
    text = tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi 123<|im_end|>\n<|im_start|>assistant\n")
    assert [token.text for token in stop_set(tokenizer, generation_stops(str(cut))).tokens] == ["<|im_end|>"]
    assert [tokenizer.decode([i]) for i in tokenizer("123")["input_ids"]] == ["1", "2", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("real_student", [True, False])
def test_the_real_tokenizer_is_aligned_with_another_byte_for_byte(cut: Path, real_student: bool) -> None:
    real, other = read_tokenizer(cut), byte_fallback()
    student, teacher = (real, other) if real_student else (other, real)
    info = pb.TeacherInfo(
        name="t",
        limits=pb.Limits(max_sequence_tokens=999),
        tokenizer=pb.TokenizerInfo(eos_id=teacher.eos_token_id),
    )
    translator = Translator(info, teacher, student, [student.eos_token_id])
    text = "Oslo 12345,  naïve 李雷💥👩‍👩‍👧 e\u0301\n\n\tdef f(x): return x\r\n"
    ids = [*student(text, add_special_tokens=False)["input_ids"], student.eos_token_id]
    prompt = Prompt.make("Hi\n")
    row: Any = SimpleNamespace(response_ids=np.array(ids, np.uint32), prompt=prompt, episode=None)
    found = translator.translate(row, prompt)
    answer = found.item.response_ids
    assert found.aligned.all() and answer[-1] == teacher.eos_token_id
    assert b"".join(token_bytes(teacher)[i] for i in answer[:-1]).decode().lstrip(" ") == text


@pytest.mark.slow
def test_every_text_survives_the_real_tokenizer_byte_for_byte(cut: Path) -> None:
    tokenizer = read_tokenizer(cut)
    pieces = token_bytes(tokenizer)

    # The model has no token for some bytes, which occur in control characters and unassigned planes alone.
    @settings(max_examples=100, deadline=None)
    @given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn"]), max_size=40))
    def survives(text: str) -> None:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(pieces[i] for i in ids) == text.encode() and tokenizer.decode(ids) == text

    survives()


@pytest.mark.slow
def test_a_teacher_of_it_scores_as_plain_transformers_does(cut: Path) -> None:
    ids = torch.tensor(read_tokenizer(cut)("The capital of Norway is Oslo.")["input_ids"])
    item = ScoreItem(ids.numpy().astype(np.uint32), 3)
    (scores,) = TransformersEngine(str(cut)).score([EngineItem(item, PayloadSpec.sampled(), 1.0)])
    model = read_causal_lm(cut, config=read_config(cut), dtype="auto").eval()
    with torch.no_grad():
        logp = model(ids[None]).logits[0].log_softmax(-1)
    wanted = logp[2:-1].gather(-1, ids[3:, None]).squeeze(-1)
    assert torch.allclose(torch.from_numpy(scores.sampled.copy()), wanted, atol=1e-4)


@pytest.mark.slow
def test_the_recipe_that_ships_trains_it(cut: Path, tmp_path: Path) -> None:
    from real_prompts import write

    file, heldout = write(tmp_path / "prompts")
    small = ["train.steps=2", "train.warmup_steps=1", "rollout.prompts_per_step=2", "rollout.max_new_tokens=4"]
    with served({"teacher": cut}, tmp_path) as address:
        overrides = [f"run={tmp_path / 'run'}", f"model.path={cut}", f"teachers.endpoints=[{address}]", *small]
        overrides += [f"prompts.file={file}", f"prompts.heldout_file={heldout}", "eval.prompts=6"]
        result = train(load_settings(Recipe, EXAMPLES / "recipes" / "smollm2-135m-pruned.yaml", overrides))
    assert result["steps"] == 2 and result["before"]["judged"] == 5
    # The student is its teacher, but for bf16.
    assert result["before"]["reverse_kl"] == pytest.approx(0.0, abs=0.02)
