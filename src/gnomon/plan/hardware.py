"""Machines: one TOML file per device, every number with its unit, its date and its source; clusters as `"h200:8"` or `"gb300:72x2"`.

A user's own file goes by its path (`"my-box.toml:4"`). What a file marks as placeholder or unverified is kept, so that figures which rest
on it can say so. Read next: `footprint.py`.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnomon import config as toml
from gnomon.config import setting
from gnomon.errors import ConfigError
from gnomon.extend import suggestion
from gnomon.units import parse_byte_rate, parse_bytes, parse_dollar_rate, parse_flop_rate

FOLDER = Path(__file__).parent / "hardware"
"""The folder of known devices."""

HERE = "here"
"""The name of the user's own machine, once `gnomon plan --calibrate` has measured it."""

FORMATS = ("fp32", "bf16", "fp8", "fp4")
"""Number formats that a device may compute in, widest first."""

BALANCE_RANGE = {"fp32": (0.3, 500.0), "bf16": (1.0, 2000.0), "fp8": (1.0, 4000.0), "fp4": (1.0, 8000.0)}
"""FLOP per byte of memory traffic that machines have; outside it a unit is wrong."""

SWEEP_RANGE_SECONDS = (0.002, 20.0)
"""Time to read the whole memory once; outside it a unit is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Dollars per device and hour: the least that owning it costs, a middle, the most that a market asks."""

    low: str = setting(doc="e.g. '1.30 $/h'")
    typical: str = setting(doc="e.g. '2.95 $/h'")
    high: str = setting(doc="e.g. '5.00 $/h'")
    date: str = setting(doc="when these were seen, YYYY-MM or YYYY-MM-DD")
    source: str = setting(doc="where")


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareFile:
    """What a hardware file says, as text with units."""

    title: str = setting(doc="name for reading")
    date: str = setting(doc="when the figures were taken, YYYY-MM or YYYY-MM-DD")
    source: str = setting(doc="where the figures are from")
    compute: dict[str, str] = setting(factory=dict, doc="dense peak by format, e.g. bf16 = '989 TFLOP/s'")
    memory: str = setting(doc="usable memory, e.g. '141 GiB'")
    bandwidth: str = setting(doc="memory bandwidth, e.g. '4.8 TB/s'")
    fabric: str = setting("none", "what joins the devices of one domain")
    scale_up: str | None = setting(None, "bandwidth of that per device and direction; none: a single device")
    scale_up_size: int = setting(1, "devices that it joins at most")
    scale_out: str | None = setting(None, "network bandwidth per device and direction; none: no network")
    power: str | None = setting(None, "watts per device, all in, e.g. '1730 W'")
    price: Price | None = setting(None, "price per hour; none: owned")
    placeholder: tuple[str, ...] = setting((), "fields whose source calls them placeholders")
    verify: tuple[str, ...] = setting((), "fields that have not been checked against a second source")
    notes: str = setting("", "anything else")


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device: rates in FLOP/s and B/s (per direction for links), sizes in bytes, dollars per hour, watts."""

    name: str
    title: str
    flops: Mapping[str, float]
    memory_bytes: int
    bandwidth: float
    fabric: str
    scale_up_bandwidth: float
    scale_up_size: int
    scale_out_bandwidth: float
    price_per_hour: tuple[float, float, float] | None
    power_watts: float | None
    source: str
    date: str
    price_source: str = ""
    price_date: str = ""
    placeholder: tuple[str, ...] = ()
    verify: tuple[str, ...] = ()
    notes: str = ""

    def peak(self, number_format: str) -> float:
        """Dense FLOP/s for a format: its own rate, else that of the next wider format the device has; `ConfigError` if it has none."""
        start = FORMATS.index(number_format)
        for name in (*reversed(FORMATS[: start + 1]), *FORMATS[start + 1:]):
            if name in self.flops:
                return self.flops[name]
        raise ConfigError(f"'{self.name}' states no computing rate; add e.g. bf16 = \"100 TFLOP/s\" below [compute] in its file")

    def computes_in(self, number_format: str) -> str:
        """The format whose rate `peak` gives."""
        return next(name for name in FORMATS if name in self.flops and self.flops[name] == self.peak(number_format))

    def balance(self, number_format: str = "bf16") -> float:
        """FLOPs that the device can do while it reads one byte."""
        return self.peak(number_format) / self.bandwidth


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """`domains` groups of `devices_per_domain` devices; within a group the scale-up fabric, between groups the network."""

    device: Device
    devices_per_domain: int
    domains: int = 1

    def __post_init__(self) -> None:
        device, size = self.device, self.device.scale_up_size
        if self.devices_per_domain < 1 or self.domains < 1:
            raise ConfigError(f"a cluster of {self.devices_per_domain} x {self.domains} devices is empty; use at least '{device.name}:1'")
        if self.devices_per_domain > size:
            even = next((n for n in range(2, self.devices_per_domain) if self.devices_per_domain % n == 0
                         and self.devices_per_domain // n <= size), -(-self.devices_per_domain // size))
            raise ConfigError(f"'{device.name}:{self.devices_per_domain}' is more than the {size} devices that {device.fabric} joins; "
                              f"write '{device.name}:{-(-self.devices_per_domain // even)}x{even}' for several domains")
        if self.domains > 1 and not device.scale_out_bandwidth:
            raise ConfigError(f"'{device.name}' states no network, so {self.domains} domains cannot work together; "
                              f"use at most {size}, or a file of your own with 'scale_out'")

    @property
    def count(self) -> int:
        """Devices in all."""
        return self.devices_per_domain * self.domains

    @property
    def memory_bytes(self) -> int:
        """Memory of all devices."""
        return self.count * self.device.memory_bytes

    @property
    def name(self) -> str:
        """As it is written: `"h200:8"`, `"gb300:72x2"`."""
        return f"{self.device.name}:{self.devices_per_domain}" + (f"x{self.domains}" if self.domains > 1 else "")

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """`"h200"` is one device, `"h200:8"` eight, `"gb300:72x2"` two domains of 72; `"b200:16"` becomes two full domains of 8."""
        name, _, size = text.rpartition(":") if re.search(r":[0-9x×\s]*$", text) else (text, "", "1")
        match = re.fullmatch(r"\s*([0-9]+)\s*(?:[x×]\s*([0-9]+)\s*)?", size)
        if match is None or not name.strip():
            raise ConfigError(f"'{text}' is not a cluster; write DEVICE, DEVICE:8 or DEVICE:72x2 (two domains of 72)")
        found = device(name)
        per_domain, domains = int(match[1]), int(match[2] or 1)
        if match[2] is None and per_domain > found.scale_up_size and per_domain % found.scale_up_size == 0:
            per_domain, domains = found.scale_up_size, per_domain // found.scale_up_size
        return cls(device=found, devices_per_domain=per_domain, domains=domains)


def user_folder() -> Path:
    """Where a user's own records and hardware files live: `$XDG_CONFIG_HOME/gnomon`, else `~/.config/gnomon`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "gnomon"


def device_names() -> list[str]:
    """The devices that come with the package, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def device(name: str) -> Device:
    """A device by name (`"h200"`), or a file of the user's own by path (`"my-box.toml"`); `ConfigError` says what is wrong with either."""
    if name.strip().endswith(".toml"):
        return read_device(Path(name.strip()))
    wanted = re.sub(r"[\s_]+", "-", name.strip().lower())
    own = user_folder() / "hardware" / f"{wanted}.toml"
    if wanted not in device_names() and own.is_file():
        return read_device(own)
    if wanted == HERE:
        raise ConfigError("this machine has not been measured yet; run: gnomon plan --calibrate")
    if wanted not in device_names():
        raise ConfigError(f"unknown device '{name}'{suggestion(wanted, device_names())} (known: {', '.join(device_names())}; "
                          f"or a hardware file of your own, ending in .toml)")
    return read_device(FOLDER / f"{wanted}.toml")


def read_device(path: Path) -> Device:
    """A device from its file; raises one `ConfigError` for a missing source or date, a missing unit, or a figure no machine has."""
    if not path.is_file():
        raise ConfigError(f"hardware file '{path}' does not exist; known devices: {', '.join(device_names())}")
    table = toml.read_toml(path)
    for name in ("source", "date"):
        if not str(table.get(name, "")).strip():
            raise ConfigError(f"{path}: '{name}' is missing; a hardware file says where its numbers are from and of when they are")
    sheet = toml.from_dict(HardwareFile, _as_text(table, path), str(path))
    for when in (sheet.date, sheet.price.date if sheet.price else sheet.date):
        if not re.fullmatch(r"20[0-9]{2}-[01][0-9](-[0-3][0-9])?", when):
            raise ConfigError(f"{path}: date '{when}' is not YYYY-MM or YYYY-MM-DD")
    made = _device(path, sheet)
    _check_physics(made, path)
    return made


def _as_text(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Refuse bare numbers where a unit belongs, before anything is converted; dates may be TOML dates."""
    def text(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: text(f"{key}.{name}", item) for name, item in value.items()}
        if isinstance(value, (int, float)) and key != "scale_up_size":
            raise ConfigError(f"{path}: '{key}' is the bare number {value}; write it with its unit, e.g. \"{value} {_unit_of(key)}\"")
        return value.isoformat() if hasattr(value, "isoformat") else value
    return {key: text(key, value) for key, value in table.items()}


def _unit_of(key: str) -> str:
    return {"memory": "GiB", "power": "W", "compute": "TFLOP/s", "price": "$/h"}.get(key.partition(".")[0], "GB/s")


def _device(path: Path, sheet: HardwareFile) -> Device:
    for name in sheet.compute:
        if name not in FORMATS:
            raise ConfigError(f"{path}: 'compute.{name}' is not a format{suggestion(name, FORMATS)} (known: {', '.join(FORMATS)})")

    def parsed(parse: Callable[[str], Any], key: str, value: str | None) -> Any:
        try:
            return 0.0 if value is None else parse(value)
        except ConfigError as error:
            raise ConfigError(f"{path}: '{key}': {error}") from None

    price = sheet.price
    return Device(
        name=path.stem, title=sheet.title, fabric=sheet.fabric, scale_up_size=sheet.scale_up_size,
        flops={name: parsed(parse_flop_rate, f"compute.{name}", text) for name, text in sheet.compute.items()},
        memory_bytes=parsed(_with_unit, "memory", sheet.memory), bandwidth=parsed(parse_byte_rate, "bandwidth", sheet.bandwidth),
        scale_up_bandwidth=parsed(parse_byte_rate, "scale_up", sheet.scale_up),
        scale_out_bandwidth=parsed(parse_byte_rate, "scale_out", sheet.scale_out),
        price_per_hour=None if price is None else tuple(
            parsed(parse_dollar_rate, f"price.{key}", getattr(price, key)) for key in ("low", "typical", "high")),
        power_watts=None if sheet.power is None else parsed(_watts, "power", sheet.power),
        source=sheet.source, date=sheet.date, price_source=price.source if price else "", price_date=price.date if price else "",
        placeholder=sheet.placeholder, verify=sheet.verify, notes=sheet.notes,
    )


def _with_unit(text: str) -> int:
    if re.fullmatch(r"[0-9_,.\s]*", text):
        raise ConfigError(f"'{text}' has no unit; write e.g. '141 GiB' (2^30) or '141 GB' (10^9)")
    return parse_bytes(text)


def _watts(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+)\s*(k?)W\s*", text)
    if match is None:
        raise ConfigError(f"'{text}' is not a power; write e.g. '700 W' or '1.73 kW'")
    return float(match[1]) * (1000 if match[2] else 1)


def _check_physics(made: Device, path: Path) -> None:
    rates = {"bandwidth": made.bandwidth, **{f"compute.{name}": rate for name, rate in made.flops.items()}}
    for name, rate in rates.items():
        if rate <= 0:
            raise ConfigError(f"{path}: '{name}' is {rate}; it must be positive")
    for name, rate in made.flops.items():
        low, high = BALANCE_RANGE[name]
        if not low <= rate / made.bandwidth <= high:
            raise ConfigError(f"{path}: {name} at {rate:.3g} FLOP/s over {made.bandwidth:.3g} B/s is {rate / made.bandwidth:.3g} "
                              f"FLOP/byte; machines have {low:g} to {high:g}; check the units of 'compute.{name}' and 'bandwidth'")
    sweep, (low, high) = made.memory_bytes / made.bandwidth, SWEEP_RANGE_SECONDS
    if not low <= sweep <= high:
        raise ConfigError(f"{path}: reading {made.memory_bytes:.3g} B of memory at {made.bandwidth:.3g} B/s takes {sweep:.3g} s; "
                          f"machines take {low:g} to {high:g} s; check the units of 'memory' and 'bandwidth'")
    for name, link in (("scale_up", made.scale_up_bandwidth), ("scale_out", made.scale_out_bandwidth)):
        if link > made.bandwidth:
            raise ConfigError(f"{path}: '{name}' is {link:.3g} B/s, faster than the memory ({made.bandwidth:.3g} B/s); check its unit")
    if made.scale_up_size < 1 or (made.scale_up_size > 1 and not made.scale_up_bandwidth):
        raise ConfigError(f"{path}: 'scale_up_size' is {made.scale_up_size}; it is at least 1, and above 1 it needs 'scale_up'")
    prices = made.price_per_hour
    if prices is not None and not 0 < prices[0] <= prices[1] <= prices[2] <= 1000:
        raise ConfigError(f"{path}: prices {prices} $/h; low, typical and high must rise and stay below 1000 $/h per device")
