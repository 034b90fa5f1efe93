"""The store in other trainers: offloaded modules, optimizers with torch's interface, offloaded activations."""
