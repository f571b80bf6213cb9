"""Triton kernels and their launchers, imported when one is first used."""
