"""What a figure was taken on: processor, versions, and how busy the processor was with other things.

Names no host and no path.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

QUIET_BELOW = 5.0  # percent of the last 10 s in which some task waited for a core

_PRESSURE = Path("/proc/pressure/cpu")
_CPUINFO = Path("/proc/cpuinfo")


def cpu_pressure() -> float | None:
    """Percent of the last 10 s in which some task waited for a core; None where the kernel does not say."""
    if not _PRESSURE.exists():
        return None
    some = _PRESSURE.read_text().splitlines()[0]
    return float(dict(pair.split("=") for pair in some.split()[1:])["avg10"])


def is_quiet(*pressures: float | None) -> bool:
    """True when every reading is known and low; a figure taken otherwise is no headline."""
    return all(p is not None and p < QUIET_BELOW for p in pressures)


def machine() -> dict[str, str | int]:
    return {"cpu": _cpu_model(), "cores": os.cpu_count() or 0}


def _cpu_model() -> str:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": _version("torch"), "nonet": _version("nonet")}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
