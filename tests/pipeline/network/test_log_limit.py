"""LogLimit: so many warnings in a time, and how many were left out."""

from __future__ import annotations

import logging

import anyio
import pytest

from pipeline.network.log_limit import LogLimit

_log = logging.getLogger(__name__)


@pytest.mark.parametrize("lines", [1, 3])
async def test_the_first_warnings_of_each_period_are_logged_and_those_left_out_are_counted(
    lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    limit = LogLimit(_log, lines=lines, every_s=10)
    for number in range(5):
        limit.warning("number %d", number)
        await anyio.sleep(1)
    assert caplog.messages == [f"number {number}" for number in range(lines)]
    assert limit.suppressed == 5 - lines
    await anyio.sleep(5)
    limit.warning("number %d", 5)
    limit.warning("number %d", 6)
    more = f"number 5 ({5 - lines} more such warnings were left out)"
    assert caplog.messages[lines:] == ([more] if lines == 1 else [more, "number 6"])
