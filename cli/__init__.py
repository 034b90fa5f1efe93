"""The command ``megatrain-tier``, installed as the package ``megatrain_tier_cli``."""
