"""Tools around the training loop. They import `megatrain.api`; the core never imports them."""
