"""A report to look at: one page, or plots, from a file and the run that made it."""

from bayeszip.report.contents import Contents, gather
from bayeszip.report.page import page

__all__ = ["Contents", "gather", "page"]
