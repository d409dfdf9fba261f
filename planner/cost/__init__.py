"""Seconds and bytes: device and link records, formulas, and the model that prices clusters and redistributions."""

from meshwright.planner.cost.devices import DEVICES, device_for
from meshwright.planner.cost.links import LINKS
from meshwright.planner.cost.model import Candidate, CostModel
from meshwright.planner.cost.topology import Topology, hardware_for

__all__ = ["DEVICES", "LINKS", "Candidate", "CostModel", "Topology", "device_for", "hardware_for"]
