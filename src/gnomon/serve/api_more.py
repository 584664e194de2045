"""The routes beside answers: models, tokens, health, metrics, and the files of the chat page. Read next: `api.py`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from importlib import resources
from typing import Any, TypeVar

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gnomon import __version__
from gnomon.data.dialects import anthropic, openai_chat
from gnomon.data.dialects.asked import Refused
from gnomon.data.dialects.fields import Fields
from gnomon.data.dialects.openai_completions import prompts
from gnomon.serve import openapi
from gnomon.serve.body import read_json
from gnomon.serve.reading import token_bytes
from gnomon.serve.service import Service

T = TypeVar("T")
PAGE = {"/": ("index.html", "text/html; charset=utf-8"), "/page.css": ("page.css", "text/css; charset=utf-8"),
        "/page.js": ("page.js", "text/javascript; charset=utf-8")}
POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def add_routes(app: FastAPI, service: Service) -> None:
    """Add them to the application."""
    more = _More(service)
    app.add_api_route("/v1/models", more.models, methods=["GET"], **openapi.plain("models"))
    app.add_api_route("/v1/models/{model}", more.model, methods=["GET"], **openapi.plain("model"))
    app.add_api_route("/v1/messages/count_tokens", more.count, methods=["POST"], **openapi.plain("count_tokens"))
    app.add_api_route("/tokenize", more.tokenize, methods=["POST"], **openapi.plain("tokenize"))
    app.add_api_route("/detokenize", more.detokenize, methods=["POST"], **openapi.plain("detokenize"))
    app.add_api_route("/health", more.health, methods=["GET"], **openapi.plain("health"))
    if service.settings.access.metrics:
        app.add_api_route("/metrics", more.metrics, methods=["GET"], **openapi.plain("metrics"))
    if service.settings.page:
        for path in PAGE:
            app.add_api_route(path, more.page, methods=["GET"], include_in_schema=False)


class _More:
    """The routes of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokenizer = service.tokenizer.fingerprint
        folder = resources.files("gnomon.serve") / "page"
        self._files = {path: (folder / name).read_bytes() for path, (name, _) in PAGE.items()} if service.settings.page else {}

    async def models(self) -> Response:
        """The models of this server: one. The fields of OpenAI's list and of Anthropic's."""
        entry = self._entry()
        return JSONResponse({"object": "list", "data": [entry], "has_more": False, "first_id": entry["id"], "last_id": entry["id"]})

    async def model(self, model: str) -> Response:
        """One model."""
        self._service.check_model(model)
        return JSONResponse(self._entry())

    def _entry(self) -> dict[str, Any]:
        service = self._service
        made = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
        return {
            "id": service.name, "object": "model", "created": service.created, "owned_by": "gnomon", "type": "model",
            "display_name": service.name, "created_at": made, "max_model_len": service.context,
            "chat_format": service.chat.name if service.chat else None, "vocab_size": service.tokenizer.vocab_size,
            "tokenizer_fingerprint": self._tokenizer, "weights_fingerprint": service.revision.fingerprint,
            "policy_version": service.revision.version,
        }

    async def _read(self, request: Request, read: Callable[[Any], T]) -> T:
        return await read_json(request, self._service.settings.limits, self._service.room, read)

    async def tokenize(self, request: Request) -> Response:
        """The tokens of `prompt` as it stands, or of `messages` as a chat completion would send them to the model."""
        fields = await self._read(request, Fields)
        wanted = bool(fields.flag("return_token_strs"))
        rest = {name: value for name, value in fields.table.items() if name != "return_token_strs"}
        if rest.get("model") is not None:
            self._service.check_model(fields.text("model"))
        if "messages" in rest:
            [prompt] = await self._service.prompts(openai_chat.read(rest))
            tokens = list(prompt.tokens)
        else:
            text = fields.text("prompt")
            if text is None:
                raise Refused("give 'prompt' (a text) or 'messages'", "prompt", "missing_required_parameter")
            fields.refuse_rest()
            tokens = await self._service.in_thread(lambda: self._service.tokenizer.encode(text))
        found: dict[str, Any] = {"count": len(tokens), "max_model_len": self._service.context, "tokens": tokens}
        if wanted:
            found["token_strs"] = [token_bytes(self._service.tokenizer, token).decode("utf-8", "replace") for token in tokens]
        return JSONResponse(found)

    async def count(self, request: Request) -> Response:
        """The tokens of Anthropic's messages, as they would be sent to the model."""
        asked = await self._read(request, anthropic.read_count)
        self._service.check_model(asked.model)
        [prompt] = await self._service.prompts(asked)
        return JSONResponse(anthropic.counted(len(prompt.tokens)))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        fields = await self._read(request, Fields)
        if (model := fields.text("model")) is not None:
            self._service.check_model(model)
        given = prompts(fields, "tokens") if fields.require("tokens") != [] else ((),)
        fields.refuse_rest()
        if len(given) != 1 or isinstance(given[0], str):
            raise Refused("'tokens' must be a list of token ids", "tokens", "invalid_type")
        return JSONResponse({"prompt": self._service.tokenizer.decode(given[0])})

    async def health(self) -> Response:
        """Whether requests are answered: 200 `ok`, 503 `draining` before the end."""
        draining = self._service.admission.closed
        return JSONResponse({"status": "draining" if draining else "ok", "model": self._service.name, "version": __version__},
                            status_code=503 if draining else 200)

    async def metrics(self) -> Response:
        """Numbers for Prometheus."""
        return Response(self._service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    async def page(self, request: Request) -> Response:
        """A file of the chat page."""
        path = request.url.path
        headers = {"content-security-policy": POLICY, "referrer-policy": "no-referrer", "cache-control": "no-cache"}
        return Response(self._files[path], media_type=PAGE[path][1], headers=headers)
