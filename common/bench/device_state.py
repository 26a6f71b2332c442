"""What a measurement ran on, and in what state the device was."""

from __future__ import annotations

import platform
import subprocess

import torch

from ..paths import ROOT
from ..runtime.build import toolkit_version

NOT_COLLECTED = "not collected"
SOURCES = (":/", ":!/profiles", ":!/README.md", ":!/worklog.md")  # what is not generated

POWER_CAP = "software power cap"  # a throttle reason

# Bits of nvmlDeviceGetCurrentClocksEventReasons.
_THROTTLE_REASONS = {
    0x001: "gpu idle",
    0x002: "application clocks setting",
    0x004: POWER_CAP,
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clock setting",
}


def _nvml():
    """The initialised NVML module and the handle of torch's current device, or None."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
    except pynvml.NVMLError:
        return None


def device_state() -> dict | str:
    """Clocks, power, temperature and throttle reasons at this moment, or "not collected"."""
    if not (found := _nvml()):
        return NOT_COLLECTED
    nvml, handle = found

    def read(query, *arguments):
        try:
            return query(handle, *arguments)
        except nvml.NVMLError:
            return None

    power_mw = read(nvml.nvmlDeviceGetPowerUsage)
    reasons = read(nvml.nvmlDeviceGetCurrentClocksEventReasons)
    return {
        "sm_clock_mhz": read(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": read(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        "power_w": power_mw and power_mw / 1000,
        "temperature_c": read(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": None
        if reasons is None
        else [name for bit, name in _THROTTLE_REASONS.items() if reasons & bit],
    }


def versions() -> dict[str, str]:
    """Names and versions of device, driver, toolkit, torch and Python."""
    found = _nvml()
    return {
        "device": torch.cuda.get_device_name(),
        "driver": found[0].nvmlSystemGetDriverVersion() if found else NOT_COLLECTED,
        "toolkit": toolkit_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def git_state() -> dict | str:
    """The commit, and whether tracked files other than the generated ones differ from it.

    "not collected" outside a repository.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no", "--", *SOURCES)),
        }
    except (OSError, subprocess.CalledProcessError):
        return NOT_COLLECTED
