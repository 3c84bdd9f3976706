"""Machines that stand for EC2 instances: systemd-nspawn with real systemd and cloud-init over one image."""

from rehearsal.machines.nspawn import NspawnMachines

__all__ = ["NspawnMachines"]
