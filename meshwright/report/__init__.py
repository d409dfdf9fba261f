"""Reports: what a plan says, as text for people."""

from meshwright.report.text import print_report, report

__all__ = ["print_report", "report"]
