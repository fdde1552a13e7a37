"""Serves the page's files. They are read once, so no request names a path on this machine."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.exceptions import HTTPException

INDEX = "index.html"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# The page holds a key and shows what a model wrote: it runs its own scripts and talks to this server alone.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> APIRouter:
    """`/` and the files that it names, below `/page/`."""
    folder = files(__package__)
    found = {
        file.name: (file.read_bytes(), media_type)
        for file in folder.iterdir()
        if (media_type := MEDIA_TYPES.get("." + file.name.rpartition(".")[2]))
    }
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def index() -> Response:
        return give(INDEX)

    @router.get("/page/{name}")
    async def part(name: str) -> Response:
        return give(name)

    def give(name: str) -> Response:
        if name not in found:
            raise HTTPException(404, "Not Found")
        content, media_type = found[name]
        return Response(content, media_type=media_type, headers=HEADERS)

    return router
