"""Triton kernels of the optimizers and their launchers, imported when one is first used."""
