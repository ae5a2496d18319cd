"""The HTTP surface: OpenAI's models, completions and chat completions; health and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from nonet.chat import Tokenizer
from nonet.protocols import Generator
from nonet.serve.answering import Answering
from nonet.serve.guard import Guard, Receive, Scope, Send, refusal_response
from nonet.serve.limits import Limits
from nonet.serve.service import Service
from nonet.types import UserError
from nonet.wire.ask import Ask, Refusal, Reply
from nonet.wire.openai import invalid
from nonet.wire.openai_chat import ChatBody, ChatReply
from nonet.wire.openai_completions import CompletionBody, CompletionReply
from nonet.wire.sse import MEDIA_TYPE

_CLIENT_GONE = 499


def make_app(
    generator: Generator,
    tokenizer: Tokenizer,
    name: str,
    limits: Limits = Limits(),
    api_key: str = "",
    on_failure: Callable[[BaseException], None] = lambda error: None,
) -> FastAPI:
    """The application around a generator, which it owns while it runs; app.state.service is its Service then."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = service = Service(generator, tokenizer, name, limits, on_failure)
        yield
        service.close()

    app = FastAPI(title="nonet serve", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, limits=limits, api_key=api_key)
    app.add_exception_handler(Exception, _failed)
    for kind, handler in ((UserError, _refused), (RequestValidationError, _invalid), (HTTPException, _http_error)):
        app.add_exception_handler(kind, handler)
    app.get("/health")(health)
    app.get("/metrics")(metrics)
    app.get("/v1/models")(models)
    app.get("/v1/models/{model_id:path}")(model)
    app.post("/v1/completions")(completions)
    app.post("/v1/chat/completions")(chat_completions)
    return app


async def health(request: Request) -> JSONResponse:
    """live: the engine runs; ready: requests are taken; draining: the last are being answered. 503 unless ready."""
    service: Service = request.app.state.service
    state = {"live": not service.failed, "ready": service.ready, "draining": service.draining}
    return JSONResponse(state, 200 if service.ready else 503)


async def metrics(request: Request) -> Response:
    """Prometheus text format."""
    text = await request.app.state.service.metrics_text()
    return Response(text, media_type="text/plain; version=0.0.4")


async def models(request: Request) -> dict[str, Any]:
    """The one model this server serves."""
    return {"object": "list", "data": [_model(request.app.state.service)]}


async def model(model_id: str, request: Request) -> dict[str, Any]:
    """The model of this name."""
    service: Service = request.app.state.service
    if model_id != service.name:
        told = f"model = {model_id!r:.80}: not served here; ask for {service.name!r}"
        raise Refusal(told, 404, code="model_not_found", param="model")
    return _model(service)


async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue text or token ids, as OpenAI's /v1/completions, or score them."""
    ask = body.ask()
    if not ask.scored:
        return await _answer(request, ask, CompletionReply, "cmpl")
    service: Service = request.app.state.service
    head, written, usage = await service.score(ask, "cmpl", request.url.path)
    return JSONResponse(CompletionReply(ask, head).whole(written, usage))


async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation, as OpenAI's /v1/chat/completions."""
    return await _answer(request, body.ask(), ChatReply, "chatcmpl")


# -------------------------------------------------------------------------- answers


async def _answer(request: Request, ask: Ask, reply_type: type[Reply], kind: str) -> Response:
    service: Service = request.app.state.service
    answering = await service.begin(ask, kind, request.scope["began"])
    request.scope["admitted"] = True
    reply = reply_type(ask, answering.head)
    if ask.stream:
        return _Events(service, answering, reply)
    gone, work = asyncio.create_task(_gone(request)), asyncio.create_task(answering.whole())
    try:
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=_CLIENT_GONE)  # nobody is there to read it
        return JSONResponse(reply.whole(work.result(), answering.usage()))
    finally:
        gone.cancel()
        work.cancel()
        service.end(answering, request.url.path, request.scope["began"])


async def _gone(request: Request) -> None:
    """Returns when the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Events(StreamingResponse):
    """Events as they become certain. Starlette stops it when the client hangs up; the answering ends in any case."""

    def __init__(self, service: Service, answering: Answering, reply: Reply):
        super().__init__(self._events(), media_type=MEDIA_TYPE, headers={"Cache-Control": "no-cache"})
        self._service, self._answering, self._reply = service, answering, reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._service.end(self._answering, scope["path"], scope["began"])

    async def _events(self) -> AsyncIterator[bytes]:
        reply = self._reply
        try:
            for event in reply.begin():
                yield event
            async for index, written in self._answering.news():
                for event in reply.news(index, written):
                    yield event
                await asyncio.sleep(0)  # where news have piled up: others, and a hang-up, get their turn
            for event in reply.end(self._answering.usage()):
                yield event
        except Refusal as refusal:
            for event in reply.broken(refusal):
                yield event


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.name, "object": "model", "created": service.created, "owned_by": "nonet"}


# --------------------------------------------------------------------------- errors


async def _refused(request: Request, error: Exception) -> JSONResponse:
    refusal = error if isinstance(error, Refusal) else Refusal(str(error))
    if "admitted" not in request.scope:  # otherwise the answering is counted by its outcome
        request.app.state.service.metrics.refused(_route(request), refusal.status)
    return refusal_response(refusal)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _refused(request, invalid(error.errors(), error.body))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """The framework's own: no such path, no such method, a body that is no JSON."""
    assert isinstance(error, HTTPException)
    told = f"{request.method} {request.url.path}: {error.detail}"
    response = await _refused(request, Refusal(told, error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> JSONResponse:
    """A fault of ours; the framework logs it."""
    return await _refused(request, Refusal("the server made a mistake; its log says more", 500, "server_error"))


def _route(request: Request) -> str:
    """The path as declared: what a client made up must not become a label of a metric."""
    route = request.scope.get("route")
    return getattr(route, "path", "other")
