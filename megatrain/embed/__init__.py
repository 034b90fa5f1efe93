"""The store inside other trainers: offloaded modules, optimizers of torch's interface, saved activations."""
