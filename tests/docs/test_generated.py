"""Generated files equal what generates them."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_script_writes_all_generated_pages() -> None:
    assert set(script("pages").WRITERS) == {path.name for path in (ROOT / "scripts").glob("*_doc.py")}


def test_the_metrics_page_lists_the_series_of_the_code() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == script("metrics_doc").render()


def test_the_page_of_policy_losses_and_advantages_lists_what_is_registered() -> None:
    assert (ROOT / "docs" / "rl.md").read_text() == script("rl_doc").render()


def test_every_method_has_its_page_with_metrics_that_the_code_has() -> None:
    methods = script("methods_doc")
    pages = {path.name: path.read_text() for path in (ROOT / "docs" / "methods").glob("*.md")}
    assert pages == methods.render(), "run python scripts/methods_doc.py"
    assert methods.SITE.read_text() == methods.navigation(methods.SITE.read_text())
    described = [name for note in methods.notes().values() for name in note["names"]]
    assert len(described) == len(set(described)) > 30
    code = "".join(
        path.read_text() for package in ("student", "opd_zoo", "opd/maths") for path in (ROOT / package).rglob("*.py")
    )
    for note in methods.notes().values():
        for metric in note.get("watch", ()):
            parts = [part for part in metric.split("/") if not part.isdigit()]
            assert all(re.search(rf"""["/]{part}[/"{{]""", code) for part in parts), metric


def test_a_plug_in_without_notes_has_a_page_of_what_its_code_says() -> None:
    page = script("methods_doc").page({"title": "poweropd", "names": ["poweropd"]})
    assert "A = (T(y)^alpha - S(y)^alpha) / alpha" in page and "| `alpha` | `1.0` |" in page
    assert "## Metrics to watch" not in page and "## When it fails" not in page


def test_the_recipe_page_lists_every_key_of_the_settings() -> None:
    page = script("recipe_doc").render()
    assert (ROOT / "docs" / "recipe.md").read_text() == page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 100 and all(row[-1].strip(" |") for row in rows), "every key says what it means"


def test_what_users_read_is_free_of_banned_forms() -> None:
    words = script("words")
    assert list(words.places()) == []
    for text in ("x is no model", "they are no JSON", "Nobody knows", "runs for ever", "one that is refused"):
        assert words.BANNED.search(text), text
    for text in ("there is no model", "it is no longer there", "the one that sampled", "which is no smaller than 2"):
        assert not words.BANNED.search(text), text


def test_a_second_word_for_a_thing_is_found_in_prose_and_in_names() -> None:
    words = script("words")
    for text, word in (
        ("each trajectory ends", "episode"),
        ("class TrajectoryBuffer:", "episode"),
        ("expert_answers = []", "given row"),
        ("two mini-batches", "minibatch"),
        ("micro_batch, micro-batch and microBatch, but microbatch", "micro-batch"),
        ("class GateMethodSettings(ControllerSettings):", "controller"),
    ):
        assert [found.rpartition(" write ")[2] for _, found in words.found_in(text)] == [word], text
    page = (ROOT / "ARCHITECTURE.md").read_text().partition("## Words")[2].partition("## ")[0]
    assert all(word in page or word in ("setting", "minibatch", "micro-batch") for word in words.ONE_WORD)


def test_banned_forms_are_found_over_the_end_of_a_line() -> None:
    found_in = script("words").found_in
    for text, line in (
        ("    # which nobody\n    # knows", 1),
        ("a: 1\n# it is\n#   no JSON", 2),
        ('x = 1\nraise E(\n    "it is "\n    f"no {a}"\n)', 3),
        ("x = 1\nmessage += 'which is no gRPC'", 2),
    ):
        assert [found for found, _ in found_in(text)] == [line]


def test_series_follow_the_naming_rules() -> None:
    rows = [line.split("|") for line in script("metrics_doc").render().splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    for _, name, kind, _, text, _ in rows:
        series = name.strip(" `")
        assert series.startswith(("opd_teacher_", "opd_student_", "opd_build_", "process_")), series
        assert (kind.strip() == "counter") == series.endswith("_total"), series
        assert not series.endswith(("_ms", "_us", "_kb", "_percent")), series
        assert text.strip(), series
