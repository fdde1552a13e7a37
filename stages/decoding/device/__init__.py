"""Decoding without the host in the cycle: static shapes, state on the device, graphs, overlap."""

from stages.decoding.device.cycle import Found
from stages.decoding.device.loop import DeviceLoop, drafts_for
from stages.decoding.device.state import Entry

__all__ = ["DeviceLoop", "Entry", "Found", "drafts_for"]
