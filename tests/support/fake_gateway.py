"""A gateway with OpenAI's API that misbehaves as it is told, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MODEL = "meta-llama/Llama-3.1-8B"
KEY = "sk-fake/+0123456789abcdef"
Behaviour = Callable[[int, dict[str, Any]], str]  # number of the request, its body -> what happens


def always(what: str) -> Behaviour:
    return lambda _, __: what


def after(requests: int, what: str) -> Behaviour:
    return lambda number, _: what if number >= requests else "well"


@dataclass
class Gateway:
    """What happens to the n-th request is `behaviour`: "well", an HTTP status, or one of the names in `_do`.

    It counts `tokens_per_word` and `added_tokens` for text. Where it `refuses` a request of this path and
    body, it answers 400. `served` holds (input, output) tokens of each request it answered, `keys` the
    Authorization of all that came.
    """

    behaviour: Behaviour = lambda _, __: "well"
    key: str = KEY
    refuses: Callable[[str, dict[str, Any]], bool] = lambda _, __: False
    tokens_per_word: float = 1.0
    added_tokens: int = 0
    most_output_tokens: int = 10**9
    says_usage: bool = True
    models: Any = field(default_factory=lambda: {"data": [{"id": MODEL, "max_model_len": 4096}]})
    redirects_to: str = ""
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    served: list[tuple[int, int]] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._post),
                web.post("/v1/chat/completions", self._post),
            ]
        )
        return app

    def _refusal(self, status: int, message: str) -> web.Response:
        headers = {"Retry-After": "7"} if status == 429 else {}
        return web.json_response({"error": {"message": message}}, status=status, headers=headers)

    def _is_wrong(self, request: web.Request) -> bool:
        self.keys.append(request.headers.get("Authorization"))
        return bool(self.key) and self.keys[-1] != f"Bearer {self.key}"

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if self._is_wrong(request):
            return self._refusal(401, f"wrong key {request.headers.get('Authorization')}")
        if self.models == "redirect":
            raise web.HTTPTemporaryRedirect(f"{self.redirects_to}/v1/models")
        if isinstance(self.models, str):
            return web.Response(text=self.models, content_type="text/html")
        if self.models is None:
            return self._refusal(404, "no such path")
        return web.json_response(self.models)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        number = len(self.bodies)
        self.bodies.append(body)
        if self._is_wrong(request):
            return self._refusal(401, "wrong key")
        if self.refuses(request.path, body):
            return self._refusal(400, "unknown parameter")
        what = self.behaviour(number, body)
        if what.isdecimal():
            return self._refusal(int(what), f"you said {request.headers.get('Authorization')}")
        if what == "redirect":
            raise web.HTTPTemporaryRedirect(f"{self.redirects_to}{request.path}")
        return await self._do(what, request, body)

    async def _do(self, what: str, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if what == "dies":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if what == "hangs":
            await asyncio.sleep(600)
        if what == "no json":
            return web.Response(text="<html>hello</html>", content_type="text/html")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if what == "no json in the stream":
            await response.write(b"data: {hello\n\n")
            return response
        inputs = self._input_tokens(request.path, body)
        outputs = min(body.get("max_tokens", body.get("max_completion_tokens", 16)), self.most_output_tokens)
        each = (body.get("stream_options") or {}).get("continuous_usage_stats") and self.says_usage
        for k in range(outputs):
            event = self._event(request.path, f"w{k} ")
            if each:
                event["usage"] = {"prompt_tokens": inputs, "completion_tokens": k + 1}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if what == "drips":
                await asyncio.sleep(0.2)
            if what == "dies in the middle" and k == 1:
                assert request.transport is not None
                request.transport.abort()
                return response
            if what == "error in the middle" and k == 1:
                await response.write(b'data: {"error": {"message": "boom"}}\n\n')
                return response
        self.served.append((inputs, outputs))
        await response.write(self._last(request.path, body, inputs, outputs))
        return response

    def _input_tokens(self, path: str, body: dict[str, Any]) -> int:
        prompt = body["messages"][0]["content"] if path.endswith("/chat/completions") else body["prompt"]
        if isinstance(prompt, list):
            return len(prompt)
        return self.added_tokens + round(self.tokens_per_word * len(prompt.split()))

    def _event(self, path: str, text: str, finish: str | None = None) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text}
        if path.endswith("/chat/completions"):
            said = {"delta": {"role": "assistant", "content": text}}
        return {"model": MODEL, "choices": [{"index": 0, "finish_reason": finish, **said}]}

    def _last(self, path: str, body: dict[str, Any], inputs: int, outputs: int) -> bytes:
        text = b"data: " + json.dumps(self._event(path, "", "length")).encode() + b"\n\n"
        if (body.get("stream_options") or {}).get("include_usage") and self.says_usage:
            usage = {"prompt_tokens": inputs, "completion_tokens": outputs}
            text += b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        return text + b"data: [DONE]\n\n"


@contextmanager
def serving(app: web.Application) -> Iterator[str]:
    """`app` on a free port of loopback, in a thread; yields its address."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)

    async def start() -> str:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.02), loop).result(10)  # sockets close a turn later
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@contextmanager
def gateway(**how: Any) -> Iterator[Gateway]:
    """A `Gateway` that listens at its `url`."""
    found = Gateway(**how)
    with serving(found.app()) as url:
        found.url = url
        yield found
