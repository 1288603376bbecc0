"""`opd doctor`: is this machine, this installation, this fleet fit for work, and is this teacher worth distilling?"""

from opd.doctor.cli import doctor
from opd.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "doctor"]
