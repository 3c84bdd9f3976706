"""Environments -> stacks. ``-c env=NAME`` chooses one (default dev); see docs/guides/deploy.md."""

from __future__ import annotations

import sys

import aws_cdk as cdk
from cdk_nag import AwsSolutionsChecks

from infra.bundle import BundleMissingError, find_bundle
from infra.settings import SettingsError, load_settings
from infra.stacks import add_stacks


def build(app: cdk.App) -> None:
    """Add the stacks of the environment that the app's context names, and the checks that synth must pass."""
    context = dict(app.node.get_all_context())
    settings = load_settings(str(context.get("env", "dev")), context)
    bundle = find_bundle(settings.engine.profile, context.get("bundle"))
    add_stacks(app, settings, bundle)
    cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(app))


def main() -> int:
    app = cdk.App()
    try:
        build(app)
    except (SettingsError, BundleMissingError) as error:
        print(error, file=sys.stderr)
        return 1
    app.synth()
    return 0


if __name__ == "__main__":
    sys.exit(main())
