"""LoRA and DoRA students: what is trained, what is saved, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from opd.adapters import adapter_settings, fold_adapter, is_adapter, split_adapter
from opd.errors import CheckpointError, ConfigError
from student.model.lora import adapters_off
from student.model.model import Student, Weights, load_student
from student.settings.model import LoraSettings, ModelSettings

IDS = torch.arange(12).reshape(2, 6)


def make(world: Path, adapter: Path | None = None, dtype: str = "float32", **settings: Any) -> Student:
    torch.manual_seed(0)
    lora = LoraSettings(**{"rank": 4, "alpha": 8, **settings})
    return load_student(
        str(world / "student"),
        dtype=dtype,
        attention=None,
        gradient_checkpointing=False,
        lora=lora,
        adapter=adapter,
    )


def moved(student: Student) -> Student:
    """The student after something has been learned."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in student.parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return student


@torch.no_grad()
def logits(lm: Any) -> torch.Tensor:
    return lm.eval()(IDS).logits


@pytest.mark.parametrize("dora", [False, True])
def test_only_factors_are_trained_and_without_them_the_model_is_the_base(world: Path, dora: bool) -> None:
    base = AutoModelForCausalLM.from_pretrained(world / "student")
    student = make(world, dora=dora)
    trained = [name for name, p in student.lm.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert any("magnitude" in name for name in trained) == dora
    torch.testing.assert_close(logits(student.lm), logits(base), rtol=0, atol=0 if not dora else 1e-5)
    moved(student)
    tuned = logits(student.lm)
    assert (tuned - logits(base)).abs().max() > 0.01
    with adapters_off(student.lm):
        assert torch.equal(logits(student.lm), logits(base))
    assert torch.equal(logits(student.lm), tuned)
    assert [name for name, p in student.lm.named_parameters() if p.requires_grad] == trained


@pytest.mark.parametrize("dora", [False, True])
def test_a_saved_adapter_loads_with_plain_peft_and_comes_back_bit_for_bit(
    world: Path, tmp_path: Path, dora: bool
) -> None:
    student = moved(make(world, dora=dora))
    student.lm.save_pretrained(tmp_path / "adapter")
    assert is_adapter(tmp_path / "adapter")
    assert [p.name for p in (tmp_path / "adapter").glob("*.safetensors")] == ["adapter_model.safetensors"]
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(world / "student"), tmp_path / "adapter")
    assert torch.equal(logits(plain), logits(student.lm))
    if not dora:  # transformers 5.19 loads the norms of DoRA under a wrong name, and says so
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")), logits(student.lm))
    again = make(world, tmp_path / "adapter", dora=dora)
    for (name, here), (other, there) in zip(again.lm.named_parameters(), student.lm.named_parameters(), strict=True):
        assert name == other and torch.equal(here, there) and here.requires_grad == there.requires_grad
    folded = fold_adapter(AutoModelForCausalLM.from_pretrained(world / "student"), tmp_path / "adapter")
    assert type(folded).__name__ == type(student.lm).__name__
    torch.testing.assert_close(logits(folded), logits(student.lm), rtol=0, atol=1e-5)


def test_factors_over_a_bfloat16_base_are_float32_and_stay_so(world: Path, tmp_path: Path) -> None:
    student = moved(make(world, dtype="bfloat16"))
    assert {p.dtype for p in student.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in student.parameters() if not p.requires_grad} == {torch.bfloat16}
    student.lm.save_pretrained(tmp_path / "adapter")
    again = make(world, tmp_path / "adapter", dtype="bfloat16")
    kept = dict(again.lm.named_parameters())
    assert all(torch.equal(kept[name], p) for name, p in student.lm.named_parameters())


def test_gradient_checkpointing_reaches_every_factor(world: Path) -> None:
    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        student = load_student(
            str(world / "student"),
            dtype="float32",
            attention=None,
            gradient_checkpointing=checkpointing,
            lora=LoraSettings(rank=2),
        )
        moved(student).train()
        ones = torch.ones_like(IDS)
        student(IDS, ones, torch.tensor([0, 1]), torch.tensor([3, 4])).square().sum().backward()
        return {name: p.grad for name, p in student.named_parameters() if p.requires_grad and p.grad is not None}

    plain, again = gradients(False), gradients(True)
    assert set(plain) == set(again) and all(g.abs().max() > 0 for g in plain.values())
    assert all(torch.allclose(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize(
    ("targets", "said"),
    [(["lm_head"], "matches the head"), (["embed_tokens"], "matches the embeddings"), (["nothing"], "does not fit")],
)
def test_targets_that_losses_would_miss_are_refused(world: Path, targets: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(world, targets=targets)


def test_an_adapter_of_another_rank_is_refused_by_name(world: Path, tmp_path: Path) -> None:
    make(world).lm.save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"has rank 4, but model.lora.rank is 8"):
        make(world, tmp_path / "adapter", rank=8)
    with pytest.raises(CheckpointError, match=r"tensor .* and None here"):
        make(world, tmp_path / "adapter", targets=["q_proj"])


@pytest.mark.parametrize(
    "settings", [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 64}}, {"init_lora_weights": "pissa"}]
)
def test_an_adapter_whose_factors_would_mean_another_model_is_refused(
    world: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    from peft import LoraConfig, get_peft_model

    lm = AutoModelForCausalLM.from_pretrained(world / "student")
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    get_peft_model(lm, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=f"{next(iter(settings))} .*opd merge"):
        make(world, tmp_path / "adapter")


@pytest.fixture
def experts(world: Path, tmp_path: Path) -> Path:
    """A folder whose student is a mixture of experts: gate and up projections of all experts are one tensor."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3MoeConfig(vocab_size=260, **sizes, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "student")
    AutoTokenizer.from_pretrained(world / "student").save_pretrained(tmp_path / "student")
    return tmp_path


def test_an_adapter_on_joined_experts_comes_back_bit_for_bit(experts: Path, recwarn: pytest.WarningsRecorder) -> None:
    # PEFT gives the joined tensor its own rank and alpha, which is no other scale than that of a run.
    saved = moved(make(experts))
    saved.lm.save_pretrained(experts / "adapter")
    assert adapter_settings(experts / "adapter")["alpha_pattern"]
    torch.testing.assert_close(logits(make(experts, experts / "adapter").lm), logits(saved.lm), rtol=0, atol=0)
    folded = fold_adapter(AutoModelForCausalLM.from_pretrained(experts / "student"), experts / "adapter")
    torch.testing.assert_close(logits(folded), logits(saved.lm), rtol=0, atol=1e-5)
    assert not any("were ignored" in str(found.message) for found in recwarn)


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_a_scale_of_experts_that_are_joined_is_refused(experts: Path, pattern: str) -> None:
    moved(make(experts)).lm.save_pretrained(experts / "adapter")
    file = experts / "adapter/adapter_config.json"
    settings = json.loads(file.read_text())
    settings[pattern] = {"q_proj": 4, "up_proj": 64, **settings[pattern]}
    file.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=f"gives up_proj {pattern[:-8]} 64, .*gate_up_proj.*without {pattern}"):
        fold_adapter(AutoModelForCausalLM.from_pretrained(experts / "student"), experts / "adapter")


def test_a_model_is_told_from_a_base_with_an_adapter(world: Path, tmp_path: Path) -> None:
    make(world).lm.save_pretrained(tmp_path / "a+b")
    base = str(world / "student")
    assert split_adapter(base) == (base, None) and split_adapter("Qwen/Qwen3-1.7B") == ("Qwen/Qwen3-1.7B", None)
    assert split_adapter(f"{base}+/x/y") == (base, Path("/x/y"))
    assert split_adapter(str(tmp_path / "a+b"))[1] is None
    own = ModelSettings(path=base, lora=LoraSettings(start="/first"))
    assert Weights.of(own) == Weights(base, None, Path("/first"))
    assert Weights.of(own, str(tmp_path / "a+b")) == Weights(base, None, tmp_path / "a+b")
    named = dataclasses.replace(Weights.of(ModelSettings(path="other"), str(tmp_path / "a+b")))
    assert named == Weights(str(Path(base).resolve()), None, tmp_path / "a+b")
