"""The entry point of the `scrimp` command."""

from __future__ import annotations


def main() -> None:
    """Runs the command line. It imports the commands here, so that importing the package costs nothing."""
    from scrimp.cli._end import ending

    with ending():
        from scrimp.cli._app import app

        app()
