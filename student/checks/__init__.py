"""What `opd doctor` asks of the upper floor, found by the entry-point group `opd.examinations`."""
