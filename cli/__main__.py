"""Lets ``python -m megatrain_tier_cli`` run the command."""

from .main import main

if __name__ == "__main__":
    main()
