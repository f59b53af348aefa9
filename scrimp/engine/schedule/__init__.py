"""From a traced step to the schedule of the next ones; the probe that measures a machine."""
