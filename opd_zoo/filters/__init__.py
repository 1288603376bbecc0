"""Methods that leave out rows after sampling."""
