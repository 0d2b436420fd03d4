"""The report of a run: one HTML file that opens from disk, with no network."""

from .examples import NeighbourLabels, Neighbours
from .page import ReportData, write_report

__all__ = ["NeighbourLabels", "Neighbours", "ReportData", "write_report"]
