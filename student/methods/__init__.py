"""Methods: a paper a file. Terms of the objective and controllers of the loop, by name."""

from student.controllers import CONTROLLERS
from student.terms import OBJECTIVES

__all__ = ["CONTROLLERS", "OBJECTIVES"]

OBJECTIVES.add(
    "opd", "student.methods.opd:OnPolicyDistillation", "a divergence to the teacher on the student's samples"
)
