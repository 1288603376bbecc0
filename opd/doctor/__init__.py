"""`opd doctor`: checks of this machine, this installation and a fleet, and whether a teacher is worth distilling."""

from opd.doctor.cli import doctor
from opd.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "doctor"]
