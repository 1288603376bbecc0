"""Which replica gets which row, and when a row is sent again."""
