"""Seconds and bytes: device and link records, formulas, and the model that prices clusters and redistributions."""

from meshwright.planner.cost.devices import DEVICES, device_for
from meshwright.planner.cost.links import LINKS, hardware_for
from meshwright.planner.cost.model import Candidate, CostModel

__all__ = ["DEVICES", "LINKS", "Candidate", "CostModel", "device_for", "hardware_for"]
