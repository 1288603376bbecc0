from typer.testing import CliRunner

from opd_lab.tiny.cli import app


def test_build_prints_the_models_and_a_second_call_says_that_they_are_there(tmp_path):
    runner = CliRunner(env={"COLUMNS": "120"})
    first = runner.invoke(app, ["build", str(tmp_path), "--preset", "test", "--seed", "1"])
    assert first.exit_code == 0, first.output
    assert all(name in first.output for name in ("student", "teacher", "addition"))
    second = runner.invoke(app, ["build", str(tmp_path), "--preset", "test", "--seed", "1"])
    assert second.exit_code == 0 and "nothing to do" in " ".join(second.output.split())


def test_help_explains_presets():
    out = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["build", "--help"]).output
    assert "--preset" in out and "world.json" in out
