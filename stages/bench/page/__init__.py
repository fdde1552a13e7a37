"""report.html: what report.json says, in plain words and charts, one file that opens offline; and its charts
as pictures."""

from stages.bench.page.figures import Figure, figures
from stages.bench.page.page import PAGE_NAME, make_page
from stages.bench.page.pictures import pictures
from stages.bench.page.words import stalls

__all__ = ["PAGE_NAME", "Figure", "figures", "make_page", "pictures", "stalls"]
