"""The fleet at one moment: typed records, read from the living fleet, shown as a table."""
