"""An import that fails names the extra that brings the library, and nothing else is changed."""

from __future__ import annotations

from importlib import import_module

import pytest

from pipeline.extras import brought_by


def test_a_missing_library_is_named_with_its_extra() -> None:
    with pytest.raises(ModuleNotFoundError) as caught, brought_by("serve", by="the server"):
        import_module("no_such_library.part")
    assert str(caught.value) == "the server needs no_such_library: pip install 'penstock[serve]'"
    assert caught.value.name == "no_such_library"


@pytest.mark.parametrize("module", ["pipeline.no_such_module", "serving.no_such_module"])
def test_a_missing_module_of_penstock_is_no_missing_extra(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"^No module named '{module}'$"), brought_by("serve", by="it"):
        import_module(module)


@pytest.mark.parametrize("error", [ModuleNotFoundError("without a name"), ImportError("cannot import"), KeyError("x")])
def test_another_error_passes_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, brought_by("serve", by="it"):
        raise error
    assert caught.value is error


def test_a_library_that_is_there_is_imported() -> None:
    with brought_by("serve", by="it"):
        import json
    assert json.loads("1") == 1
