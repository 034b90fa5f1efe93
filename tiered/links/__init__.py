"""Links, which move bytes between the slots of two tiers."""
