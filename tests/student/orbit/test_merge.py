"""Merged checkpoints: the arithmetic against its formulas, and every mismatch by name."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

import opd.cli
from opd.config import parse_settings
from opd.errors import ConfigError
from opd_lab.tiny.model import make_model
from opd_lab.tiny.plans import Shape
from opd_lab.tiny.tokenizer import make_tokenizer
from student.orbit.merge import MergeSettings, merge

Weights = dict[str, Tensor]
SHAPE = Shape(vocabulary=260, hidden=32, layers=2, heads=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base and two models that differ from it a little."""
    folders = []
    for index, name in enumerate(("base", "first", "second")):
        folder = tmp_path_factory.mktemp("models") / name
        model = make_model(SHAPE, seed=0)
        generator = torch.Generator().manual_seed(index)
        with torch.no_grad():
            for parameter in model.parameters() if index else ():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        model.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        folders.append(folder)
    return folders


@pytest.fixture
def merged(models: list[Path], tmp_path: Path) -> Callable[..., Weights]:
    """Merges with the given settings and loads the result."""

    def run(name: str = "out", **settings: object) -> Weights:
        raw = {"models": [{"path": str(path)} for path in models[1:]], "dtype": "float32"} | settings
        folder = merge(parse_settings(MergeSettings, raw), tmp_path / name)
        return _load(folder)

    return run


def _load(folder: Path) -> Weights:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _assert_close(got: Weights, want: Callable[..., Tensor], models: list[Path]) -> None:
    sources = [_load(folder) for folder in models]
    assert got.keys() == sources[0].keys()
    for name, tensor in got.items():
        expected = want(*(source[name].double() for source in sources))
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_linear_merge_is_the_weighted_mean(models: list[Path], merged: Callable[..., Weights]) -> None:
    weighted = [{"path": str(models[1]), "weight": 3.0}, {"path": str(models[2]), "weight": 1.0}]
    _assert_close(merged(models=weighted), lambda _, a, b: (3 * a + b) / 4, models)


def test_task_arithmetic_adds_weighted_differences_to_the_base(
    models: list[Path], merged: Callable[..., Weights]
) -> None:
    got = merged(method="task_arithmetic", base=str(models[0]), scale=0.5)
    _assert_close(got, lambda base, a, b: base + 0.5 * ((a - base) + (b - base)), models)


def test_ties_trims_differences_elects_signs_and_adds_what_agrees(
    models: list[Path], merged: Callable[..., Weights]
) -> None:
    def ties(base: Tensor, *others: Tensor) -> Tensor:
        kept = []
        for other in others:
            delta = other - base
            k = max(int(0.3 * delta.numel()), 1)
            mask = torch.zeros(delta.numel(), dtype=torch.bool)
            mask[delta.abs().flatten().topk(k).indices] = True
            kept.append(torch.where(mask.view_as(delta), delta, 0))
        stacked = torch.stack(kept)
        elected = stacked.sum(0).sign()
        return base + torch.where(stacked.sign() == elected, stacked, 0).sum(0)

    _assert_close(merged(method="ties", base=str(models[0]), density=0.3), ties, models)


def test_slerp_moves_along_the_arc_from_the_first_model(models: list[Path], merged: Callable[..., Weights]) -> None:
    def arc(_: Tensor, a: Tensor, b: Tensor) -> Tensor:
        cosine = ((a / a.norm()) * (b / b.norm())).sum()
        if cosine.abs() > 0.9995:
            return a + 0.25 * (b - a)
        angle = torch.arccos(cosine)
        return (torch.sin(0.75 * angle) * a + torch.sin(0.25 * angle) * b) / torch.sin(angle)

    _assert_close(merged(method="slerp", t=0.25), arc, models)


def test_dare_draws_the_same_differences_from_the_same_seed(models: list[Path], merged: Callable[..., Weights]) -> None:
    settings = {"method": "dare_linear", "base": str(models[0]), "density": 0.5}
    first, again, other = merged("a", **settings), merged("b", **settings), merged("c", seed=1, **settings)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_weights_per_layer_are_interpolated_between_anchors(models: list[Path], merged: Callable[..., Weights]) -> None:
    got = merged(
        models=[{"path": str(models[1]), "weight": [1.0, 0.0]}, {"path": str(models[2]), "weight": [0.0, 1.0]}]
    )
    first, second = _load(models[1]), _load(models[2])
    layers = sorted({int(name.split(".")[2]) for name in got if ".layers." in name})
    name = "model.layers.{}.mlp.up_proj.weight"
    torch.testing.assert_close(got[name.format(layers[0])], first[name.format(layers[0])])
    torch.testing.assert_close(got[name.format(layers[-1])], second[name.format(layers[-1])])


def _call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["opd", "merge", *arguments])
    with pytest.raises(SystemExit) as caught:
        opd.cli.main()
    return int(caught.value.code or 0)


def test_the_result_loads_and_tells_what_it_was_made_of(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "merged"
    assert _call(monkeypatch, str(out), f"{models[1]}=2", str(models[2]), "--dtype", "float32") == 0
    AutoModelForCausalLM.from_pretrained(out)
    AutoTokenizer.from_pretrained(out)
    record = json.loads((out / "merge.json").read_text())
    assert record["settings"]["models"][0]["weight"] == 2.0
    assert list(record["inputs"]) == [str(models[1]), str(models[2])]
    assert all(len(digest) == 64 for digests in record["inputs"].values() for digest in digests)


def test_a_merge_that_was_cut_short_leaves_no_result_and_starts_anew(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parse_settings(MergeSettings, {"models": [{"path": str(path)} for path in models[1:]]})
    out = tmp_path / "out"
    monkeypatch.setattr("student.orbit.merge._hashes", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        merge(settings, out)
    assert not out.exists()
    monkeypatch.undo()
    assert merge(settings, out) == out
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_adapter_is_merged_into_its_base(models: list[Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    wrapped = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(models[0]),
        peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False),
    )
    wrapped.save_pretrained(tmp_path / "adapter")
    out = tmp_path / "merged"
    merge(
        parse_settings(
            MergeSettings, {"models": [{"path": f"{models[0]}+{tmp_path / 'adapter'}"}], "dtype": "float32"}
        ),
        out,
    )
    want = {name: tensor for name, tensor in wrapped.merge_and_unload().state_dict().items() if name in _load(out)}
    for name, tensor in _load(out).items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_the_base_gives_the_dtype_of_the_result(models: list[Path], tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    base = tmp_path / "with + and @"  # which mergekit reads as an adapter and a revision
    AutoModelForCausalLM.from_pretrained(models[0], dtype=kind).save_pretrained(base)
    make_tokenizer().save_pretrained(base)
    raw = {"models": [{"path": str(models[1]), "weight": 0.0}], "method": "task_arithmetic", "base": str(base)}
    merged, before = _load(merge(parse_settings(MergeSettings, raw), tmp_path / "out")), _load(base)
    assert all(
        torch.equal(merged[name], tensor) and tensor.dtype == getattr(torch, kind) for name, tensor in before.items()
    )
    assert json.loads((tmp_path / "out/merge.json").read_text())["settings"]["dtype"] == kind


def _refusal(models: list[str], out: Path, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        merge(parse_settings(MergeSettings, {"models": [{"path": path} for path in models]} | settings), out)
    return str(caught.value)


def test_mismatches_are_refused_by_name(models: list[Path], tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    make_model(replace(SHAPE, vocabulary=300), seed=0).save_pretrained(wide)
    first = str(models[1])
    out = tmp_path / "out"
    assert "model.embed_tokens.weight is" in _refusal([first, str(wide)], out)
    assert "was not found" in _refusal([first, str(tmp_path / "absent")], out)
    (tmp_path / "empty").mkdir()
    assert "lacks config.json" in _refusal([first, str(tmp_path / "empty")], out)
    bare = tmp_path / "bare"
    make_model(SHAPE, seed=0).save_pretrained(bare)
    assert "different tokenizers" in _refusal([first, str(bare)], out)
    assert "exists already" in _refusal([first, str(models[2])], tmp_path)
    assert "set base" in _refusal([first, str(models[2])], out, method="ties")
    assert "exactly two models" in _refusal([first], out, method="slerp")
    assert "is named twice" in _refusal([first, first], out)
    assert not out.exists()


def test_models_whose_tokenizers_agree_on_every_id_of_the_first_are_merged(models: list[Path], tmp_path: Path) -> None:
    padded, shuffled = (shutil.copytree(models[2], tmp_path / name) for name in ("padded", "shuffled"))
    tokenizer = make_tokenizer()
    tokenizer.pad_token = "!"
    tokenizer.add_tokens(["<extra>"], special_tokens=True)
    tokenizer.save_pretrained(padded)
    make_tokenizer(shuffled=True).save_pretrained(shuffled)
    first, out = str(models[1]), tmp_path / "out"
    assert r"id 4 is '!' in the first and '\\xad' in the second" in _refusal([first, str(shuffled)], out)
    merge(MergeSettings.model_validate({"models": [{"path": first}, {"path": str(padded)}]}), out)
    assert len(AutoTokenizer.from_pretrained(out)) == len(make_tokenizer())
    assert "id 260 is '<extra>' in the first and nothing" in _refusal([str(padded), first], tmp_path / "other")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_models_and_adapters_that_others_refuse_are_refused_here_too(models: list[Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    lost, cut = (shutil.copytree(models[0], tmp_path / name) for name in ("lost", "cut"))
    kept = {name: tensor for name, tensor in _load(lost).items() if name != "model.norm.weight"}
    save_file(kept, lost / "model.safetensors", {"format": "pt"})
    (cut / "model.safetensors").write_bytes(b"\x99" * 40)
    config = peft.LoraConfig(r=2, target_modules=r".*embed_tokens")  # which are tied to the head
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(models[0]), config).save_pretrained(tmp_path / "adapter")
    out = tmp_path / "out"
    assert "missing keys: model.norm.weight" in _refusal([str(lost)], out)
    assert "is damaged" in _refusal([str(cut)], out)
    assert "one weight for" in _refusal([f"{models[0]}+{tmp_path / 'adapter'}"], out)
    assert not out.exists()


def test_the_command_line_names_a_weight_that_is_not_a_number(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _call(monkeypatch, str(tmp_path / "out"), f"{models[1]}=much") == ConfigError.exit_code
    assert "weight 'much'" in capsys.readouterr().err
    assert _call(monkeypatch, str(tmp_path / "out"), f"{models[1]}=nan") == ConfigError.exit_code
    assert "weight 'nan'" in capsys.readouterr().err


@pytest.mark.parametrize("weights", [("0", "0"), ("1", "-1"), ("0,1", "0,1"), ("1", "0,-1")])
def test_weights_that_sum_to_nothing_are_refused(
    weights: tuple[str, str],
    models: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Divided by their sum, they made every tensor NaN."""
    named = [f"{path}={weight}" for path, weight in zip(models[1:], weights, strict=True)]
    assert _call(monkeypatch, str(tmp_path / "out"), *named) == ConfigError.exit_code
    assert "sum to 0" in capsys.readouterr().err
