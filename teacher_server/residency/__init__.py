"""Which teachers are loaded, and the memory they may take."""
