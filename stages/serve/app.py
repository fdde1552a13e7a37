"""The HTTP application: OpenAI's chat completions over the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from stages.errors import EagleError
from stages.serve.answer import Answer
from stages.serve.api import ChatCompletion, ChatRequest, Health, Model, ModelList
from stages.serve.api_error import ApiError, shown
from stages.serve.completion import Completion
from stages.serve.engine_thread import EngineThread
from stages.serve.reply import EventStream, Reply
from stages.serve.served_model import ServedModel
from stages.targets import Target

NOT_JSON = ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")


def create_app(model: ServedModel, engine: EngineThread, log: Callable[[str], None]) -> FastAPI:
    """The application.

    Args:
        log: gets one line a request, without any text of the user's.
    """
    app = FastAPI(title="eagle", docs_url=None, redoc_url=None)
    # One prompt at a time: a tokenizer is not safe to share, and the event loop must not wait for a long one.
    tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    @app.get("/health")
    async def health() -> Health:
        return Health(
            status="stopping" if engine.stopping else "ok", running=engine.running, waiting=engine.waiting
        )

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[model.card()])

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Model:
        model.require_name(name)
        return model.card()

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        body.refuse_unsupported()
        model.require_name(body.model)
        loop = asyncio.get_running_loop()
        prompt_ids = await loop.run_in_executor(tokenizing, _render, model.target, body)
        params = model.sampling(body, len(prompt_ids))
        answer = Answer(
            model.target.tokenizer,
            end_ids=params.end_ids(model.target.eos_ids),
            max_tokens=params.max_new_tokens,
            stops=body.stops,
        )
        completion = Completion.submit(engine, prompt_ids, params, answer)
        reply = Reply(model.name, completion, log)
        if not body.stream:
            return await reply.whole(request)
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return EventStream(reply, include_usage=usage)

    def refused(error: ApiError) -> JSONResponse:
        log(f"refused: {error.status} {error.code or error.kind}")
        return JSONResponse(error.body(), error.status, error.headers())

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> JSONResponse:
        return refused(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return refused(_validation_error(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:  # FastAPI's word for a body whose bytes are not even text
            response = refused(NOT_JSON)
        else:
            response = refused(
                ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path}")
            )
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> JSONResponse:
        return refused(ApiError(500, "the server failed; its log says why", kind="server_error"))

    return app


def _render(target: Target, request: ChatRequest) -> list[int]:
    """Token ids of a request's messages, the start of the answer included."""
    try:
        prompt_ids = target.render([message.for_template() for message in request.messages])
    except EagleError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from None
    if not prompt_ids:
        message = "the messages have no tokens; add some text"
        raise ApiError(400, message, param="messages", code="invalid_value")
    return prompt_ids


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first thing wrong with a body."""
    first = error.errors()[0]
    # Tags of unions, in angle brackets, are no part of the path that the client knows.
    path = [part for part in first["loc"][1:] if not str(part).startswith("<")]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    if first["type"] == "json_invalid":
        message = f"the body is not JSON: {first['ctx']['error']} at character {path[0]}"
        return ApiError(400, message, code="invalid_json")
    if not param:
        return NOT_JSON
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    message = f"{param} = {shown(first['input'])} is refused: {first['msg'].removeprefix('Value error, ')}"
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return ApiError(400, message, param=param, code=code)
