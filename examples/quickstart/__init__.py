"""The packaged example: what `megatrain-tier init --example` copies."""
