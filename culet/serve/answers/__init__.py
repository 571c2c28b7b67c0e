"""Large answers: their limits, building them in short turns, and sending them in parts."""
