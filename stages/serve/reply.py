"""A completion on its way to its client: as one body, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stages.serve.api_error import ApiError
from stages.serve.completion import Completion
from stages.serve.metrics import Metrics
from stages.serve.request import UsageShown
from stages.serve.request_log import RequestLog, RequestRecord
from stages.serve.response import ChatCompletionChunk, TextCompletion
from stages.serve.wire import Wire

CLIENT_GONE = 499


class Reply:
    """A request's answers in a wire format, whole or in chunks.

    Args:
        log: gets one line when the reply is closed.
        request_id: of the request, for the log.
    """

    def __init__(
        self, wire: Wire, completion: Completion, log: RequestLog, metrics: Metrics, request_id: str
    ) -> None:
        self._wire = wire
        self._completion = completion
        self._log = log
        self._metrics = metrics
        self._request_id = request_id
        self._outcome = self._kind = "cancelled"

    async def whole(self, request: Request) -> Response:
        """The answers as one body; when the client leaves before it is complete, the engine is freed."""
        texts = asyncio.ensure_future(self._texts())
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({texts, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not texts.done():
                return Response(status_code=CLIENT_GONE)
            return Response(self._wire.whole(texts.result()).model_dump_json(), media_type="application/json")
        except ApiError as error:
            self._failed(error)
            return JSONResponse(error.body(), error.status, error.headers())
        finally:
            texts.cancel()
            gone.cancel()
            self.close()

    async def events(self, *, usage: UsageShown, every_id: bool) -> AsyncIterator[str]:
        """The answers as server-sent events. An error is an event too, since the status has been sent.

        Args:
            usage: in which events the tokens so far are told.
            every_id: ids are shown, so that those without text have an event too.
        """
        begun: set[int] = set()
        try:
            async for piece in self._completion.pieces():
                choice = piece.choice
                first = choice.index not in begun
                ended = choice.answer.finish_reason is not None
                if piece.text or piece.calls or (every_id and piece.token_ids) or (first and ended):
                    begun.add(choice.index)
                    yield self._part(self._wire.piece(piece, first), usage)
                if ended:
                    yield self._part(self._wire.end(choice), usage)
            self._complete()
            if usage != "never":
                yield _event(self._wire.usage(self._completion.usage).model_dump_json())
        except ApiError as error:
            self._failed(error)
            yield _event(json.dumps(error.body()))
        yield _event("[DONE]")

    def _part(self, body: ChatCompletionChunk | TextCompletion, usage: UsageShown) -> str:
        """An event, with the usage so far where all have it."""
        if usage == "always":
            body.usage = self._completion.usage
        return _event(body.model_dump_json())

    def close(self) -> None:
        """Ends the reply, complete or not: the engine is free of it, and log and metrics have it."""
        self._completion.cancel()
        self._log.ended(RequestRecord.of(self._wire.id, self._request_id, self._outcome, self._completion))
        self._metrics.ended(self._kind, self._completion.seconds)

    async def _texts(self) -> list[str]:
        pieces: list[list[str]] = [[] for _ in self._completion.choices]
        async for piece in self._completion.pieces():
            pieces[piece.choice.index].append(piece.text)
        self._complete()
        return ["".join(each) for each in pieces]

    def _complete(self) -> None:
        self._kind = "complete"
        reasons = []
        for choice in self._completion.choices:
            reason = choice.answer.finish_reason
            assert reason is not None
            reasons.append(reason)
            self._metrics.answered(reason, choice.tpot_s)
        self._outcome = "+".join(sorted(set(reasons)))

    def _failed(self, error: ApiError) -> None:
        self._outcome = error.code or error.kind
        self._kind = "stopped" if error.status == 503 else "failed"
        if error.__cause__ is not None:
            self._log.failed(error.__cause__, self._request_id)


class EventStream(StreamingResponse):
    """A reply as a stream; closes it when the stream ends, be it by the client leaving before the start."""

    def __init__(self, reply: Reply, *, usage: UsageShown, every_id: bool) -> None:
        super().__init__(
            reply.events(usage=usage, every_id=every_id),
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
