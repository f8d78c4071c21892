"""The report of a run as one HTML page, made from its log alone: see ``page``."""

from rlhf_core.report.page import report_html

__all__ = ["report_html"]
