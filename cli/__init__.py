"""The command megatrain-tier. Installed as megatrain_tier_cli."""
