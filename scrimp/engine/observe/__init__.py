"""Reports about a run: the lower bound of a step's time, the progress line, the metrics file."""
