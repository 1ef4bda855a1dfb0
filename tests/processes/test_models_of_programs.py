"""Models that come, go and disagree, as the programs of one runtime have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.edge.model_folder import write_model_folder
from tests.processes.program_site import site_of
from tests.processes.worlds import START_TIMEOUT_S, until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["file", "nats"])
async def test_models_come_go_and_disagree_behind_one_front_end(tmp_path: Path, kind: str) -> None:
    write_model_folder(tmp_path / "tiny")
    (tmp_path / "other.jinja").write_text("<{{ messages[-1].content }}>")
    async with site_of(tmp_path, kind) as site:
        front = site.front_end()
        one = site.worker("one", "--model-name", "one")
        tiny = site.worker("tiny", "--model-path", str(tmp_path / "tiny"))
        await until(lambda: front.log.exists() and "Serving" in front.last_lines(), START_TIMEOUT_S, "it serves")
        await site.listed("one", "tiny")
        assert await site.chat("one") == (200, "hello")
        assert await site.chat("tiny") == (200, "<|user|>hello<|assistant|>")
        assert (await site.chat("never"))[0] == 404

        # Its worker dies: the folder of the model is gone from the runtime within the lease, and clients come back.
        tiny.kill()
        await site.listed("one")
        assert (await site.chat("tiny"))[0] == 503
        tiny.start()
        await site.listed("one", "tiny")
        assert await site.chat("tiny") == (200, "<|user|>hello<|assistant|>")

        # A worker with another template: neither is used until they agree.
        other = site.worker("other", "--model-name", "one", "--custom-jinja-template", str(tmp_path / "other.jinja"))
        await site.listed("tiny")
        assert (await site.chat("one"))[0] == 503
        assert "disagree" in front.last_lines()
        assert await one.stop() == 0
        await site.listed("one", "tiny")
        assert await site.chat("one") == (200, "<hello>")
        assert await other.stop() == 0
        assert await front.stop() == 0
