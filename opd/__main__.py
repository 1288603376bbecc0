"""`python -m opd`: the same as `opd`."""

from opd.cli import main

if __name__ == "__main__":
    main()
