"""The catalogue says what EC2 says, and every figure says where it is from."""

from __future__ import annotations

import boto3
import pytest
from moto import mock_aws

from app.plan.catalogue import FIELD_SOURCES, INF2, SOURCES, InstanceType, UnknownNameError, get_instance
from app.plan.catalogue_gpu import GPU
from app.plan.prices import PriceError, load_prices


@pytest.fixture(scope="module")
def described() -> dict[str, dict]:
    with mock_aws():
        ec2 = boto3.client("ec2", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
        answer = ec2.describe_instance_types(InstanceTypes=[*INF2, *GPU])
    return {item["InstanceType"]: item for item in answer["InstanceTypes"]}


@pytest.mark.parametrize("name", INF2)
def test_inf2_agrees_with_describe_instance_types(name: str, described: dict[str, dict]) -> None:
    ours, theirs = INF2[name], described[name]
    (device,) = theirs["NeuronInfo"]["NeuronDevices"]
    network, ebs = theirs["NetworkInfo"], theirs["EbsInfo"]["EbsOptimizedInfo"]
    assert ours.vcpus == theirs["VCpuInfo"]["DefaultVCpus"]
    assert ours.memory_mib == theirs["MemoryInfo"]["SizeInMiB"]
    assert ours.chips == device["Count"]
    assert ours.cores == device["Count"] * device["CoreInfo"]["Count"]
    assert ours.hbm_mib == theirs["NeuronInfo"]["TotalNeuronDeviceMemoryInMiB"]
    assert ours.efa == network["EfaSupported"]
    assert ours.network_gbps == network["NetworkCards"][0]["BaselineBandwidthInGbps"]
    assert ours.network_gbps_peak == network["NetworkCards"][0]["PeakBandwidthInGbps"]
    assert ours.ebs_gbps * 1000 == ebs["BaselineBandwidthInMbps"]
    assert ours.ebs_gbps_peak * 1000 == ebs["MaximumBandwidthInMbps"]


@pytest.mark.parametrize("name", GPU)
def test_gpu_table_agrees_with_describe_instance_types(name: str, described: dict[str, dict]) -> None:
    ours, theirs = GPU[name], described[name]
    (gpu,) = theirs["GpuInfo"]["Gpus"]
    assert (ours.gpu, ours.gpus, ours.gpu_memory_mib) == (
        gpu["Name"],
        gpu["Count"],
        gpu["MemoryInfo"]["SizeInMiB"],
    )
    assert ours.vcpus == theirs["VCpuInfo"]["DefaultVCpus"]
    assert ours.memory_mib == theirs["MemoryInfo"]["SizeInMiB"]


def test_every_figure_has_a_dated_source() -> None:
    assert set(FIELD_SOURCES) == set(InstanceType.model_fields)
    for source in FIELD_SOURCES.values():
        assert SOURCES[source].dated >= "2024"
        assert SOURCES[source].where


def test_numa_map_of_48xlarge() -> None:
    devices = INF2["inf2.48xlarge"].neuron_devices
    by_node = {node: [d.index for d in devices if d.numa_node == node] for node in range(4)}
    assert by_node == {0: [8, 9, 10], 1: [6, 7, 11], 2: [0, 2, 4], 3: [1, 3, 5]}
    assert len({device.bdf for device in devices}) == 12
    assert INF2["inf2.24xlarge"].numa_nodes is None


def test_unknown_size_lists_those_that_exist() -> None:
    with pytest.raises(UnknownNameError, match=r"inf2\.4xlarge.*inf2\.xlarge, inf2\.8xlarge"):
        get_instance("inf2.4xlarge")


def test_every_size_has_prices_and_reserved_is_cheaper() -> None:
    book = load_prices()
    for region, prices in book.regions.items():
        for name, price in prices.items():
            assert name in INF2 or name in GPU, (region, name)
            if price.reserved_1y is not None and price.on_demand is not None:
                assert 0.4 < price.reserved_1y / price.on_demand < 0.8
    assert {*INF2, *GPU} <= set(book.regions["us-east-1"])


def test_prices_can_be_replaced(tmp_path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(
        '{"version": 1, "dated": "2027-01-01", "source": "ours", '
        '"regions": {"us-east-1": {"inf2.xlarge": {"spot": 0.2, "on_demand": 0.5}}}}'
    )
    book = load_prices(path)
    assert book.usd_per_hour("inf2.xlarge", purchase="spot") == 0.2
    assert book.usd_per_hour("inf2.xlarge") == 0.5
    assert book.usd_per_hour("inf2.xlarge", purchase="reserved_1y") == 0.47767  # kept
    assert book.usd_per_hour("inf2.8xlarge") == 1.96786
    assert load_prices().usd_per_hour("inf2.xlarge") == 0.7582  # the shipped book is not changed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot read prices"),
        ('{"version": 1}', "dated.*source.*regions"),
        (
            '{"version": 1, "dated": "d", "source": "s", '
            '"regions": {"r": {"inf2.xlarge": {"on_demand": -1}}}}',
            "regions.r.inf2.xlarge.on_demand",
        ),
    ],
)
def test_wrong_price_files_are_named(tmp_path, text: str, said: str) -> None:
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.raises(PriceError, match=said):
        load_prices(path)


def test_missing_prices_say_what_is_known() -> None:
    book = load_prices()
    with pytest.raises(PriceError, match=r"no prices for region 'mars-1'; known: .*us-east-1"):
        book.usd_per_hour("inf2.xlarge", "mars-1")
    with pytest.raises(PriceError, match=r"known in: .*eu-west-1"):
        book.usd_per_hour("inf2.8xlarge", "ap-northeast-2")
    with pytest.raises(PriceError, match="--prices"):
        book.usd_per_hour("inf2.8xlarge", purchase="spot")
