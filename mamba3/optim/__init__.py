"""Optimizers and the routing of parameters to them."""
