"""What a run looks like from outside: the lower bound of a step, the progress line, the metrics file."""
