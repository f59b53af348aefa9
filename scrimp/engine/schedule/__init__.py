"""Plans: from a traced step to the schedule of the next ones. Also the probe that measures a machine."""
