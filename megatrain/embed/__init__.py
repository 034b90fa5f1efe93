"""The store inside other trainers: tiered modules, optimizers of torch's interface, saved activations."""
