"""LoRA adapters: requests with different ones beside each other, each computed with its own."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from attrs import evolve

from engines import as_engine
from engines.torch import TorchEngine
from pipeline import InvalidArgument
from pipeline.protocols import PreprocessedRequest, RoutingHints

from .tiny_model import answers_of, chunks_of, loader, plain_answer, random_prompt, tiny_engine, tiny_model
from .worlds import request_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

NAMES = ("english", "french")


def adapted(number: int) -> Any:
    """Return a model of its own with one adapter of random weights."""
    torch: Any = pytest.importorskip("torch")
    peft: Any = pytest.importorskip("peft")
    tiny_model.cache_clear()
    model = tiny_model()
    tiny_model.cache_clear()
    torch.manual_seed(100 + number)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two adapters, by name."""
    found = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    for number, folder in enumerate(found.values()):
        adapted(number).save_pretrained(folder)
    return found


def engine_of(folders: dict[str, Path], **settings: Any) -> TorchEngine:
    """Return an engine of a model of its own with these adapters."""
    tiny_model.cache_clear()
    model = tiny_model()
    tiny_model.cache_clear()
    return TorchEngine(loader(model), tiny_engine(model, **settings).settings, adapters=folders)


def with_adapter(request: PreprocessedRequest, name: str | None) -> PreprocessedRequest:
    return evolve(request, routing=RoutingHints(lora_name=name))


async def test_each_request_is_computed_with_its_adapter_and_finds_no_blocks_of_another(
    folders: dict[str, Path],
) -> None:
    random = Random(1)
    shared = random_prompt(random, 40, 40)
    prompts = [shared + random_prompt(random, 1, 20) for _ in range(6)]
    wanted = [
        [plain_answer(prompt, 10, model) for prompt in prompts] for model in (tiny_model(), adapted(0), adapted(1))
    ]
    assert wanted[0] != wanted[1] != wanted[2]
    async with as_engine(engine_of(folders)) as engine:
        requests = [
            with_adapter(request_of(prompt, max_tokens=10), name) for name in (None, *NAMES) for prompt in prompts
        ]
        for _ in range(2):
            assert await answers_of(engine, requests) == [answer for answers in wanted for answer in answers]


async def test_engines_that_share_a_model_do_not_mix_their_adapters(folders: dict[str, Path]) -> None:
    prompt, one = list(range(30)), engine_of(folders)
    other = TorchEngine(one._load, one.settings, adapters=folders)
    requests = [with_adapter(request_of(prompt, max_tokens=30), name) for name in (None, *NAMES)]
    wanted = [plain_answer(prompt, 30, model) for model in (tiny_model(), adapted(0), adapted(1))]
    async with as_engine(one) as first, as_engine(other) as second:

        async def ask(engine: Any) -> None:
            for _ in range(3):
                assert await answers_of(engine, requests) == wanted

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, first)
            tasks.start_soon(ask, second)


async def test_an_adapter_that_is_not_here_is_refused(folders: dict[str, Path]) -> None:
    async with as_engine(engine_of(folders)) as engine:
        with pytest.raises(InvalidArgument) as refused:
            await chunks_of(engine, with_adapter(request_of([1]), "german"))
    assert refused.value.field == "lora_name"


@pytest.mark.parametrize("content", [None, "{"])
async def test_a_folder_that_is_no_adapter_ends_the_start(content: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    if content is not None:
        folder.mkdir()
        (folder / "adapter_config.json").write_text(content)
    with pytest.raises(InvalidArgument) as refused:
        async with as_engine(engine_of({"broken": folder})):
            pytest.fail("it started")
    assert refused.value.field == "adapters"
