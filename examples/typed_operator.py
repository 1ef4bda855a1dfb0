"""Write a typed operator: questions in and text out above it, OpenAI requests and items below.

python examples/typed_operator.py
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import anyio
from attrs import frozen

from engines import EchoEngine, as_engine
from operators import Detokenize, Model, Preprocess
from pipeline import Annotated, AsyncEngine, Context, Operator, ResponseStream, Segment
from pipeline.protocols import BackendOutput
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage

Item = Annotated[BackendOutput]


@frozen
class Question:
    """The request of a caller of this graph."""

    text: str
    words_max: int = 100


class Ask(Operator[Question, str, ChatCompletionRequest, Item]):
    """Turns a question into a chat, and the items of its answer into text."""

    async def generate(
        self, request: Context[Question], next: AsyncEngine[ChatCompletionRequest, Item]
    ) -> ResponseStream[str]:
        stream = await next.generate(request.map(self._chat))
        return ResponseStream(self._text(stream, request.payload.words_max), request, stream)

    def _chat(self, question: Question) -> ChatCompletionRequest:
        return ChatCompletionRequest(model="echo", messages=[ChatMessage(role="user", content=question.text)])

    async def _text(self, stream: ResponseStream[Item], words_max: int) -> AsyncGenerator[str, None]:
        words = 0
        async with stream:  # closes what is below on every way out, also when this returns early
            async for item in stream:
                output = item.ok().data  # raises what an error item carries
                if output is not None and output.text:
                    words += output.text.count(" ")
                    if words >= words_max:
                        return
                    yield output.text


async def main() -> None:
    model = Model.byte_level("echo")
    async with as_engine(EchoEngine()) as engine:
        # A type checker knows the whole graph by its ends, and refuses a stage between whose types do not fit.
        graph: Segment[Question, str] = Ask() >> Preprocess(model) >> Detokenize(model) >> engine
        for question in (Question("What runs uphill?"), Question("What runs uphill?", words_max=2)):
            async with await graph.generate(Context(question)) as stream:
                print("".join([text async for text in stream]))


if __name__ == "__main__":
    anyio.run(main)
