"""Hardware files: every one parses and stays within physics; whatever is wrong with a file or a name is one clear error."""

import dataclasses
from pathlib import Path

import pytest

from gnomon.errors import ConfigError
from gnomon.plan.hardware import FOLDER, Cluster, device, device_names, read_device

GOOD = '''title = "Box"
date = "2026-08"
source = "its data sheet"
memory = "141 GiB"
bandwidth = "4.8 TB/s"
scale_up = "450 GB/s"
scale_up_size = 8
scale_out = "400 Gbit/s"
[compute]
bf16 = "989 TFLOP/s"
'''

PUBLISHED = {  # bf16 TFLOP/s, memory in the vendor's number, TB/s, scale-up GB/s
    "a100": (312, 80, 2.039, 300), "h100": (989, 80, 3.35, 450), "h200": (989, 141, 4.8, 450), "h20": (148, 96, 4.0, 450),
    "b200": (2250, 180, 8.0, 900), "b300": (2250, 268, 8.0, 900), "gb200": (2500, 186, 8.0, 900), "gb300": (2500, 277, 8.0, 900),
    "mi300x": (1307, 192, 5.3, 448), "mi355x": (2516, 288, 8.0, 576), "tpu-v5p": (459, 95, 2.765, 600), "tpu-v6e": (918, 32, 1.638, 400),
    "tpu7x": (2307, 192, 7.37, 600), "rtx-4090": (165, 24, 1.008, 32), "rtx-5090": (210, 32, 1.792, 64),
    "rtx-pro-6000": (468, 102.6, 1.792, 64), "l40s": (362, 48, 0.864, 32), "gb10": (125, 128, 0.273, 25), "m4-max": (18, 128, 0.546, 10),
    "m5-max": (70, 128, 0.614, 10), "m3-ultra": (28, 512, 0.819, 10), "xeon-2core": (0.09, 23, 0.0095, 0),
}


def written(folder: Path, text: str) -> Path:
    path = folder / "box.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", device_names())
def test_every_file_parses_and_says_where_it_is_from(name: str) -> None:
    made = device(name)
    assert made.name == name and made.source and made.date and made.title
    assert (made.price_per_hour is None) == (made.price_source == "")
    fields = {f.name for f in dataclasses.fields(made)} | {"memory", "scale_up", "scale_out", "price.low", "price.typical", "price.high"}
    for marked in (*made.placeholder, *made.verify):
        assert marked in fields or marked.removeprefix("compute.") in made.flops


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_figures_are_those_published(name: str) -> None:
    made, (tflops, memory, tbs, link) = device(name), PUBLISHED[name]
    assert max(made.flops.get("bf16", 0), made.flops.get("fp32", 0)) == pytest.approx(tflops * 1e12)
    assert made.memory_bytes in (round(memory * 1e9), round(memory * 2**30))
    assert made.bandwidth == pytest.approx(tbs * 1e12) and made.scale_up_bandwidth == pytest.approx(link * 1e9)


def test_all_devices_are_there() -> None:
    assert device_names() == sorted(PUBLISHED) == sorted(p.stem for p in FOLDER.glob("*.toml"))


@pytest.mark.parametrize(("text", "name", "count", "domains"), [
    ("h200", "h200:1", 1, 1), ("h200:8", "h200:8", 8, 1), ("gb300:72x2", "gb300:72x2", 144, 2), ("b200:16", "b200:8x2", 16, 2),
    ("RTX PRO 6000:16", "rtx-pro-6000:16", 16, 1), ("h200: 8 x 2", "h200:8x2", 16, 2),
])
def test_clusters(text: str, name: str, count: int, domains: int) -> None:
    cluster = Cluster.parse(text)
    assert (cluster.name, cluster.count, cluster.domains) == (name, count, domains)
    assert cluster.memory_bytes == count * cluster.device.memory_bytes


@pytest.mark.parametrize(("text", "message"), [
    ("h2000:8", "did you mean 'h200'"), ("h200:", "write DEVICE"), ("h200:0", "is empty"), ("h200:12", "write 'h200:6x2'"),
    ("h200:17", "write 'h200:6x3'"),
    ("h200:8y2", "unknown device"), ("m4-max:1x2", "states no network"), (":8", "write DEVICE"),
    ("absent.toml:2", "hardware file 'absent.toml' does not exist"),
])
def test_what_is_no_cluster(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cluster.parse(text)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    cluster = Cluster.parse(f"{written(tmp_path, GOOD)}:8x2")
    assert cluster.device.name == "box" and cluster.count == 16
    assert cluster.device.scale_out_bandwidth == 50e9
    assert cluster.device.balance() == pytest.approx(206.04, abs=0.01)
    assert cluster.device.peak("fp8") == 989e12 and cluster.device.computes_in("fp8") == "bf16"


@pytest.mark.parametrize(("before", "after", "message"), [
    ('source = "its data sheet"\n', "", "'source' is missing"),
    ('date = "2026-08"\n', "", "'date' is missing"),
    ('"2026-08"', '"last summer"', "is not YYYY-MM"),
    ('"141 GiB"', "141", "bare number 141; write it with its unit"),
    ('"141 GiB"', '"141"', "has no unit"),
    ('"4.8 TB/s"', '"4.8"', "not a bandwidth"),
    ('"4.8 TB/s"', '"4.8 Tb/s"', "not a bandwidth"),
    ('"4.8 TB/s"', '"4.8 GB/s"', "FLOP/byte"),
    ('"4.8 TB/s"', '"4800 TB/s"', "FLOP/byte"),
    ('"989 TFLOP/s"', '"989 GFLOP/s"', "FLOP/byte"),
    ('"989 TFLOP/s"', '"989"', "not a computing rate"),
    ('"141 GiB"', '"141 TiB"', "check the units of 'memory'"),
    ('"450 GB/s"', '"450 TB/s"', "faster than the memory"),
    ("bf16 =", "bf61 =", "did you mean 'bf16'"),
    ("memory =", "memroy =", "did you mean 'memory'"),
    ('scale_up = "450 GB/s"\n', "", "above 1 it needs 'scale_up'"),
])
def test_what_is_wrong_with_a_file(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in GOOD
    with pytest.raises(ConfigError, match=message):
        read_device(written(tmp_path, GOOD.replace(before, after)))


def test_prices_rise(tmp_path: Path) -> None:
    price = '[price]\nlow = "3 $/h"\ntypical = "2 $/h"\nhigh = "4 $/h"\ndate = "2026-08"\nsource = "a list"\n'
    with pytest.raises(ConfigError, match="must rise"):
        read_device(written(tmp_path, GOOD + price))
    assert read_device(written(tmp_path, GOOD + price.replace("3 $/h", "1 $/h"))).price_per_hour == (1.0, 2.0, 4.0)


def test_memory_of_a_device_is_not_confused_between_decimal_and_binary(tmp_path: Path) -> None:
    binary = read_device(written(tmp_path, GOOD)).memory_bytes
    decimal = read_device(written(tmp_path, GOOD.replace("141 GiB", "141 GB"))).memory_bytes
    assert (binary, decimal) == (151_397_597_184, 141_000_000_000)


def test_a_device_without_a_rate_says_so(tmp_path: Path) -> None:
    made = read_device(written(tmp_path, GOOD.partition("[compute]")[0]))
    with pytest.raises(ConfigError, match="states no computing rate"):
        made.peak("bf16")
