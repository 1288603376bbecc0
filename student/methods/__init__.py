"""Methods, one file per paper: terms of the objective and controllers of the loop."""
