"""The state of the fleet at one moment: typed records, taken from the live fleet, and shown as a table."""
