"""The commands of `mamba3`, a module each: `add` declares its arguments, `run` does it.

The library does the work and is imported when a command runs, so that `mamba3 --help` does not wait
for torch.
"""
