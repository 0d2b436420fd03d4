"""What a server is asked for."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re

from ..errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_SIZE = re.compile(r"(\d{1,12})([KMG]?)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """The settings of a server.

    host: address to listen on; other machines reach it only if this is not a loopback address
    port: port to listen on
    max_hot: models with expanded weights in memory at a time, those in exchange included
    max_batch: most images in a forward pass
    max_wait_ms: how long an image waits for others of its mask that are on their way, in milliseconds
    pin: masks whose weights stay expanded
    api_key_file: file with the keys that requests must carry, one a line
    admin_key_file: file with the keys for adding and removing masks, one a line
    max_pixels: largest number of pixels of an image
    max_body: largest number of bytes of a request
    max_images: most images in a request
    queue: most images accepted and not yet answered; beyond, requests are refused (429)
    timeout: seconds that a request may take
    size: size of images; by default as stored with each mask
    workers: threads that run the model, each with a share of the cores; by default one for each
        core, but no more than half of max_hot
    memory: bytes for packed masks in memory; those that were not used for the longest time are read again
    insecure: listen beyond this machine without keys
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_hot: int = 8
    max_batch: int = 32
    max_wait_ms: float = 5.0
    pin: tuple[str, ...] = ()
    api_key_file: str | None = None
    admin_key_file: str | None = None
    max_pixels: str = "50M"
    max_body: str = "20M"
    max_images: int = 64
    queue: int = 256
    timeout: float = 30.0
    size: int | None = None
    workers: int | None = None
    memory: str = "4G"
    insecure: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("max_hot", 1),
            ("max_batch", 1),
            ("max_images", 1),
            ("queue", 1),
            ("size", 1),
            ("workers", 1),
        ):
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{name} is out of range", expected=f"{least} or more", found=value)
        if not 0 <= self.port < 1 << 16:
            raise ConfigError("port is out of range", expected="0 (any that is free) to 65535", found=self.port)
        if not 0 <= self.max_wait_ms <= 10_000:
            raise ConfigError("max_wait_ms is out of range", expected="0 to 10000", found=self.max_wait_ms)
        if not 0 < self.timeout <= 3600:
            raise ConfigError("timeout is out of range", expected="more than 0, at most 3600", found=self.timeout)
        for name in ("max_pixels", "max_body", "memory"):
            size_of(name, getattr(self, name))
        if self.max_hot <= self.threads or len(self.pin) > self.max_hot - self.threads:
            raise ConfigError(
                "max_hot is too small: each worker needs one of them for masks that come and go",
                expected=f"at least {max(1, len(self.pin)) + self.threads} ({self.threads} workers, "
                f"{len(self.pin)} pinned masks)",
                found=self.max_hot,
                todo="raise --max-hot, or use fewer --workers or --pin",
            )

    @property
    def threads(self) -> int:
        """How many run the model."""
        return self.workers or min(cores_here(), max(1, self.max_hot // 2))

    @property
    def cores(self) -> int:
        """How many cores each of them has, of those that this process may use and OMP_NUM_THREADS allows."""
        told = os.environ.get("OMP_NUM_THREADS", "")
        return max(1, (min(cores_here(), int(told)) if told.isdigit() else cores_here()) // self.threads)

    @property
    def any_host(self) -> bool:
        """Whether requests are served under whatever name of this machine they come."""
        return self.insecure or not is_loopback(self.host)

    @property
    def pixels(self) -> int:
        return size_of("max_pixels", self.max_pixels)

    @property
    def body(self) -> int:
        return size_of("max_body", self.max_body)

    @property
    def packed(self) -> int:
        return size_of("memory", self.memory)

    def check_host(self) -> None:
        """Refuse to be reached by others without a key, unless that was asked for twice."""
        if self.api_key_file is None and not self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"without a key, everybody who can reach {self.host} could use this server",
                expected="a loopback address, or a key",
                todo="set --api-key-file FILE, or, if that is meant, --insecure",
            )


def cores_here() -> int:
    """Cores that this process may use: all, or fewer where it was bound to some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host of that name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def size_of(name: str, text: str) -> int:
    """A number with K, M or G behind it, in thousands."""
    if (match := _SIZE.fullmatch(text)) is None or not (value := int(match[1]) * _UNITS[match[2].upper()]):
        raise ConfigError(f"{name} is not a size", expected="a number such as 500K, 50M or 2G", found=text)
    return value
