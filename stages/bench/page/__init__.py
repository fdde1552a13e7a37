"""report.html: what report.json says, in plain words and charts, one file that opens offline."""

from stages.bench.page.page import PAGE_NAME, make_page
from stages.bench.page.words import stalls

__all__ = ["PAGE_NAME", "make_page", "stalls"]
