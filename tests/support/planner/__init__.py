"""Problems of the planner, and a recount of what it counts."""
