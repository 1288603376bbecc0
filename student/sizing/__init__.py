"""`opd plan`: estimates the memory, time and network traffic of a run before it begins."""
