"""push: a model to the Hugging Face Hub."""

from __future__ import annotations

from mamba3.commands.arguments import command


def add(commands) -> None:
    add = command(commands, run, "mamba3 push my-model me/my-model --private").add_argument
    add("folder", metavar="DIR", help="a folder that train, finetune or save_pretrained wrote")
    add("repo_id", metavar="REPO_ID", help="org/name on the Hub; made if there is none")
    add("--private", action="store_true", default=None, help="make a new repository private")
    add("--branch", help="commit to this branch, made if needed (the main one)")
    add("--pr", action="store_true", help="open a pull request instead")
    add("--replace-card", action="store_true", help="replace a README.md that is on the Hub")
    add("--token", help="of the Hub (the one that `hf auth login` stored)")
    add("--message", help="of the commit")
    add("--dry-run", action="store_true", help="show what would be uploaded, and ask nobody")


def run(args) -> None:
    """Upload a model to the Hugging Face Hub."""
    from pathlib import Path

    from mamba3.commands.printing import size
    from mamba3.push import MESSAGE, files_to_push, push_to_hub

    if args.dry_run:
        for name in files_to_push(args.folder):
            print(f"{name:36} {size((Path(args.folder) / name).stat().st_size)}")
        print(f"to {args.repo_id}; nothing was uploaded")
        return
    url = push_to_hub(
        args.folder,
        args.repo_id,
        private=args.private,
        branch=args.branch,
        create_pr=args.pr,
        replace_card=args.replace_card,
        token=args.token,
        message=args.message or MESSAGE,
    )
    print(url)
