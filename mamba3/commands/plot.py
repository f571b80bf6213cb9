"""plot: curves of runs."""

from __future__ import annotations

from mamba3.commands.arguments import command


def add(commands) -> None:
    add = command(commands, run, "mamba3 plot runs/a runs/b --out plot.png").add_argument
    add("dirs", nargs="+", metavar="DIR", help="a folder that `mamba3 train` wrote to")
    add("--out", required=True, metavar="FILE.png", help="the picture, or .pdf, .svg, ...")
    add("--log-loss", action="store_true", help="the loss on a logarithmic scale")


def run(args) -> None:
    """Draw loss, exact match, learning rate and speed of one or more runs."""
    from mamba3.train.plot import plot

    plot(args.dirs, args.out, log_loss=args.log_loss)
    print(f"saved to {args.out}")
