"""Replacing a teacher's weights safely: prepare, swap, test, and restore if the test fails."""

from collections.abc import Callable
from pathlib import Path

from opd.errors import ConfigError, IncompatibleTeacherError, NonFiniteError, OpdError
from teacher_server.engines.base import Engine, Exchange
from teacher_server.observe.logs import describe_error
from teacher_server.residency.model_folder import check_plausible


class LostWeightsError(Exception):
    """The weights in use cannot be restored after new ones were refused or the engine died: the teacher is unusable.

    This is not an `OpdError` because it never reaches a client: `Teachers` turns it into the state FAILED.
    """


def prepare(engine: Engine, folder: Path) -> Exchange:
    """`Engine.prepare_weights`, with errors of the file system and of libraries converted to those of `opd.errors`.

    Raises:
        OpdError: naming the folder and the cause.
    """
    try:
        check_plausible(folder)
        return engine.prepare_weights(folder)
    except OpdError:
        raise
    except Exception as error:
        raise ConfigError(f"weights in {folder} cannot be read: {describe_error(error)}") from error


def swap(engine: Engine, exchange: Exchange, folder: Path, test: Callable[[], None]) -> None:
    """Swap weights and test the new ones; if they fail, the old ones are restored and tested too.

    Runs between two batches, so no request is scored by weights that were not tested.

    Raises:
        NonFiniteError, IncompatibleTeacherError, ConfigError: if the new weights are refused; the old ones serve.
        LostWeightsError: if the old weights are lost.
    """
    old_hash = engine.info.weights_hash
    exchanged = False
    try:
        exchange()
        exchanged = True
        test()
    except Exception as error:
        try:
            if exchanged:  # an exchange that failed has undone itself, see `Exchange`
                exchange()
            if engine.info.weights_hash != old_hash:
                raise RuntimeError(f"the engine now has weights {engine.info.weights_hash}, not {old_hash}.") from error
            test()
        except Exception as second:
            raise LostWeightsError(
                f"weights in {folder} were refused ({describe_error(error)}), and those in use could not be restored: "
                f"{describe_error(second)}"
            ) from second
        raise _refusal(folder, old_hash, error) from error


def put_back(engine: Engine, folder: Path, weights_hash: str) -> None:
    """Give a freshly built engine the weights that had replaced its model's own.

    Raises:
        LostWeightsError: if the folder is gone, does not fit, or holds other weights by now.
    """
    try:
        prepare(engine, folder)()
    except Exception as error:
        raise LostWeightsError(
            f"the weights last loaded from {folder} cannot be loaded again ({describe_error(error)}); bring the folder "
            "back, unload the teacher and load it again."
        ) from error
    found = engine.info.weights_hash
    if found != weights_hash:
        raise LostWeightsError(
            f"weights in {folder} have changed from {weights_hash} to {found} since they were loaded; unload the "
            "teacher and load it again, and keep the folders of weights in use as they are."
        )


def _refusal(folder: Path, old_hash: str, error: Exception) -> OpdError:
    cause = error.__cause__ if isinstance(error.__cause__, NonFiniteError) else error
    kind = type(cause) if isinstance(cause, NonFiniteError | ConfigError) else IncompatibleTeacherError
    return kind(f"the weights in {folder} were refused and the teacher keeps {old_hash}: {describe_error(error)}")
