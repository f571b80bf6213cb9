"""doctor: does this machine compute right?"""

from __future__ import annotations

from mamba3.commands.arguments import command
from mamba3.commands.loading import device_of


def add(commands) -> None:
    parser = command(commands, run, "mamba3 doctor --device cuda")
    parser.add_argument("--device", help="cpu, cuda, ... (a GPU if there is one)")


def run(args) -> None:
    """Check that this machine computes Mamba-3 right, on every path that runs here."""
    import torch

    from mamba3 import doctor, ops

    device = device_of(args)
    print(f"torch {torch.__version__} on {device}; by itself: {ops.explain(device)}")
    print("\n".join([*doctor.configurations(device), "", doctor.HEADER]))
    findings = []
    for found in doctor.check(device):
        findings.append(found)
        print(found, flush=True)
    wrong = [found for found in findings if not found.ok]
    if wrong:
        raise RuntimeError(
            f"{len(wrong)} of {len(findings)} comparisons are off on {device}: "
            + doctor.remedy(wrong)
        )
    print(f"\nall {len(findings)} comparisons are within rounding")
