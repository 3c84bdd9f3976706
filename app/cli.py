"""``neuronfleet``: the one command line. Each group lives beside the code it shows."""

from __future__ import annotations

import importlib

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

# Module -> function that adds its commands to the app. A module that a smaller installation (a host's bundle)
# lacks is left out; every other import error is a fault and shows.
_COMMAND_MODULES = (
    "app.plan.commands",
    "app.node.topology.commands",
    "app.compile.commands",
    "app.compile.compile_command",
    "app.operate.commands",
)


def _register() -> None:
    for name in _COMMAND_MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(error.name + ".")):
                continue
            raise
        module.register(app)


def main() -> None:
    """Entry point of the ``neuronfleet`` script."""
    _register()
    app(prog_name="neuronfleet")


if __name__ == "__main__":
    main()
