"""The text of every systemd unit of a host, except the raylets' (``app.node.raylet``).

Two are installed for good, in /etc/systemd/system: ``neuronfleet-configure``, which plans the host at each
boot, and ``neuronfleet-failed@``, which tells the outside of a failure. The others are rendered by configure
into /run/systemd/system, so that a boot never meets units of an earlier plan.

Order: configure -> preflight -> ray token, fetch -> raylets -> serve -> ready; systemd stops in reverse. A
cell starts its raylets while the artifact is fetched and holds back only Serve; a cluster's worker holds back
the raylets, since replicas come to it as soon as it joins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.node.host import (
    CONFIG_DIR,
    HEAD_ENV_PATH,
    HOST_ENV_PATH,
    RAY_TOKEN_PATH,
    RUN_DIR,
    SERVICE_USER,
    STATE_DIR,
    VENV,
)

TARGET = "neuronfleet.target"
CONFIGURE = "neuronfleet-configure.service"
FAILED = "neuronfleet-failed@.service"
PREFLIGHT = "neuronfleet-preflight.service"
FETCH = "neuronfleet-fetch.service"
RAY_TOKEN = "neuronfleet-ray-token.service"
HEAD_ADDRESS = "neuronfleet-head-address.service"
RAY_HEAD = "neuronfleet-ray-head.service"
SERVE = "neuronfleet-serve.service"
READY = "neuronfleet-ready.service"

Role = Literal["cell", "head", "worker"]

NODE = f"{VENV}/bin/neuronfleet-node"

# Seconds that Serve has to let streams end (app.serve gives them up to 600) and to take itself down.
SERVE_STOP_S = 660

_ENVIRONMENT = f"""\
EnvironmentFile={HOST_ENV_PATH}
Environment=NEURONFLEET_UNIT=%n
Environment=AWS_CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt
Environment=PYTHONUNBUFFERED=1
"""

# What no unit needs. Mount namespaces and seccomp work beside Ray; a private /tmp does not, where Ray keeps
# its sockets, so the units that talk to Ray leave it out.
_HARDENING = """\
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
UMask=0027
"""

_RAY_ENVIRONMENT = f"""\
EnvironmentFile={HEAD_ENV_PATH}
Environment=RAY_AUTH_MODE=token
Environment=RAY_AUTH_TOKEN_PATH={RAY_TOKEN_PATH}
"""


@dataclass(frozen=True)
class Step:
    """A boot step that runs once: ``neuronfleet-node COMMAND``.

    Attributes:
        after: units that come before it; with ``strict`` they must have ended well.
        writes: folders that it may write to.
        ray: whether it talks to Ray, and so needs its address, its token and the common /tmp.
        user: whom it runs as; root keeps only ``capabilities``.
    """

    name: str
    description: str
    command: str
    after: tuple[str, ...]
    writes: tuple[str, ...] = ()
    ray: bool = False
    strict: bool = True
    user: str = SERVICE_USER
    capabilities: str = ""


def configure_unit() -> str:
    """``neuronfleet-configure``: runs as root, since it writes units and starts the target."""
    return f"""\
[Unit]
Description=NeuronFleet: plan this host and render its units
Wants=network-online.target
After=network-online.target systemd-tmpfiles-setup.service
ConditionPathExists={CONFIG_DIR}/node.json
OnFailure=neuronfleet-failed@%n.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={NODE} configure
Environment=NEURONFLEET_UNIT=%n
Environment=PYTHONUNBUFFERED=1
StandardOutput=journal+console
StandardError=journal+console
TimeoutStartSec=300

[Install]
WantedBy=multi-user.target
"""


def failed_unit() -> str:
    """``neuronfleet-failed@UNIT``: root, because the journal and the console are root's."""
    return f"""\
[Unit]
Description=NeuronFleet: report the failure of %i

[Service]
Type=oneshot
ExecStart={NODE} fail %i
EnvironmentFile=-{HOST_ENV_PATH}
Environment=NEURONFLEET_UNIT=%n
Environment=AWS_CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt
Environment=PYTHONUNBUFFERED=1
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
TimeoutStartSec=300
"""


def target_unit(wants: list[str]) -> str:
    """``neuronfleet.target``: everything that this host runs."""
    return f"""\
[Unit]
Description=NeuronFleet: serving
After={CONFIGURE}
Wants={" ".join(wants)}
"""


def step_unit(step: Step) -> str:
    """A boot step's unit; what it needs must have ended well, and its own failure is reported."""
    after = " ".join(step.after)
    writes = f"ReadWritePaths={' '.join(step.writes)}\n" if step.writes else ""
    return f"""\
[Unit]
Description=NeuronFleet: {step.description}
{"Requires" if step.strict else "Wants"}={after}
After={after}
PartOf={TARGET}
OnFailure=neuronfleet-failed@%n.service

[Service]
Type=oneshot
RemainAfterExit=yes
User={step.user}
Group={step.user}
ExecStart={NODE} {step.command}
{_ENVIRONMENT}{_RAY_ENVIRONMENT if step.ray else ""}StandardOutput=journal+console
StandardError=journal+console
TimeoutStartSec=infinity
{_HARDENING}CapabilityBoundingSet={step.capabilities}
PrivateTmp={"no" if step.ray else "yes"}
{writes}"""


def serve_unit(role: Role) -> str:
    """``neuronfleet-serve``: the process that deploys the Serve app and keeps it deployed."""
    needs = " ".join([RAY_HEAD, *([] if role == "head" else [FETCH])])
    return f"""\
[Unit]
Description=NeuronFleet: the Serve app
Requires={needs}
After={needs}
PartOf={TARGET}
OnFailure=neuronfleet-failed@%n.service
StartLimitIntervalSec=900
StartLimitBurst=5

[Service]
Type=exec
User={SERVICE_USER}
Group={SERVICE_USER}
ExecStart=/usr/bin/env RAY_ADDRESS=${{HEAD_ADDRESS}} {VENV}/bin/python -m app.serve.deploy
WorkingDirectory={STATE_DIR}
{_ENVIRONMENT}{_RAY_ENVIRONMENT}Environment=HOME={STATE_DIR}
Restart=on-failure
RestartSec=5
KillSignal=SIGTERM
KillMode=mixed
TimeoutStopSec={SERVE_STOP_S}
{_HARDENING}CapabilityBoundingSet=
PrivateTmp=no
ReadWritePaths={STATE_DIR} {RUN_DIR} /tmp /dev/shm
"""


def steps(role: Role, raylet_units: list[str]) -> list[Step]:
    """The boot steps of a host of ``role``, in the order in which they come."""
    found = [
        Step(
            name=PREFLIGHT,
            description="check this host against its engine profile and artifact",
            command="preflight",
            after=(CONFIGURE,),
        ),
        Step(
            name=RAY_TOKEN,
            description="Ray's authentication token",
            command="ray-token",
            after=(PREFLIGHT,),
            writes=(str(CONFIG_DIR),),
            # The folder is root's; the file is handed to the service user.
            user="root",
            capabilities="CAP_CHOWN",
        ),
    ]
    if role != "head":
        found.append(
            Step(
                name=FETCH,
                description="fetch and verify the model artifact",
                command="fetch",
                after=(PREFLIGHT,),
                writes=(str(STATE_DIR), str(RUN_DIR)),
            )
        )
    if role == "worker":
        found.append(
            Step(
                name=HEAD_ADDRESS,
                description="wait for the address of the cluster's head",
                command="await-head",
                after=(PREFLIGHT,),
                writes=(str(RUN_DIR),),
            )
        )
    elif role == "head":
        found.append(
            Step(
                name=HEAD_ADDRESS,
                description="publish the address of this cluster's head",
                command="publish-head",
                after=(RAY_HEAD,),
            )
        )
    found.append(
        Step(
            name=READY,
            description="wait until this host serves, then signal",
            command="ready",
            after=(SERVE, HEAD_ADDRESS)
            if role == "head"
            else (SERVE,)
            if role == "cell"
            else (*raylet_units,),
            ray=True,
            # A Serve that crashes and comes again must not end the wait for it.
            strict=False,
        )
    )
    return found


def installed_units() -> dict[str, str]:
    """The units that install.sh puts into /etc/systemd/system: name -> text."""
    return {CONFIGURE: configure_unit(), FAILED: failed_unit()}


def rendered_units(role: Role, raylet_units: list[str]) -> dict[str, str]:
    """The units that configure renders beside the raylets' own: name -> text.

    Args:
        role: the host's.
        raylet_units: names of the raylets' units (``neuronfleet-ray-worker@1.service`` …).
    """
    units = {step.name: step_unit(step) for step in steps(role, raylet_units)}
    if role != "worker":
        units[SERVE] = serve_unit(role)
    units[TARGET] = target_unit(sorted([*units, *raylet_units]))
    return units


def raylet_drop_in(role: Role) -> str:
    """What a host's boot adds to each raylet's unit: what must have ended well before it, and the host's
    environment, which replicas inherit."""
    needs = " ".join([RAY_TOKEN] if role != "worker" else [RAY_TOKEN, HEAD_ADDRESS, FETCH])
    return f"""\
[Unit]
Requires={needs}
After={needs}

[Service]
{_ENVIRONMENT}# Ray lowers its workers' priority (nice 15); here they are what the host is for.
Environment=RAY_worker_niceness=0
"""
