"""The student as a served model: its scores are the sampler's and a server's, and copies of it keep still or follow."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from saved_state import save_state

from opd.errors import CancelledError, CheckpointError, ConfigError
from opd.wire.types import PayloadSpec, ScoreItem
from student.data.batch import collate
from student.data.needs import Needs, SignalNeed, merge
from student.model.ranks import Ranks
from student.scoring.local import LocalModels
from student.settings.teachers import EmaSettings
from student.state.state_io import load_state

Make = Callable[..., tuple[Any, LocalModels]]
HINT = np.frombuffer(b"#####", np.uint8).astype(np.uint32) + 4


@pytest.fixture
def make(bench: Callable[..., Any]) -> Make:
    def made(temperature: float = 1.0, ema: EmaSettings | None = None, **train: Any) -> tuple[Any, LocalModels]:
        one = bench({"name": "opd", "k": 8}, **{"micro_batch_tokens": 64, **train})
        learner = one.learner
        local = LocalModels(
            learner.student,
            learner.ranks,
            learner.settings,
            ema or EmaSettings(),
            learner.accelerator.device,
            valid_vocab=len(one.tokenizer),
            temperature=temperature,
        )
        local.kept.start(["student", "initial", "ema"])
        return one, local

    return made


def weights(one: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in one.learner.named_parameters()}


def test_role_student_is_the_sampler(make: Make) -> None:
    one, local = make()
    rows = one.rows(samples=4)
    for row, scores in zip(rows, local.score("student", rows), strict=True):
        assert scores.sampled is not None
        np.testing.assert_allclose(scores.sampled, row.behaviour_logp, atol=1e-5)


def test_a_row_beyond_the_turn_of_a_longrope_changes_no_score_of_another(make: Make, longrope: Path) -> None:
    rows = make()[0].rows()
    assert min(row.longest for row in rows) <= 16 < max(row.longest for row in rows)
    together, alone = (
        make(student=longrope, micro_batch_tokens=tokens)[1].score("student", rows) for tokens in (100_000, 1)
    )
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one.sampled, other.sampled, atol=1e-5)  # type: ignore[arg-type]


def test_the_temperature_of_the_rollouts_is_the_default(make: Make) -> None:
    one, cold = make(temperature=0.7)
    rows = one.rows()
    at_default, at_named = cold.score("student", rows), cold.score("student", rows, temperature=0.7)
    at_one = cold.score("student", rows, temperature=1.0)
    for a, b, c, row in zip(at_default, at_named, at_one, rows, strict=True):
        np.testing.assert_array_equal(a.sampled, b.sampled)
        np.testing.assert_allclose(c.sampled, row.behaviour_logp, atol=1e-5)
        assert np.abs(np.asarray(a.sampled) - np.asarray(c.sampled)).max() > 1e-3


@pytest.mark.parametrize(
    "spec", [PayloadSpec.sampled(), PayloadSpec.topk(5, "f32"), PayloadSpec.gather(8, "f32"), PayloadSpec.hidden("f32")]
)
def test_every_payload_is_what_a_server_of_the_same_weights_answers(make: Make, world: Path, spec: PayloadSpec) -> None:
    from teacher_server.engines.base import EngineItem
    from teacher_server.engines.transformers import TransformersEngine

    one, local = make()
    rows = one.rows()
    items = [row.asked(gather=spec.kind == "gather")[0][0] for row in rows]
    engine = TransformersEngine(str(world / "student"), device="cpu", deterministic=True)
    served = engine.score([EngineItem(item, spec, 1.0) for item in items])
    for mine, theirs in zip(local.score("initial", items, spec), served, strict=True):
        for name in ("sampled", "values", "ids", "log_tail", "hidden"):
            got, wanted = getattr(mine, name), getattr(theirs, name)
            assert (got is None) == (wanted is None)
            if got is not None:
                np.testing.assert_allclose(got, wanted, atol=2e-5)
    if spec.kind == "hidden":
        np.testing.assert_array_equal(local.head("initial").weight.numpy(), engine.head().weight)


def test_payload_full_and_a_model_that_was_not_made_ready_are_refused(make: Make) -> None:
    one, local = make()
    rows = one.rows()
    with pytest.raises(ConfigError, match="use hidden"):
        local.score("student", rows, PayloadSpec.full())
    local.kept.start(["student"])
    with pytest.raises(ConfigError, match="'ema' was not prepared"):
        local.score("ema", rows)
    with pytest.raises(ConfigError, match=r"'teacher' .*computed in process"):
        local.kept.start(["teacher"])
    assert local.score("student", []) == []


def test_a_context_changes_scores_and_no_lengths_and_never_enters_the_students_input(make: Make) -> None:
    one, local = make()
    rows = one.rows()
    plain = local.score("ema", rows)
    for row in rows:
        row.contexts["ema"] = np.concatenate([HINT, row.prompt_ids])
    hinted = local.score("ema", rows)
    for row, a, b in zip(rows, plain, hinted, strict=True):
        assert a.sampled is not None and b.sampled is not None
        assert a.sampled.shape == b.sampled.shape == (row.length,)
        assert np.abs(a.sampled - b.sampled).max() > 1e-4
    inputs = collate(rows, range(len(rows)), torch.device("cpu")).input_ids
    assert not torch.isin(inputs, torch.from_numpy(HINT.astype(np.int64))).any()


def test_initial_stays_and_the_average_follows_by_its_formula(make: Make) -> None:
    one, local = make(ema=EmaSettings(decay=0.75, every=2))
    first, rows = weights(one), one.rows()
    before = local.score("initial", rows)
    seen = []
    for step in range(4):
        one.step(one.rows(step), step)
        metrics = local.kept.after_step(step)
        seen.append(weights(one))
        assert metrics["ema_distance"] > 0
    for a, b in zip(before, local.score("initial", rows), strict=True):
        np.testing.assert_array_equal(a.sampled, b.sampled)
    state = local.kept.state_dict()["ema"]
    for name, tensor in first.items():
        wanted = 0.75 * (0.75 * tensor + 0.25 * seen[1][name]) + 0.25 * seen[3][name]
        torch.testing.assert_close(state[name], wanted, rtol=1e-6, atol=1e-8)
    local.kept.refresh("ema", 0.0)
    for a, b in zip(local.score("ema", rows), local.score("student", rows), strict=True):
        np.testing.assert_array_equal(a.sampled, b.sampled)


def test_an_average_of_bfloat16_weights_moves(make: Make) -> None:
    one, _ = make()
    student = one.learner.student.to(torch.bfloat16)
    local = LocalModels(
        student,
        one.learner.ranks,
        one.learner.settings,
        EmaSettings(decay=0.999),
        torch.device("cpu"),
        valid_vocab=len(one.tokenizer),
        temperature=1.0,
    )
    local.kept.start(["ema"])
    begin = {name: tensor.clone() for name, tensor in local.kept.state_dict()["ema"].items()}
    with torch.no_grad():
        for p in student.parameters():
            p.add_(1.0)
    for step in range(3):
        local.kept.after_step(step)
    for name, tensor in local.kept.state_dict()["ema"].items():
        assert tensor.dtype == torch.float32
        assert ((tensor - begin[name]) > 0.002).all()
    assert len(local.score("ema", [ScoreItem(np.arange(5, dtype=np.uint32), 2)])) == 1


def test_the_students_weights_are_its_own_again_whatever_happens(make: Make) -> None:
    one, local = make()
    one.learner.student.dropout = True
    one.step(one.rows(), 0)
    before, rows = weights(one), one.rows(1)

    def give_up() -> None:
        raise CancelledError("enough")

    with pytest.raises(CancelledError):
        local.score("initial", rows, poll=give_up)
    local.score("initial", rows)
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, before[name])
    assert one.learner.student.training and one.learner.student.lm.training


def test_kept_weights_survive_a_checkpoint_and_others_are_refused(make: Make, tmp_path: Path) -> None:
    one, local = make()
    rows = one.rows()
    one.step(rows, 0)
    local.kept.after_step(0)
    save_state(tmp_path, "local", local.kept.state_dict())
    _, other = make()
    other.kept.load_state_dict(load_state(tmp_path, "local"))
    for model in ("initial", "ema"):
        for name, tensor in local.kept.state_dict()[model].items():
            assert torch.equal(other.kept.state_dict()[model][name], tensor)
    with pytest.raises(CheckpointError, match="another student"):
        other.kept.load_state_dict({"ema": {"strange": torch.zeros(1)}})
    fresh = LocalModels(
        one.learner.student,
        Ranks(one.learner.accelerator),
        one.learner.settings,
        EmaSettings(),
        torch.device("cpu"),
        valid_vocab=4,
        temperature=1.0,
    )
    with pytest.raises(CheckpointError, match="no weights of model 'initial'"):
        fresh.kept.start(["initial"], fresh=False)


def test_a_role_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"role 'techer'.* teacher, reference, student"):
        merge([Needs(signals=(SignalNeed("techer", PayloadSpec.sampled()),))])


SHARDED = """
import json, sys, torch
import numpy as np
from types import SimpleNamespace
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM
from opd.wire.types import ScoreItem
from student.model.model import Student
from student.settings.train import TrainSettings
from student.settings.teachers import EmaSettings
from student.scoring.local import LocalModels

rendezvous, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)

def gather(value):
    found = [None, None]
    dist.all_gather_object(found, value)
    return found

def models(student):
    local = LocalModels(student, SimpleNamespace(gather=gather), TrainSettings(micro_batch_tokens=8),
                        EmaSettings(decay=0.5), torch.device("cpu"), valid_vocab=38, temperature=1.0)
    local.kept.start(["student", "initial", "ema"])
    return local

def build():
    torch.manual_seed(0)
    return Student(Qwen3ForCausalLM(Qwen3Config(
        vocab_size=38, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)))

def sharded():
    student = build()
    mesh = init_device_mesh("cpu", (2,))
    for layer in student.lm.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(student, mesh=mesh)

def answers(student, items):
    local = models(student)
    with torch.no_grad():
        for p in student.parameters():
            p.mul_(1.1)
    local.kept.after_step(0)
    return [[s.sampled.tolist() for s in local.score(m, items)] for m in ("student", "initial", "ema")]

items = [ScoreItem(np.arange(i, i + 6, dtype=np.uint32), 2) for i in range(5)]
wanted = answers(build(), items)
# One rank has four micro-batches more than the other, and then the other way round none at all.
got = answers(sharded(), items if rank == 0 else items[:1])
none = answers(sharded(), items if rank == 1 else [])
size = len(items) if rank == 0 else 1
gap = max(np.abs(np.array(g) - np.array(w[:size])).max() for g, w in zip(got, wanted))
print(json.dumps([float(gap), [len(n) for n in none]]))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_a_sharded_student_read_different_numbers_of_rows(tmp_path: Path) -> None:
    found = [json.loads(lines[-1]) for lines in forked.ranks(SHARDED, tmp_path / "rendezvous")]
    for rank, (gap, lengths) in enumerate(found):
        assert gap < 1e-5
        assert lengths == ([0, 0, 0] if rank == 0 else [5, 5, 5])
