"""The tutorial's name for ``neuronfleet compile``: ``python -m app.compile.compile_model --model DIR …``."""

from __future__ import annotations

import typer

from app.compile.compile_command import compile_command


def main() -> None:
    """Run the command alone, with the same options."""
    typer.run(compile_command)


if __name__ == "__main__":
    main()
