"""Which teachers are loaded, in which state, and how much memory they may take."""
