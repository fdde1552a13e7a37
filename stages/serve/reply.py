"""A completion on its way to its client: as one body, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stages.serve.api import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChunkChoice,
    Delta,
    SpeculationStats,
    Usage,
)
from stages.serve.api_error import ApiError
from stages.serve.completion import Completion

CLIENT_GONE = 499
ID_SHOWN = 8


class Reply:
    """One answer in OpenAI's wire format, whole or in chunks.

    Args:
        log: gets one line when the reply is closed.
    """

    def __init__(self, model: str, completion: Completion, log: Callable[[str], None]) -> None:
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._completion = completion
        self._log = log
        self._outcome = "cancelled"

    async def whole(self, request: Request) -> Response:
        """The answer as one body; when the client leaves before it is complete, the engine is freed."""
        text = asyncio.ensure_future(self._text())
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({text, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not text.done():
                return Response(status_code=CLIENT_GONE)
            return JSONResponse(self._body(text.result()).model_dump())
        except ApiError as error:
            self._failed(error)
            return JSONResponse(error.body(), error.status, error.headers())
        finally:
            text.cancel()
            gone.cancel()
            self.close()

    async def events(self, *, include_usage: bool) -> AsyncIterator[str]:
        """The answer as server-sent events. An error is an event too, since the status has been sent."""
        role: Literal["assistant"] | None = "assistant"
        try:
            async for piece in self._completion.pieces():
                yield self._chunk(ChunkChoice(delta=Delta(role=role, content=piece)))
                role = None
            self._complete()
            if role is not None:
                yield self._chunk(ChunkChoice(delta=Delta(role=role, content="")))
            reason = self._completion.answer.finish_reason
            yield self._chunk(ChunkChoice(delta=Delta(), finish_reason=reason), eagle=self._completion.stats)
            if include_usage:
                yield self._chunk(usage=self._completion.usage)
        except ApiError as error:
            self._failed(error)
            yield _event(json.dumps(error.body()))
        yield _event("[DONE]")

    def close(self) -> None:
        """Ends the reply, complete or not: the engine is free of it, and the log has its line."""
        self._completion.cancel()
        self._log(f"{self._id[-ID_SHOWN:]} {self._outcome}: {self._completion.summary()}")

    async def _text(self) -> str:
        text = "".join([piece async for piece in self._completion.pieces()])
        self._complete()
        return text

    def _complete(self) -> None:
        self._outcome = self._completion.answer.finish_reason or self._outcome

    def _failed(self, error: ApiError) -> None:
        self._outcome = error.code or error.kind
        if error.__cause__ is not None:
            self._log("".join(traceback.format_exception(error.__cause__)).rstrip())

    def _body(self, text: str) -> ChatCompletion:
        reason = self._completion.answer.finish_reason
        assert reason is not None
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[Choice(message=AssistantMessage(content=text), finish_reason=reason)],
            usage=self._completion.usage,
            eagle=self._completion.stats,
        )

    def _chunk(
        self, *choices: ChunkChoice, usage: Usage | None = None, eagle: SpeculationStats | None = None
    ) -> str:
        chunk = ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=list(choices),
            usage=usage,
            eagle=eagle,
        )
        return _event(chunk.model_dump_json())


class EventStream(StreamingResponse):
    """A reply as a stream; closes it when the stream ends, be it by the client leaving before the start."""

    def __init__(self, reply: Reply, *, include_usage: bool) -> None:
        super().__init__(
            reply.events(include_usage=include_usage),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.close()


def _event(data: str) -> str:
    return f"data: {data}\n\n"


async def _disconnected(request: Request) -> None:
    """Returns when the client has left. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
