"""The proof on the user's machine that tiered training equals plain training, on a small copy of their model."""
