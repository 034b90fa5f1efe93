"""megatrain: trains Hugging Face decoders layer by layer out of a tiered store."""
