"""Run the command megatrain-tier as ``python -m megatrain`` or ``torchrun -m megatrain``."""

if __name__ == "__main__":
    from megatrain_tier_cli.__main__ import run

    run()
