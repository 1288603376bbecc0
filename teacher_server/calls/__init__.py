"""What a call is, whatever door it came in by: its caller, its slot, its way from request to trailer, its account."""
