"""What was planned, what happened, where the time went: records that a run leaves, and pages made of them."""
