"""Weights are pushed to real servers through the fleet: all replicas swap, agree, and serve the new numbers."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from opd.errors import IncompatibleTeacherError
from opd.fleet.cli import app
from teacher_server.engines.base import EngineItem

Pool = Callable[..., list[Any]]
TOKEN = "operator-secret-1"


@pytest.fixture
def tokens(tmp_path: Path) -> SimpleNamespace:
    """Token files of servers by scope, and the client's."""

    def file(name: str, scopes: str) -> Path:
        path = tmp_path / name
        path.write_text(f"- {{name: op, token: {TOKEN}, scopes: [{scopes}]}}\n")
        return path

    secret = tmp_path / "secret"
    secret.write_text(TOKEN)
    security = {"token_file": str(secret)}
    return SimpleNamespace(admin=file("admin", "score, admin"), score=file("score", "score"), security=security)


def weights(folder: Path, seed: int) -> Path:
    """Weights for the numpy teacher."""
    folder.mkdir()
    (folder / "seed").write_text(str(seed))
    return folder


def right(chaos: SimpleNamespace, seed: int, rows: Any) -> list[bytes]:
    engine = type(chaos.engine)("numpy", seed=seed)
    return [chaos.numbers(scores) for scores in engine.score([EngineItem(row, chaos.spec) for row in rows])]


def test_weights_are_pushed_to_two_real_servers_and_back_again(
    pool: Pool, chaos: SimpleNamespace, tokens: SimpleNamespace, tmp_path: Path
) -> None:
    replicas = pool(2, "--tokens", str(tokens.admin))
    rows = chaos.work.rows(0)
    with chaos.connect(replicas, security=tokens.security) as fleet:
        before = fleet.describe("t").weights_hash
        for seed in (7, 0):
            update = fleet.update_weights("t", weights(tmp_path / f"w{seed}", seed))
            assert sorted(update.updated) == sorted(r.address for r in replicas) and not update.failures
            scores = fleet.score("t", rows, chaos.spec)
            assert {one.weights_hash for one in scores} == {update.weights_hash}
            assert [chaos.numbers(one) for one in scores] == right(chaos, seed, rows)
            assert fleet.verify("t").agrees
        assert update.weights_hash == before


def test_rows_under_way_survive_an_update(
    pool: Pool, chaos: SimpleNamespace, tokens: SimpleNamespace, tmp_path: Path
) -> None:
    replicas = pool(2, "--tokens", str(tokens.admin))
    with chaos.connect(replicas, security=tokens.security, calls={"rows": 1}) as fleet:
        rows = [row for step in range(10) for row in chaos.work.rows(step)]
        futures = fleet.submit_many("t", rows, chaos.spec)
        update = fleet.update_weights("t", weights(tmp_path / "w", 7))
        found = fleet.wait(futures)
        old_hash = chaos.engine.info.weights_hash
        assert {one.weights_hash for one in found} <= {update.weights_hash, old_hash}
        for one, old, new in zip(found, right(chaos, 0, rows), right(chaos, 7, rows), strict=True):
            assert chaos.numbers(one) == (new if one.weights_hash == update.weights_hash else old)
        assert fleet.status().counters.rows_failed == 0


def test_a_server_that_refuses_the_push_is_named_and_left_out(
    pool: Pool, chaos: SimpleNamespace, tokens: SimpleNamespace, tmp_path: Path
) -> None:
    (willing,) = pool(1, "--tokens", str(tokens.admin))
    (strict,) = pool(1, "--tokens", str(tokens.score))
    folder = weights(tmp_path / "w", 7)
    rows = chaos.work.rows(0)
    with chaos.connect([willing, strict], security=tokens.security) as fleet:
        update = fleet.update_weights("t", folder)
        assert update.updated == (willing.address,) and "admin" in update.failures[strict.address]
        assert [chaos.numbers(one) for one in fleet.score("t", rows, chaos.spec)] == right(chaos, 7, rows)
        chaos.wait_until(lambda: chaos.state(fleet, strict) == "rejected")
    token = f"security.token_file={tokens.security['token_file']}"

    def push(source: Path) -> str:
        pushed = CliRunner().invoke(app, ["update-weights", willing.address, "t", str(source), "--set", token])
        assert pushed.exit_code == 0 and "1 replica serves weights" in pushed.output, pushed.output
        return pushed.output

    assert "as before" in push(folder)
    for source in (weights(tmp_path / "other", 8), folder):
        assert "A run that started with other weights waits" in push(source)
    pinned = f"expected_weights.t={update.weights_hash}"
    both = ["update-weights", f"{willing.address},{strict.address}", "t", str(folder), "--set", token, "--set", pinned]
    refused = CliRunner().invoke(app, both)
    assert isinstance(refused.exception, IncompatibleTeacherError) and strict.address in str(refused.exception)
