import errno
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from opd.errors import ConfigError, DataError, IncompatibleTeacherError, RunFolderError, UnavailableError
from opd.fleet import cli, score_cli
from opd.fleet.client import TeacherFleet
from opd.fleet.record.store import ScoreStore
from opd.fleet.status.of_run import FLEET_PAGE
from opd.telemetry.metrics_http import serve_metrics
from opd.wire.types import PayloadSpec, ScoreItem, Scores

PATIENT = ("--set", "health.ping_timeout_seconds=120", "--set", "connect_seconds=120")
"""Servers that are slow to answer on a busy machine are not taken for dead."""

app = typer.Typer()
app.add_typer(cli.app, name="fleet")
app.command(name="score")(score_cli.score)


def run(*arguments: str, columns: int = 240, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_status_shows_teachers_and_replicas(tiny: SimpleNamespace) -> None:
    one, two = tiny.serve(), tiny.serve()
    text = run("fleet", "status", f"{one.address},{two.address}", *PATIENT)
    assert one.address in text and two.address in text and "healthy" in text and "math" in text
    assert tiny.model(1).weights_hash[:12] in text


def test_status_fits_a_terminal_of_eighty_columns(tiny: SimpleNamespace) -> None:
    address = tiny.serve().address
    text = run("fleet", "status", address, *PATIENT, columns=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    row = next(line.split() for line in text.splitlines() if address in line)
    assert row[:3] == ["math", address, "healthy"]  # neither cut nor folded


def test_status_says_what_is_wrong_with_whom(tiny: SimpleNamespace) -> None:
    servers = [tiny.serve(seed=1), tiny.serve(seed=1), tiny.serve(seed=2)]
    odd = servers[2].address
    addresses = [*(s.address for s in servers), "127.0.0.1:9"]
    text = " ".join(run("fleet", "status", ",".join(addresses), *PATIENT, code=1).split())
    assert "127.0.0.1:9 silent" in text, "a row of the table, like every replica"
    assert f"math on {odd} is rejected: it has weights_hash" in text
    assert "127.0.0.1:9 does not answer" in text


def test_status_shows_a_tie_and_a_pin_that_no_replica_meets_instead_of_ending(tiny: SimpleNamespace) -> None:
    servers = [tiny.serve(seed=1), tiny.serve(seed=2)]
    addresses = ",".join(server.address for server in servers)
    for settings, why in (
        ((), "no side has a majority"),
        (("--set", f"expected_weights={{math: {'a' * 64}}}"), "must have weights aaaaaaaaaaaa"),
    ):
        found = json.loads(run("fleet", "status", addresses, "--json", *PATIENT, *settings, code=1))
        assert found["teachers"][0]["usable"] == 0
        assert [one["state"] for one in found["replicas"]] == ["unverified"] * 2
        assert all(why in one["reason"] and one["agreement_nats"] is None for one in found["replicas"])
    text = run("fleet", "status", addresses, *PATIENT, code=1)
    assert "0/2" in text and all(tiny.model(seed).weights_hash[:12] in text for seed in (1, 2))


def test_status_as_json_is_the_typed_record(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    found = json.loads(run("fleet", "status", server.address, "--json", *PATIENT))
    assert found["teachers"][0]["teacher"] == "math" and found["replicas"][0]["queued_tokens"] == 7
    assert found["counters"]["rows_failed"] == 0


def test_status_of_servers_that_are_all_silent_is_a_table_within_seconds(tiny: SimpleNamespace) -> None:
    frozen = tiny.serve()
    frozen.stop()
    text = run("fleet", "status", f"127.0.0.1:9,{frozen.address}", "--set", "connect_seconds=0.2", code=1)
    assert text.count("silent") == 2 and f"{frozen.address} does not answer: " in text


def test_status_of_a_run_is_what_the_run_itself_sees(tiny: SimpleNamespace, tmp_path: Path) -> None:
    good, bad = tiny.serve(seed=1), tiny.serve(seed=2)
    third = tiny.serve(seed=1)
    with TeacherFleet.connect(f"{good.address},{third.address},{bad.address}", settings=tiny.settings) as fleet:
        fleet.settle()
        pages = {FLEET_PAGE: lambda: json.dumps(asdict(fleet.status()))}
        server, thread = serve_metrics(CollectorRegistry(), 0, pages=pages)
        recipe = f"metrics_port: {server.server_port}\nmetrics_host: 0.0.0.0\n"
        (tmp_path / "recipe.yaml").write_text(recipe)
        try:
            text = run("fleet", "status", "--run", str(tmp_path), code=1)
        finally:
            server.shutdown()
            server.server_close()
            thread.join(timeout=10)
        left = asdict(fleet.status())
    assert f"math on {bad.address} is rejected: it has weights_hash" in text and good.address in text
    with pytest.raises(UnavailableError, match=r"does not answer as the run in .*opd watch"):
        run("fleet", "status", "--run", str(tmp_path))
    (tmp_path / "ending.json").write_text(json.dumps({"how": "finished", "fleet": left}))
    assert json.loads(run("fleet", "status", "--run", str(tmp_path), "--json", code=1))["replicas"] == left["replicas"]


def test_status_of_a_run_that_cannot_be_asked_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a run folder"):
        run("fleet", "status", "--run", str(tmp_path))
    (tmp_path / "recipe.yaml").write_text("run: x\n")
    with pytest.raises(ConfigError, match="sets no metrics_port"):
        run("fleet", "status", "--run", str(tmp_path))
    (tmp_path / "ending.json").write_text('{"how": "failed", "fleet": {"teachers": 3}}')
    with pytest.raises(UnavailableError, match=r"ending.json has no state of a fleet"):
        run("fleet", "status", "--run", str(tmp_path))
    with pytest.raises(ConfigError, match="ENDPOINTS or --run"):
        run("fleet", "status")


def test_verify_reports_and_fails_when_replicas_disagree(tiny: SimpleNamespace) -> None:
    servers = [tiny.serve() for _ in range(3)]
    addresses = ",".join(s.address for s in servers)
    assert "3 replicas, largest difference 0 nats" in run("fleet", "verify", addresses, *PATIENT)
    servers[2].models["math"].states += 0.3
    with pytest.raises(IncompatibleTeacherError, match=servers[2].address):
        run("fleet", "verify", addresses, *PATIENT)


def test_verify_names_the_listed_servers_that_do_not_answer_and_fails(tiny: SimpleNamespace) -> None:
    addresses = f"{tiny.serve().address},127.0.0.1:9"
    result = CliRunner().invoke(app, ["fleet", "verify", addresses, *PATIENT])
    assert isinstance(result.exception, UnavailableError) and "127.0.0.1:9 did not answer" in str(result.exception)
    assert "127.0.0.1:9 does not answer: " in result.output and "1 replica, largest difference 0 nats" in result.output


def test_settings_of_the_fleet_can_be_set_and_mistakes_name_the_key(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    run("fleet", "status", server.address, "--set", "health.agreement_tokens=8")
    with pytest.raises(ConfigError, match=r"probe_tokenz.*agreement_tokens"):
        run("fleet", "status", server.address, "--set", "health.probe_tokenz=8")


def write_rows(path: Path, count: int, **extra: object) -> list[ScoreItem]:
    rng = np.random.default_rng(0)
    items = []
    lines = []
    for _ in range(count):
        ids = rng.integers(0, 64, 9).tolist()
        lines.append(json.dumps({"prompt_ids": ids[:4], "response_ids": ids[4:], **extra}))
        items.append(ScoreItem(np.array(ids, np.uint32), 4))
    path.write_text("\n".join(lines) + "\n\n")
    return items


def test_score_records_rows_that_a_run_can_then_use_without_a_teacher(tiny: SimpleNamespace, tmp_path: Path) -> None:
    server = tiny.serve()
    items = write_rows(tmp_path / "rows.jsonl", 6)
    arguments = ["score", server.address, "--rows", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "store")]
    text = run(*arguments, "--payload", "hidden")
    assert "6 rows, 30 response tokens" in text
    live = tiny.model(1)
    run(*arguments, "--payload", "hidden")
    assert server.scored_rows() == 6 and len(ScoreStore(tmp_path / "store")) == 6
    server.stop()
    with TeacherFleet.connect(f"store:{tmp_path / 'store'}") as fleet:
        scores = fleet.score("math", items, PayloadSpec.hidden())
        assert np.array_equal(fleet.head("math").weight, live.head)
        assert scores[0].hidden is not None and scores[0].hidden.shape == (5, 8)


def test_score_takes_ids_to_gather_from_the_rows(tiny: SimpleNamespace, tmp_path: Path) -> None:
    server = tiny.serve()
    write_rows(tmp_path / "rows.jsonl", 2, gather_ids=[[1, 2]] * 5)
    text = run(
        *["score", server.address, "--rows", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "store")],
        *["--payload", "gather", "--k", "2"],
    )
    assert "2 rows" in text


def test_score_takes_the_positions_to_score_from_the_rows(tiny: SimpleNamespace, tmp_path: Path) -> None:
    server, spec = tiny.serve(), PayloadSpec.sampled()
    server.spans = True
    items = write_rows(tmp_path / "rows.jsonl", 2, spans=[[0, 1], [3, 5]])
    arguments = ["score", server.address, "--rows", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "store")]
    assert "2 rows" in run(*arguments)
    parts = [replace(item, spans=((0, 1), (3, 5))) for item in items]
    with TeacherFleet.connect(server.address) as fleet:
        live = fleet.score("math", parts, spec)
    with TeacherFleet.connect(f"store:{tmp_path / 'store'}") as fleet:
        for stored, scores in zip(fleet.score("math", parts, spec), live, strict=True):
            assert stored.sampled is not None and np.array_equal(stored.sampled, scores.sampled)
        with pytest.raises(DataError, match="has no sampled scores"):
            fleet.score("math", items, spec)


def test_without_a_store_the_log_probs_are_printed_a_line_per_row(tiny: SimpleNamespace, tmp_path: Path) -> None:
    server = tiny.serve()
    items = write_rows(tmp_path / "rows.jsonl", 3)
    text = run("score", server.address, "--rows", str(tmp_path / "rows.jsonl"))
    records = [json.loads(line) for line in text.splitlines()]
    with TeacherFleet.connect(server.address) as fleet:
        expected = fleet.score("math", items, PayloadSpec.sampled())
    for record, scores in zip(records, expected, strict=True):
        assert scores.sampled is not None
        np.testing.assert_allclose(record["log_probs"], scores.sampled, rtol=1e-6)
        assert record["log_prob"] == pytest.approx(sum(record["log_probs"]), rel=1e-5)


def test_rows_of_text_are_tokenised_as_ids_would_be(tiny: SimpleNamespace, tmp_path: Path, world: Path) -> None:
    from transformers import AutoTokenizer

    server = tiny.serve()
    tokenizer = AutoTokenizer.from_pretrained(world / "student")
    prompt, response = tokenizer.encode("!", add_special_tokens=True), tokenizer.encode('"#', add_special_tokens=False)
    texts, ids = tmp_path / "texts.jsonl", tmp_path / "ids.jsonl"
    texts.write_text(json.dumps({"prompt": "!", "response": '"#'}))
    ids.write_text(json.dumps({"prompt_ids": prompt, "response_ids": response}))
    by_text = run("score", server.address, "--rows", str(texts), "--tokenizer", str(world / "student"))
    assert by_text == run("score", server.address, "--rows", str(ids))
    with pytest.raises(DataError, match="--tokenizer"):
        run("score", server.address, "--rows", str(texts))


@pytest.mark.parametrize("mark", ["\u2028", "\x85"], ids=["U+2028", "U+0085"])
def test_a_text_keeps_characters_that_python_takes_for_line_ends(tmp_path: Path, mark: str) -> None:
    line = json.dumps({"prompt_ids": [1, 2], "response_ids": [3], "note": f"one{mark}two"}, ensure_ascii=False)
    (tmp_path / "rows.jsonl").write_bytes(f"{line}\r\n{line}".encode())
    rows = list(score_cli._read_rows(tmp_path / "rows.jsonl", PayloadSpec.sampled(), ""))
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ("{}", "line 1 .* it has no key 'prompt_ids'; rows of text need --tokenizer"),
        ('{"prompt_ids": [1], "response_ids": [2]}\nnonsense', "line 2"),
        ('{"prompt_ids": [-1], "response_ids": [2]}', r"from 0 on, not \[-1\]"),
        ('{"prompt_ids": [1.7], "response_ids": [2]}', "whole numbers"),
        ('{"prompt_ids": [true], "response_ids": [2]}', "whole numbers"),
        ('{"prompt_ids": "12", "response_ids": [2]}', "whole numbers"),
        ('{"prompt_ids": [[1, 2]], "response_ids": [[2, 3]]}', "whole numbers"),
        ('{"prompt_ids": [1], "response_ids": [2], "spans": [[0]]}', "pairs"),
        ('{"prompt_ids": [1], "response_ids": [2], "spans": 3}', "pairs .*, not 3"),
        ('{"prompt_ids": [99999999999999999999], "response_ids": [2]}', "from 0 on, not .99999999999999999999"),
        ("[1, 2]", r"line 1 .* it is \[1, 2\]; rows"),
        ('{"prompt_ids": [1], "response_ids": [2], "spans": [0, 1]}', "pairs"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_rows_that_are_none_are_named(tiny: SimpleNamespace, tmp_path: Path, text: str, message: str) -> None:
    server = tiny.serve()
    (tmp_path / "rows.jsonl").write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=message):
        run("score", server.address, "--rows", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "store"))


def test_an_unknown_payload_and_an_ambiguous_teacher_are_refused(tiny: SimpleNamespace, tmp_path: Path) -> None:
    server = tiny.serve(names=("math", "code"))
    write_rows(tmp_path / "rows.jsonl", 1)
    arguments = ["score", server.address, "--rows", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "store")]
    with pytest.raises(DataError, match=r"'logits' is unknown.* sampled"):
        run(*arguments, "--payload", "logits")
    with pytest.raises(DataError, match="serves code, math;"):
        run(*arguments)


def test_an_infinite_log_prob_is_printed_as_json_has_it() -> None:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    (line,) = score_cli._lines([Scores(sampled=np.array([-np.inf, -1.5], np.float32))])
    assert json.loads(line, parse_constant=refuse) == {"row": 0, "log_prob": None, "log_probs": [None, -1.5]}


def test_hidden_states_without_a_store_are_refused_before_they_are_computed(
    tiny: SimpleNamespace, tmp_path: Path
) -> None:
    server = tiny.serve()
    write_rows(tmp_path / "rows.jsonl", 1)
    with pytest.raises(DataError, match="give --out"):
        run("score", server.address, "--rows", str(tmp_path / "rows.jsonl"), "--payload", "hidden")
    assert server.scored_rows() == 0


def test_rows_that_could_not_be_kept_are_not_called_stored(
    tiny: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    server = tiny.serve()
    write_rows(tmp_path / "rows.jsonl", 2)
    arguments = ["--rows", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "store")]
    with monkeypatch.context() as disk:
        disk.setattr("opd.fleet.record.blobs.Blobs.put", full)
        with pytest.raises(RunFolderError, match="2 of 2 rows"):
            run("score", server.address, *arguments)
    assert "2 rows" in run("score", server.address, *arguments)
    with pytest.raises(DataError, match="is a store of scores"):
        run("score", f"store:{tmp_path / 'store'}", "--rows", arguments[1], "--out", str(tmp_path / "copy"))
