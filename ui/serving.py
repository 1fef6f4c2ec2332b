"""What `plan ui` has Streamlit serve: the app, with headers that keep other sites from framing it.

`streamlit run` finds `app` here. Streamlit has no setting for headers; its own App takes middleware.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import streamlit as st
from starlette.middleware import Middleware

Message = MutableMapping[str, Any]

# Streamlit draws styles inline and makes components of text, and Vega compiles its expressions.
POLICY = "; ".join(
    (
        "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:",
        "frame-ancestors 'self'",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "SAMEORIGIN",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # An address holds the session's name.
}


class FixedHeaders:
    """ASGI middleware: every response has HEADERS, in place of the app's own headers of these names."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
        self.names = {name for name, _ in self.headers}

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [pair for pair in message.get("headers", ()) if pair[0].lower() not in self.names]
                message = {**message, "headers": [*own, *self.headers]}
            await send(message)

        await self.app(scope, receive, with_headers)


app = st.App(Path(__file__).with_name("app.py"), middleware=[Middleware(FixedHeaders)])
