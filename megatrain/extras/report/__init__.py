"""Reports of the plan, the results and the time of a run, from the records in its folder."""
