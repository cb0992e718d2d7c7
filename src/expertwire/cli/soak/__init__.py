"""Commands that keep going: random traffic, injected faults, every payload checked."""
