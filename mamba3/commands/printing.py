"""Numbers as several commands print them."""

from __future__ import annotations


def print_shares(per_task: dict[str, float], overall: float, n: int) -> None:
    """Exact match, of all and by task."""
    from mamba3.eval.exact_match import percent

    print(f"exact match on {n} problems: {percent(overall)}")
    for task, share in per_task.items():
        print(f"    {task:12} {percent(share):>8}")


def size(n: int) -> str:
    """A number of bytes, in the unit that suits it."""
    for unit in ("bytes", "KB", "MB"):
        if n < 1000:
            return f"{n:.4g} {unit}"
        n /= 1000
    return f"{n:.4g} GB"
