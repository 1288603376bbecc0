"""New weights that take the place of old ones or do not."""

from pathlib import Path
from typing import Any

import pytest

from opd.errors import ConfigError, IncompatibleTeacherError
from teacher_server.residency.weights import LostWeightsError, prepare, swap


def test_new_weights_that_pass_stay_and_refused_ones_go(numpy_engine: Any, tmp_path: Path) -> None:
    engine = numpy_engine()
    old = engine.info.weights_hash
    (tmp_path / "seed").write_text("5")

    def refuse_the_new() -> None:
        if engine.info.weights_hash != old:
            raise ValueError("no good")

    with pytest.raises(IncompatibleTeacherError, match=f"{tmp_path}.*{old}.*ValueError: no good"):
        swap(engine, prepare(engine, tmp_path), tmp_path, refuse_the_new)
    assert engine.info.weights_hash == old
    swap(engine, prepare(engine, tmp_path), tmp_path, lambda: None)
    assert engine.info.weights_hash != old


def test_an_exchange_that_fails_before_it_begins_keeps_its_error_and_the_weights(
    numpy_engine: Any, tmp_path: Path
) -> None:
    engine, tested = numpy_engine(), []

    def exchange() -> None:
        raise ConfigError("the server said no.")

    with pytest.raises(ConfigError, match="the server said no"):
        swap(engine, exchange, tmp_path, lambda: tested.append(engine.info.weights_hash))
    assert tested == [engine.info.weights_hash]  # whether they still work was tried


def test_weights_that_are_neither_new_nor_old_are_lost(numpy_engine: Any, tmp_path: Path) -> None:
    engine = numpy_engine()

    def half_way() -> None:
        engine._weights(7)
        raise RuntimeError("died half-way")

    with pytest.raises(LostWeightsError, match="died half-way"):
        swap(engine, half_way, tmp_path, lambda: None)
