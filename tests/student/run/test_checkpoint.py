import json
import os
import signal
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from killed import kill_at_rename
from saved_state import save_state

from opd.errors import CheckpointError
from student.run.checkpoint import find_damage, latest_checkpoint, list_checkpoints, save_checkpoint
from student.state.parts import Part
from student.state.state_io import load_state, state_parts


def write_files(folder: Path) -> list[Path]:
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(b"w" * 1000)
    (folder / "state").write_text("{}")
    return [folder / "model" / "weights", folder / "state"]


FILES = [Part("files", write_files)]


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, FILES, keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000002", "step-000010"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000010"


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_newer_checkpoint_does_not_push_out_those_of_the_resumed_run(tmp_path: Path, keep: int) -> None:
    for step in (3, 10):
        save_checkpoint(tmp_path, step, FILES, keep=9)
    (tmp_path / "step-000010" / "state").write_text("[]")
    for step in (4, 5, 6):
        assert save_checkpoint(tmp_path, step, FILES, keep=keep).is_dir()
        assert latest_checkpoint(tmp_path) == tmp_path / f"step-{step:06d}"
    intact = [path for path in list_checkpoints(tmp_path) if find_damage(path) is None]
    assert len(intact) == keep


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        save_checkpoint(tmp_path, step, FILES, keep=2)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1000000"


def test_any_flipped_byte_of_a_manifest_is_damage_and_no_crash(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 1, FILES, keep=1)
    manifest = folder / "manifest.json"
    data = manifest.read_bytes()
    start = data.index(b'"files"')
    for place in range(start, len(data)):
        for bit in (0, 1, 5):
            manifest.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            found = find_damage(folder)
            assert found is not None or json.loads(manifest.read_bytes()) == json.loads(data), data[place:]


@pytest.mark.parametrize("name", ["model/weights", "state", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_any_damaged_file_falls_back_to_the_checkpoint_before(tmp_path: Path, name: str, damage: str) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, FILES, keep=5)
    path = tmp_path / "step-000002" / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(bytes(data[:-1]))
    else:
        data[0] ^= 1
        path.write_bytes(bytes(data))
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000001"


def test_when_every_checkpoint_is_damaged_the_error_names_the_files(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 1, FILES, keep=1)
    (folder / "state").write_text("[]")
    assert "SHA-256" in str(find_damage(folder))
    with pytest.raises(CheckpointError, match="SHA-256 of state differs"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("number", [2, 99, None, "3"])
def test_a_checkpoint_of_another_format_is_refused_and_not_passed_over(tmp_path: Path, number: object) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, FILES, keep=5)
    manifest = tmp_path / "step-000002" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": number}))
    with pytest.raises(CheckpointError, match=f"step-000002 has format {number}, .* format 3;"):
        latest_checkpoint(tmp_path)


def test_no_checkpoint_is_not_an_error(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nothing") is None


def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, FILES, keep=2)
    code = (
        "import os, signal, sys; from pathlib import Path; from student.run.checkpoint import save_checkpoint\n"
        "from student.state.parts import Part\n"
        "def write(folder):\n"
        "    (folder / 'part').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "save_checkpoint(Path(sys.argv[1]), 2, [Part('part', write)], keep=2)"
    )
    killed = forked.run([sys.executable, "-c", code, str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000001"
    save_checkpoint(tmp_path, 2, FILES, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "step-000002"]


def test_state_with_tensors_arrays_and_plain_values_comes_back_equal(tmp_path: Path) -> None:
    state = {
        "a": {"t": torch.arange(3, dtype=torch.bfloat16), "scalar": torch.tensor(2.5)},
        "b": [1, 2.5, None, "x", {"n": np.array([1, 2], dtype=np.int64)}],
        "empty": {},
    }
    save_state(tmp_path, "s", state)
    back = load_state(tmp_path, "s")
    assert torch.equal(back["a"]["t"], state["a"]["t"]) and back["a"]["t"].dtype is torch.bfloat16  # type: ignore[index]
    assert back["a"]["scalar"].item() == 2.5
    assert back["b"][:4] == [1, 2.5, None, "x"]
    assert back["b"][4]["n"].tolist() == [1, 2]
    assert back["empty"] == {}


def test_tensors_that_share_memory_are_saved_apart(tmp_path: Path) -> None:
    shared = torch.zeros(2)
    save_state(tmp_path, "s", {"x": shared, "y": shared})
    assert set(load_state(tmp_path, "s")) == {"x", "y"}


def test_a_damaged_state_is_an_error(tmp_path: Path) -> None:
    save_state(tmp_path, "s", {"x": torch.zeros(2)})
    (tmp_path / "s.json").write_text(json.dumps({"x": {"__tensor__": "/gone"}})[:-3])
    with pytest.raises(CheckpointError):
        load_state(tmp_path, "s")


SAVE = """
from pathlib import Path
from student.run.checkpoint import save_checkpoint
from student.state.parts import Part
def write(folder):
    (folder / "state").write_text("[1]")
    return [folder / "state"]
save_checkpoint(Path(sys.argv[1]), 1, [Part("state", write)], keep=1)
"""


@pytest.mark.parametrize("then", ["resume", "save"])
def test_a_kill_between_the_renames_of_a_step_saved_twice_loses_neither(tmp_path: Path, then: str) -> None:
    save_checkpoint(tmp_path, 1, FILES, keep=1)
    kill_at_rename(".writing-step", SAVE, tmp_path)
    assert list_checkpoints(tmp_path) == []
    if then == "resume":
        assert latest_checkpoint(tmp_path) == tmp_path / "step-000001"
    else:
        save_checkpoint(tmp_path, 2, FILES, keep=2)
        assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000001", "step-000002"]
    assert find_damage(tmp_path / "step-000001") is None
    assert (tmp_path / "step-000001" / "state").read_text() == "{}"


def test_a_kill_before_the_first_of_the_two_renames_keeps_the_older_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, FILES, keep=1)
    kill_at_rename("step-000001", SAVE, tmp_path)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000001"
    save_checkpoint(tmp_path, 1, FILES, keep=1)
    assert os.listdir(tmp_path) == ["step-000001"]


def test_whoever_may_read_the_run_folder_may_read_the_weights(tmp_path: Path) -> None:
    """safetensors gives its files to their owner alone, and a teacher server may run as another user."""
    tmp_path.chmod(0o755)
    folder = save_checkpoint(tmp_path, 1, state_parts("weights", {"w": torch.zeros(2)}), keep=1)
    modes = {file.suffix: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert modes == {".json": 0o644, ".safetensors": 0o644}
