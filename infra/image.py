"""The hosts' image: an AMI by id, or the newest of the engine profile's family."""

from __future__ import annotations

import jsii
from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from app.plan.profiles import get_profile
from infra.settings import FOLLOW_PROFILE, Settings


@jsii.implements(ec2.IMachineImage)
class PinnedImage:
    """An AMI id as it stands, for whichever region the stack is deployed to."""

    def __init__(self, image_id: str) -> None:
        self._image_id = image_id

    @jsii.member(jsii_name="getImage")
    def get_image(self, scope: Construct) -> ec2.MachineImageConfig:
        return ec2.MachineImageConfig(
            image_id=self._image_id, os_type=ec2.OperatingSystemType.LINUX, user_data=ec2.UserData.for_linux()
        )


def machine_image(settings: Settings) -> ec2.IMachineImage:
    """The image that the settings name.

    Following the profile is left to CloudFormation, which reads the public SSM parameter at each deploy: no
    lookup at synth.
    """
    if settings.fleet.image != FOLLOW_PROFILE:
        return PinnedImage(settings.fleet.image)
    parameter = get_profile(settings.engine.profile).ami_ssm_parameter
    if parameter is None:
        raise ValueError(f"engine profile {settings.engine.profile} has no public image")
    return ec2.MachineImage.from_ssm_parameter(parameter, os=ec2.OperatingSystemType.LINUX)
