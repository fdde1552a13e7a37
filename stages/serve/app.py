"""The HTTP application: OpenAI's completions over the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import Scope

from stages import __version__
from stages.serve.access import ApiKey, BodyLimit, client_of
from stages.serve.api_error import ApiError, shown
from stages.serve.completion import Completion
from stages.serve.engine_thread import EngineThread
from stages.serve.grammar import Grammars
from stages.serve.metrics import Metrics
from stages.serve.openapi import describe
from stages.serve.page import page_routes
from stages.serve.questions import compile_grammar, questions_of
from stages.serve.rate_limit import RateLimit
from stages.serve.reply import EventStream, Reply
from stages.serve.request import ChatRequest, CompletionRequest
from stages.serve.request_id import HEADER, RequestId, request_id
from stages.serve.request_log import LogFormat, RequestLog
from stages.serve.response import ChatCompletion, Health, Model, ModelList, TextCompletion, Version
from stages.serve.served_model import ServedModel
from stages.serve.tokenization import (
    DetokenizeBody,
    Detokenized,
    TokenBody,
    TokenizeBody,
    Tokenized,
    detokenized,
    tokenized,
)
from stages.serve.wire import ChatWire, TextWire

NOT_JSON = ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")
B = TypeVar("B", bound=TokenBody)
T = TypeVar("T")
ANSWERING = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True)
class Access:
    """Who may ask, and how much.

    api_keys: of which requests below `/v1` must bring one; without any all are let in.
    max_body: bytes of a request's body.
    rate_limit: requests of one client in a minute.
    cors_origins: web pages that a browser lets read the answers.
    """

    api_keys: tuple[str, ...] = ()
    max_body: int = 4 * 2**20
    rate_limit: int | None = None
    cors_origins: tuple[str, ...] = ()


def create_app(
    model: ServedModel,
    engine: EngineThread,
    log: Callable[[str], None],
    *,
    access: Access | None = None,
    log_format: LogFormat = "text",
) -> FastAPI:
    """The application.

    Args:
        log: gets one line a request, without any text of the user's.
    """
    access = access or Access()
    app = FastAPI(title="eagle", version=__version__, docs_url=None, redoc_url=None)
    # One prompt at a time: a tokenizer is not safe to share, and the event loop must not wait for a long one.
    tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
    compiling = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")  # which may take longer still
    requests = RequestLog(log, log_format)
    metrics = Metrics(engine)
    grammars = Grammars(model.target)

    @app.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health() -> Response:
        well = engine.alive and not engine.stopping
        body = Health(status="ok" if well else "stopping", running=engine.running, waiting=engine.waiting)
        return JSONResponse(body.model_dump(), 200 if well else 503)

    @app.get("/version")
    async def version() -> Version:
        return Version(version=__version__)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[model.card()])

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Model:
        model.require_name(name)
        return model.card()

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await answer(body, request)

    @app.post("/v1/completions", response_model=TextCompletion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answer(body, request)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Tokenized:
        return await off_the_loop(tokenized, body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Detokenized:
        return await off_the_loop(detokenized, body)

    async def off_the_loop(make: Callable[[ServedModel, B], T], body: B) -> T:
        body.refuse_extra("")
        model.require_name(body.model)
        return await asyncio.get_running_loop().run_in_executor(tokenizing, make, model, body)

    async def answer(body: ChatRequest | CompletionRequest, request: Request) -> Response:
        body.refuse_unsupported()
        model.require_name(body.model)
        loop = asyncio.get_running_loop()
        if body.constrained:
            await loop.run_in_executor(tokenizing, grammars.load)
            await loop.run_in_executor(compiling, compile_grammar, model, grammars, body)
        questions = await loop.run_in_executor(
            tokenizing, questions_of, model, grammars, body, engine.max_queue
        )
        completion = Completion.submit(engine, questions, body.choices, metrics, client_of(request.scope))
        kind = ChatWire if isinstance(body, ChatRequest) else TextWire
        ids, steps = bool(body.return_token_ids), bool(body.return_speculation)
        named = model.token_names if body.return_tokens_as_token_ids else model.token_texts
        texts = None if body.told_tokens is None else named
        wire = kind(model.name, completion, ids, steps, texts)
        reply = Reply(wire, completion, requests, metrics, request_id(request.scope))
        if not body.stream:
            return await reply.whole(request)
        return EventStream(reply, usage=body.usage_shown, every_id=ids or steps or texts is not None)

    app.include_router(page_routes())
    describe(app, keys=bool(access.api_keys))

    def refused(error: ApiError, scope: Scope) -> JSONResponse:
        requests.refused(error, request_id(scope))
        if scope["path"] in ANSWERING:
            metrics.refused()
        return JSONResponse(error.body(), error.status, error.headers())

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> JSONResponse:
        return refused(error, request.scope)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return refused(_validation_error(error), request.scope)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:  # FastAPI's word for a body whose bytes are not even text
            response = refused(NOT_JSON, request.scope)
        elif error.status_code == 413:
            response = refused(BodyLimit.error(access.max_body), request.scope)
        else:
            what = f"{error.detail}: {request.method} {request.url.path}"
            response = refused(ApiError(error.status_code, what), request.scope)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        failure = ApiError(500, "the server failed; its log says why", kind="server_error")
        response = refused(failure, request.scope)
        response.headers[HEADER] = request_id(request.scope)  # which this answer passes by
        return response

    # The last one added is the outermost: every request has a name, and a browser asks before it sends a key.
    app.add_middleware(BodyLimit, limit=access.max_body, refused=refused)
    if access.rate_limit is not None:
        app.add_middleware(RateLimit, limit=access.rate_limit, refused=refused)
    if access.api_keys:
        app.add_middleware(ApiKey, keys=access.api_keys, refused=refused)
    if access.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients for browsers send some of their own
            expose_headers=[HEADER, "Retry-After"],
        )
    app.add_middleware(RequestId)
    return app


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first thing wrong with a body."""
    first = error.errors()[0]
    # Tags of unions, in angle brackets, and of keys are no part of the path that the client knows.
    path = [part for part in first["loc"][1:] if not str(part).startswith("<") and part != "[key]"]
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
