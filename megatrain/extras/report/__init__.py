"""Reports on a run's plan, results and time, from the records in its folder."""
