"""What every environment's templates must hold, over sizes, topologies, edges and ways out."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from cfnlint.api import ManualArgs, lint  # type: ignore[import-untyped]

from app.node.config import NodeConfig
from app.node.ports import DASHBOARD_PORT, SERVE_PORT, cluster_ingress
from infra.bundle import ROOT
from infra.host_role import HostAccess
from infra.network import BOOT_SERVICES, CLUSTER_SERVICES
from infra.settings import load_settings
from infra.userdata import MAX_BYTES
from tests.synth.conftest import Synth, Synthesized
from tests.synth.resolve import Resolver

GROUP = "AWS::AutoScaling::AutoScalingGroup"
REGIONS = ["us-east-1", "us-west-2"]  # where Inf2 is offered, among others
TEMPLATE = "AWS::EC2::LaunchTemplate"


def resolver(item: Synthesized) -> Resolver:
    return Resolver(f"neuronfleet-{item.environment}")


def user_data(item: Synthesized) -> dict[str, str]:
    """Rendered user data of each launch template, by logical id."""
    return {
        name: resolver(item).text(template["Properties"]["LaunchTemplateData"]["UserData"])
        for name, template in item.of_type(TEMPLATE).items()
    }


def node_configs(item: Synthesized) -> list[NodeConfig]:
    found = []
    for text in user_data(item).values():
        match = re.search(r"node\.json <<'EOF'\n(.*)\nEOF\n", text)
        assert match
        found.append(NodeConfig.model_validate(json.loads(match.group(1))))
    return found


def test_cfn_lint_has_nothing_to_say(every: Synthesized) -> None:
    for template in every.templates:
        matches = lint(json.dumps(template), config=ManualArgs(regions=REGIONS))
        assert [str(match) for match in matches if match.rule.id[0] in "EW"] == []


def test_user_data_is_small_and_holds_a_valid_node_config(every: Synthesized) -> None:
    texts = user_data(every)
    assert texts
    for text in texts.values():
        assert len(text.encode()) < MAX_BYTES
        assert not re.search(r"@[A-Z_]+@", text)
        assert text.startswith("#!/bin/bash\n")
        # Nothing that can fail comes before the trap.
        before = text[: text.index("trap report EXIT")]
        assert not re.search(r"^(curl|cat|install|cd|mkdir|call|meta)\b(?!\()", before, re.MULTILINE)
    configs = node_configs(every)
    assert {config.environment for config in configs} == {every.environment}
    for config in configs:
        assert config.serve.http_port == SERVE_PORT
        assert (config.target_group_arn is None) == (config.role == "head")
        assert (config.cluster is None) == (config.role == "cell")


def test_no_secret_is_in_a_template(every: Synthesized) -> None:
    text = json.dumps(every.fleet)
    assert "SecretString" not in text.replace("GenerateSecretString", "")
    assert "resolve:secretsmanager" not in text
    assert "KeyName" not in text


def test_hosts_signal_the_group_that_waits_for_them(every: Synthesized) -> None:
    groups = every.of_type(GROUP)
    assert {config.signal.logical_id for config in node_configs(every)} == set(groups)
    for name, text in user_data(every).items():
        (group,) = [
            group
            for group, item in groups.items()
            if item["Properties"]["LaunchTemplate"]["LaunchTemplateId"] == {"Ref": name}
        ]
        assert f"LogicalResourceId={group} " in text
        assert f'"logical_id": "{group}"' in text
        assert f"neuronfleet-{every.environment}" in text


def test_groups_wait_for_signals_and_never_set_their_desired_capacity(every: Synthesized) -> None:
    for group in every.of_type(GROUP).values():
        properties = group["Properties"]
        assert "DesiredCapacity" not in properties
        signal = group["CreationPolicy"]["ResourceSignal"]
        rolling = group["UpdatePolicy"]["AutoScalingRollingUpdate"]
        assert str(signal["Count"]) == properties["MinSize"]
        assert rolling["WaitOnResourceSignals"] is True
        assert rolling["PauseTime"] == signal["Timeout"]
        assert rolling["MinInstancesInService"] < int(properties["MaxSize"])
        assert {"AZRebalance", "HealthCheck", "ReplaceUnhealthy"} <= set(rolling["SuspendProcesses"])
        seconds = int(signal["Timeout"][2:-1]) * 60
        assert properties["HealthCheckGracePeriod"] == seconds
        assert group["UpdatePolicy"]["AutoScalingScheduledAction"] == {
            "IgnoreUnmodifiedGroupSizeProperties": True
        }


def test_what_a_boot_needs_exists_before_the_group(every: Synthesized) -> None:
    """Endpoints and routes, security group rules, the role with its policies, the listener."""
    groups = every.of_type(GROUP)
    for name, group in groups.items():
        after = set(group["DependsOn"])
        assert set(every.of_type("AWS::EC2::VPCEndpoint")) <= after
        hosts = {key for key in every.of_type("AWS::EC2::Route") if "hostSubnet" in key}
        assert hosts <= after
        assert set(every.of_type("AWS::EC2::SecurityGroupIngress")) <= after
        if name == "FleetGroup":
            assert set(every.of_type("AWS::ElasticLoadBalancingV2::Listener")) & after
            assert ("HeadGroup" in after) == ("HeadGroup" in groups)
    # Policies are part of their roles, so no host can hold a role that is not whole yet.
    roles = {key for key in every.of_type("AWS::IAM::Role") if key.startswith("Fleet")}
    for policy in every.of_type("AWS::IAM::Policy").values():
        assert not {reference["Ref"] for reference in policy["Properties"]["Roles"]} & roles


def test_launch_templates_are_locked_down(every: Synthesized) -> None:
    for template in every.of_type(TEMPLATE).values():
        data = template["Properties"]["LaunchTemplateData"]
        assert data["MetadataOptions"]["HttpTokens"] == "required"
        assert data["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
        (disk,) = data["BlockDeviceMappings"]
        assert disk["DeviceName"] == "/dev/sda1"
        assert disk["Ebs"]["Encrypted"] is True and disk["Ebs"]["VolumeType"] == "gp3"
        assert "KeyName" not in data and "NetworkInterfaces" not in data


def test_the_load_balancer_lets_go_before_the_host_does(every: Synthesized) -> None:
    (balancer,) = every.of_type("AWS::ElasticLoadBalancingV2::LoadBalancer").values()
    attributes = {item["Key"]: item["Value"] for item in balancer["Properties"]["LoadBalancerAttributes"]}
    idle = int(attributes["idle_timeout.timeout_seconds"])
    assert attributes["routing.http.drop_invalid_header_fields.enabled"] == "true"
    for config in node_configs(every):
        assert config.serve.keep_alive_s > idle
    (group,) = every.of_type("AWS::ElasticLoadBalancingV2::TargetGroup").values()
    assert group["Properties"]["HealthCheckPath"] == "/readyz"
    assert group["Properties"]["Port"] == SERVE_PORT


def ingress(item: Synthesized) -> set[tuple[str, str, int, int]]:
    """Every way in: (from group or network, to group, first port, last port)."""
    found = set()
    for name, group in item.of_type("AWS::EC2::SecurityGroup").items():
        for rule in group["Properties"].get("SecurityGroupIngress", ()):
            found.add((rule["CidrIp"], label(name), rule["FromPort"], rule["ToPort"]))
    for rule in item.of_type("AWS::EC2::SecurityGroupIngress").values():
        properties = rule["Properties"]
        assert properties["IpProtocol"] == "tcp"
        source = label(properties["SourceSecurityGroupId"]["Fn::GetAtt"][0])
        target = label(properties["GroupId"]["Fn::GetAtt"][0])
        found.add((source, target, properties["FromPort"], properties["ToPort"]))
    return found


def label(logical_id: str) -> str:
    for prefix, name in (
        ("SecurityHosts", "hosts"),
        ("SecurityHead", "head"),
        ("EdgeLoadBalancer", "edge"),
        ("NetworkEndpoint", "endpoints"),
    ):
        if logical_id.startswith(prefix):
            return name
    raise AssertionError(logical_id)


def test_exactly_the_planned_ports_are_open(every: Synthesized, request: pytest.FixtureRequest) -> None:
    clustered = "HeadGroup" in every.fleet["Resources"]
    expected = {("edge", "hosts", SERVE_PORT, SERVE_PORT)}
    if clustered:
        for ports in cluster_ingress():
            span = (ports.first, ports.last)
            expected.add(("hosts", "head", *span))
            if ports.listener == "any":
                expected |= {("head", "hosts", *span), ("hosts", "hosts", *span)}
    open_ways = ingress(every)
    if any(target == "endpoints" for _, target, _, _ in open_ways):
        expected.add(("hosts", "endpoints", 443, 443))
        if clustered:
            expected.add(("head", "endpoints", 443, 443))
    from_clients = {way for way in open_ways if way[0][0].isdigit()}
    assert open_ways - from_clients == expected
    assert {(target, first, last) for _, target, first, last in from_clients} <= {
        ("edge", 80, 80),
        ("edge", 443, 443),
    }
    assert not [way for way in open_ways if way[2] <= DASHBOARD_PORT <= way[3]]


def test_hosts_may_leave_by_https_and_the_mirrors_port_only(every: Synthesized) -> None:
    mirror = all(config.numactl_from == "mirror" for config in node_configs(every))
    for name, group in every.of_type("AWS::EC2::SecurityGroup").items():
        if label(name) in ("hosts", "head"):
            ports = {rule["FromPort"] for rule in group["Properties"]["SecurityGroupEgress"]}
            assert ports == ({443, 80} if mirror else {443})


def test_roles_name_their_resources(every: Synthesized) -> None:
    """The only wildcards are those that the role's acknowledgements give a reason for."""
    whole = {
        "elasticloadbalancing:DescribeTargetHealth",
        "ssm:UpdateInstanceInformation",
        "ssmmessages:CreateControlChannel",
        "ssmmessages:CreateDataChannel",
        "ssmmessages:OpenControlChannel",
        "ssmmessages:OpenDataChannel",
    }
    for name, role in every.of_type("AWS::IAM::Role").items():
        assert not role["Properties"].get("ManagedPolicyArns")
        for policy in role["Properties"].get("Policies", ()):
            for statement in policy["PolicyDocument"]["Statement"]:
                actions = statement["Action"]
                actions = {actions} if isinstance(actions, str) else set(actions)
                assert not [action for action in actions if "*" in action]
                resources = statement["Resource"]
                resources = resources if isinstance(resources, list) else [resources]
                for resource in (resolver(every).text(item) for item in resources):
                    if resource == "*":
                        assert actions <= whole, name
                    elif actions & {"s3:GetObject"}:
                        assert re.search(
                            r":::[a-z0-9-]+/(manifests/\*|blobs/\*|[0-9a-f]{64}\.zip)$", resource
                        )
                    elif "*" in resource:
                        assert actions == {"autoscaling:SetInstanceHealth"}
                        stack = f"neuronfleet-{every.environment}"
                        assert re.search(rf"/{stack}-(Fleet|Head)Group-\*$", resource)


def test_the_head_alone_writes_its_address_and_serves_no_model(synth: Synth) -> None:
    item = synth("blueprint")
    policies = {
        name: json.dumps(role["Properties"]["Policies"])
        for name, role in item.of_type("AWS::IAM::Role").items()
    }
    (head,) = [text for name, text in policies.items() if "HeadRole" in name]
    (host,) = [text for name, text in policies.items() if "HostRole" in name]
    assert "ssm:PutParameter" in head and "ssm:PutParameter" not in host
    assert "/blobs/*" in host and "/blobs/*" not in head
    assert all("secretsmanager:GetSecretValue" in text for text in (head, host))
    assert {config.role for config in node_configs(item)} == {"head", "worker"}


def test_a_cell_knows_no_cluster(synth: Synth) -> None:
    item = synth("dev")
    for kind in ("AWS::SSM::Parameter", "AWS::SecretsManager::Secret"):
        assert not item.of_type(kind)
    assert {config.role for config in node_configs(item)} == {"cell"}
    assert HostAccess.__dataclass_fields__["token_secret_arn"].default is None


def test_without_egress_nothing_is_routed_out_and_every_api_of_the_boot_has_an_endpoint(synth: Synth) -> None:
    item = synth("prod")
    assert not item.of_type("AWS::EC2::NatGateway")
    assert not item.of_type("AWS::EC2::InternetGateway")
    assert not item.of_type("AWS::EC2::Route")
    services = {
        resolver(item).text(endpoint["Properties"]["ServiceName"]).rsplit(".", 1)[-1]
        for endpoint in item.of_type("AWS::EC2::VPCEndpoint").values()
    }
    assert services == {
        "s3",
        "cloudformation",
        "autoscaling",
        "elasticloadbalancing",
        "ssm",
        "ssmmessages",
        "logs",
    }
    assert len({config.numactl_from for config in node_configs(item)} - {"image"}) == 0


def test_every_client_of_the_boot_steps_has_an_endpoint() -> None:
    called = {
        name
        for path in (ROOT / "app/node").rglob("*.py")
        for name in re.findall(r"\bclient\(\s*\"([a-z0-9]+)\"", path.read_text())
    }
    assert {"ssm", "elbv2", "cloudformation"} <= called
    endpoints = {*BOOT_SERVICES, *CLUSTER_SERVICES, "s3"}
    assert {{"elbv2": "elasticloadbalancing"}.get(name, name) for name in called} <= endpoints


def test_an_internet_facing_load_balancer_does_not_give_hosts_a_way_out(synth: Synth) -> None:
    item = synth("dev", egress="none", numactl_from="image", scheme="internet-facing")
    assert item.of_type("AWS::EC2::InternetGateway")
    assert not [name for name in item.of_type("AWS::EC2::Route") if "hostSubnet" in name]


def test_dev_has_the_smallest_bill(synth: Synth) -> None:
    item = synth("dev")
    assert len(item.of_type("AWS::EC2::NatGateway")) == 1
    endpoints = item.of_type("AWS::EC2::VPCEndpoint").values()
    assert [endpoint["Properties"]["VpcEndpointType"] for endpoint in endpoints] == ["Gateway"]
    group = item.of_type(GROUP)["FleetGroup"]["Properties"]
    assert (group["MinSize"], group["MaxSize"], len(group["VPCZoneIdentifier"])) == ("1", "1", 1)
    assert not item.of_type("AWS::EC2::FlowLog")


def test_prod_keeps_what_holds_data_and_speaks_https(synth: Synth) -> None:
    item = synth("prod")
    for template in item.templates:
        for name, resource in template["Resources"].items():
            if resource["Type"] in ("AWS::S3::Bucket", "AWS::Logs::LogGroup"):
                assert resource["DeletionPolicy"] == "Retain", name
                assert resource["UpdateReplacePolicy"] == "Retain", name
    listeners = {
        listener["Properties"]["Port"]: listener["Properties"]
        for listener in item.of_type("AWS::ElasticLoadBalancingV2::Listener").values()
    }
    assert listeners[443]["Protocol"] == "HTTPS"
    assert listeners[443]["Certificates"] == [{"CertificateArn": {"Ref": "CertificateArn"}}]
    assert listeners[80]["DefaultActions"][0]["RedirectConfig"]["Protocol"] == "HTTPS"
    assert item.fleet["Parameters"]["CertificateArn"].get("Default") is None
    data = next(iter(item.of_type(TEMPLATE).values()))["Properties"]["LaunchTemplateData"]
    assert re.fullmatch(r"ami-[0-9a-f]{17}", data["ImageId"])
    assert len(item.of_type(GROUP)["FleetGroup"]["Properties"]["VPCZoneIdentifier"]) == 2


def test_the_store_is_encrypted_versioned_private_and_tls_only(shipped: Synthesized) -> None:
    buckets = {
        name: item["Properties"]
        for name, item in shipped.store["Resources"].items()
        if item["Type"] == "AWS::S3::Bucket"
    }
    for properties in buckets.values():
        assert properties["BucketEncryption"]
        assert set(properties["PublicAccessBlockConfiguration"].values()) == {True}
    (artifacts,) = [item for name, item in buckets.items() if "Logs" not in name]
    assert artifacts["VersioningConfiguration"] == {"Status": "Enabled"}
    policies = json.dumps(
        [item for item in shipped.store["Resources"].values() if item["Type"] == "AWS::S3::BucketPolicy"]
    )
    assert policies.count('"aws:SecureTransport": "false"') == len(buckets)


def test_the_seams_are_where_the_architecture_puts_them(every: Synthesized) -> None:
    digest = every.fleet["Parameters"]["ArtifactDigest"]
    assert re.fullmatch(digest["AllowedPattern"], "0" * 64) and "Default" not in digest
    assert {"Url", "FleetGroupName", "TargetGroupArn"} <= set(every.fleet["Outputs"])
    assert ("HeadGroupName" in every.fleet["Outputs"]) == ("HeadGroup" in every.fleet["Resources"])
    assert "ArtifactBucketName" in every.store["Outputs"]
    assert every.fleet["Outputs"]["FleetGroupName"]["Value"] == {"Ref": "FleetGroup"}
    assert not [name for name in resource_types(every) if name.startswith(("Custom::", "AWS::Lambda"))]


def resource_types(item: Synthesized) -> set[str]:
    return {resource["Type"] for template in item.templates for resource in template["Resources"].values()}


def test_sizes_and_capacity_are_parameters_of_one_code(synth: Synth) -> None:
    settings = load_settings("dev")
    small = synth("dev")
    large = synth("dev", instance_type="inf2.48xlarge", tp_degree="8", host_zones="2")
    assert instance_types(small) == {settings.fleet.instance_type}
    assert instance_types(large) == {"inf2.48xlarge"}
    more = synth("blueprint", egress="none", numactl_from="image", desired_capacity="3")
    fleet = more.of_type(GROUP)["FleetGroup"]
    assert fleet["Properties"]["MinSize"] == "3"
    assert fleet["CreationPolicy"]["ResourceSignal"]["Count"] == 3


def instance_types(item: Synthesized) -> set[Any]:
    templates = item.of_type(TEMPLATE).values()
    return {template["Properties"]["LaunchTemplateData"]["InstanceType"] for template in templates}


def changed_paths(one: Any, other: Any, path: str = "") -> set[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            item
            for key in one.keys() | other.keys()
            for item in changed_paths(one.get(key), other.get(key), f"{path}/{key}")
        }
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return {
            item
            for index, (left, right) in enumerate(zip(one, other, strict=True))
            for item in changed_paths(left, right, f"{path}/{index}")
        }
    return set() if one == other else {path}


@pytest.mark.parametrize("environment", ["dev", "blueprint", "prod"])
def test_a_rehearsal_differs_in_profile_model_and_image_only(synth: Synth, environment: str) -> None:
    plain, rehearsed = synth(environment), synth(environment, rehearsal="true")
    assert changed_paths(plain.store, rehearsed.store) == set()
    for path in changed_paths(plain.fleet, rehearsed.fleet):
        assert re.search(
            # The plan's figures follow from profile and model.
            r"^/Parameters/SsmParameterValue|/LaunchTemplateData/(ImageId|UserData)|^/Outputs/Plan"
            r"|/DashboardBody",
            path,
        ), path
    for before, after in zip(node_configs(plain), node_configs(rehearsed), strict=True):
        assert before.model_copy(update={"engine": after.engine}) == after
        changed = {
            key for key, value in before.engine.model_dump().items() if getattr(after.engine, key) != value
        }
        assert changed == {"profile", "model"}
    for before_text, after_text in zip(user_data(plain).values(), user_data(rehearsed).values(), strict=True):
        different = [
            one
            for one, two in zip(before_text.split("\n"), after_text.split("\n"), strict=True)
            if one != two
        ]
        assert len(different) == 1 and different[0].startswith("{")  # the node config
