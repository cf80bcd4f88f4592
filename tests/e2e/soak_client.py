# SPDX-License-Identifier: Apache-2.0
"""An asyncio client of /v1/completions, and what is wrong with an answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from soak_traffic import Ask

PATIENCE_S = 120
"""Without an answer for so long, a request counts as lost."""


@dataclass
class Answer:
    """What came back for a request."""

    text: str = ""
    finish: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    cached_tokens: int = 0
    chunks: int = 0
    left: bool = False
    """Whether the client went away."""
    error: str | None = None

    def take(self, event: dict[str, Any]) -> None:
        """Adds a response, or one chunk of a stream."""
        if "error" in event or event.get("object") == "error":
            self.error = json.dumps(event)[:300]
        for choice in event.get("choices", ()):
            self.text += choice.get("text") or ""
            self.finish = choice.get("finish_reason") or self.finish
        if usage := event.get("usage"):
            self.prompt_tokens, self.new_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def session() -> aiohttp.ClientSession:
    """Of any number of connections."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 20)


async def ask(http: aiohttp.ClientSession, url: str, model: str, request: Ask) -> Answer:
    """Sends a request and reads what comes, as far as the client means to."""
    answer = Answer()
    try:
        async with http.post(f"{url}/v1/completions", json=request.body(model)) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
            elif not request.stream:
                answer.take(await response.json())
            else:
                await _read(http, url, request, response, answer)
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _read(
    http: aiohttp.ClientSession, url: str, request: Ask, response: aiohttp.ClientResponse, answer: Answer
) -> None:
    async for event in events(response):
        answer.take(event)
        answer.chunks += 1
        if answer.chunks == request.abort_after:
            async with http.post(f"{url}/abort_request", json={"rid": request.rid}) as aborted:
                aborted.raise_for_status()
        if answer.chunks == request.leave_after:
            answer.left = True
            response.close()
            return


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream of server-sent events.

    Raises:
        aiohttp.ClientPayloadError: the stream ended before it said so.
    """
    async for line in response.content:
        data = line.decode().strip().removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)
    raise aiohttp.ClientPayloadError("the stream ended without [DONE]")


def fault(request: Ask, answer: Answer) -> str | None:
    """What is wrong with an answer, None where nothing is."""
    aborted = request.abort_after is not None and answer.chunks >= request.abort_after
    if answer.left or (aborted and (answer.finish == "abort" or answer.error)):
        return None
    if answer.error:
        return answer.error
    if answer.prompt_tokens != len(request.prompt):
        return f"a prompt of {len(request.prompt)} tokens was counted as {answer.prompt_tokens}"
    if answer.finish == "length":
        whole = answer.new_tokens == request.new_tokens
        return None if whole else f"{answer.new_tokens} of {request.new_tokens} tokens"
    if answer.finish != "stop":
        return f"it ended by {answer.finish!r}"
    if request.stop is None and not request.open_ended:
        return "it stopped though nothing was to stop it"
    if request.stop is not None and request.stop in answer.text:
        return f"the stop string {request.stop!r} is in its text"
    return None if 0 < (answer.new_tokens or 0) <= request.new_tokens else f"{answer.new_tokens} new tokens"


async def wave(
    http: aiohttp.ClientSession, url: str, model: str, draw: Callable[[int, int], Ask], clients: int, seconds: float
) -> list[tuple[Ask, Answer]]:
    """So many clients at once, each with one request after the other, for so long; the last ones come to their end.

    Args:
        draw: the request of a client's number, and its own.
    """
    end = time.monotonic() + seconds

    async def client(number: int) -> list[tuple[Ask, Answer]]:
        answered: list[tuple[Ask, Answer]] = []
        while time.monotonic() < end:
            request = draw(number, len(answered))
            answered.append((request, await ask(http, url, model, request)))
            if answered[-1][1].error:
                await asyncio.sleep(1)  # a server that is gone is not asked ten thousand times
        return answered

    return [pair for pairs in await asyncio.gather(*map(client, range(clients))) for pair in pairs]
