"""The instance metadata service: what an instance asks at 169.254.169.254 about itself.

Two doors. The first (port 80) speaks IMDSv2 only: a token by PUT, refused to forwarded requests, answered
with the instance's hop limit as IP TTL. The second, on another port, needs no token: Debian 12's cloud-init
22.4 speaks IMDSv2 only where DMI says EC2, and its ``metadata_urls`` names that door. It is the image
builder's affair that nothing else on a host knows it.
"""

from rehearsal.metadata.service import MetadataService
from rehearsal.metadata.tree import Credentials, InstanceMetadata, tree

__all__ = ["Credentials", "InstanceMetadata", "MetadataService", "tree"]
