"""Synthesize every environment into ``cdk.out/<environment>/``: what ``make synth`` runs. Offline."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import aws_cdk as cdk

from infra.app import build
from infra.bundle import ROOT, BundleMissingError
from infra.settings import SettingsError, environment_names


def main() -> int:
    """Synthesize each environment; the mistakes of all are printed, and the exit code is then 1."""
    flags = json.loads((ROOT / "cdk.json").read_text())["context"]
    failed = False
    for environment in environment_names():
        out = ROOT / "cdk.out" / environment
        app = cdk.App(outdir=str(out), context={**flags, "env": environment})
        try:
            build(app)
            assembly = app.synth()
        except (SettingsError, BundleMissingError) as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        for stack in assembly.stacks:
            print(Path(stack.template_full_path).relative_to(ROOT))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
