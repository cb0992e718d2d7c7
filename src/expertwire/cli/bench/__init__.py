"""`expertwire bench`: measurements whose every payload is checked, outside of the timed window."""
