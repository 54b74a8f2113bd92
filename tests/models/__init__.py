"""Models that misbehave, each in its own way, so that tests can see who else notices."""
