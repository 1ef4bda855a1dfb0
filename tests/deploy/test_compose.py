"""The compose file: valid by the schema of the Compose specification, and true of the programs it runs."""

from __future__ import annotations

import json
import re
from importlib import resources

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.deploy.worlds import DEPLOY, compose, ours_in_compose, wrong_ends, wrong_settings


def schema() -> dict[str, object]:
    """Return the schema of the Compose specification that comes with check-jsonschema."""
    file = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    loaded: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
    return loaded


def test_it_is_what_the_schema_allows() -> None:
    jsonschema.validate(compose(), schema())


def test_a_wrong_key_is_refused() -> None:
    wrong = compose()
    wrong["services"]["nats"]["imagee"] = "nats"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema())


def test_programs_take_their_arguments_and_read_their_variables() -> None:
    found = list(ours_in_compose())
    assert {each.args[0] for each in found} == {"serve", "worker"}
    for each in found:
        assert wrong_settings(each) == []


def test_containers_have_the_time_that_their_programs_may_take_to_end() -> None:
    assert [line for each in ours_in_compose() for line in wrong_ends(each)] == []


def test_the_example_of_its_variables_has_all_of_them() -> None:
    wanted = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text(encoding="utf-8")))
    given = re.findall(r"^(\w+)=", (DEPLOY / "example.env").read_text(encoding="utf-8"), re.MULTILINE)
    assert wanted == set(given) == {"NATS_TOKEN", "PENSTOCK_RUNTIME_TOKEN"}
