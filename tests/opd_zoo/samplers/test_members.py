"""What the author of a prompt sampler has to know besides the members of every method."""

from opd_zoo.samplers.base import Sampler
from student.plugin.controllers import Controller

HOOKS = {"scores", "choose", "draw", "knows", "rows_for"}
HELPERS = {"arm", "success", "results", "rows_of", "note", "remembers"}


def test_a_sampler_adds_five_hooks_and_six_helpers_to_those_of_a_method() -> None:
    public = [{name for name in dir(kind) if not name.startswith("_")} for kind in (Sampler, Controller)]
    assert public[0] - public[1] == HOOKS | HELPERS
