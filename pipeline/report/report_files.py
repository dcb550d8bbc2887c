"""Reports that have a page, and the names of their files in a run's folder."""

from pipeline.report.report import Report

AnyReport = Report
"""A report that has a page."""
PAGE_NAME = "report.html"
REPORT_NAME = "speedup.json"
"""File name of a `Report`."""
CHART_NAME, CURVES_NAME = "speedup.png", "learning_curves.png"
PAIRS_NAME, PAIRS_CHART_NAME = "pairs.csv", "pairs.png"
