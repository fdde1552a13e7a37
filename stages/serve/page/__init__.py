"""The chat page at `/`: three kinds of plain files, and nothing from anywhere else."""

from stages.serve.page.routes import page_routes

__all__ = ["page_routes"]
