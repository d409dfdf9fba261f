"""Reports: what a plan says, as text for people. Made of rich's tables, which are imported with the first report."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.report.text import print_report as print_report, report as report

__all__ = ["print_report", "report"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'meshwright.report' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module("meshwright.report.text"), name)
