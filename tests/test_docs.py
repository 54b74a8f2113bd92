"""The README names every file, setting, default, route and error code that there is, and none that there is not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from service.app import create_app
from service.config import ELSEWHERE, PREFIX, Settings
from service.errors import REFUSED, STATUS
from workers.config import ArenaConfig, ModelConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    """What stands below a heading, up to the next one of its rank or above."""
    begin = re.search(rf"^(#+) {re.escape(title)}$", README, re.MULTILINE)
    assert begin, f"README.md has no section {title!r}"
    rest = README[begin.end() :]
    end = re.search(rf"^#{{1,{len(begin[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def table(text: str) -> dict[str, str]:
    """First and second column of every table in `text`, without the backticks; rows that begin with a name."""
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]*?) \|", text, re.MULTILINE)
    return {name: value.strip("`") for name, value in rows}


def blocks(text: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_first_two_commands_serve_and_test() -> None:
    assert blocks(README)[:2] == blocks(section("Start"))[:2]
    serve, test = blocks(section("Start"))[:2]
    for command in (serve, test):
        assert command.count("\n") == 1
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    assert serve.endswith(" && .venv/bin/gunicorn -c gunicorn.conf.py\n")
    assert ".venv/bin/python -m pytest" in test


def test_the_tour_names_every_module() -> None:
    modules = {
        str(path.relative_to(ROOT)) for package in ("service", "workers") for path in (ROOT / package).rglob("*.py")
    }
    named = re.findall(r"^\| `([^`]+\.py)` \|", section("Tour"), re.MULTILINE)
    assert sorted(named) == sorted(modules)


def test_every_key_of_a_model_has_its_default_in_the_table() -> None:
    keys = {}
    for key in dataclasses.fields(ModelConfig):
        if key.default_factory is not dataclasses.MISSING:
            keys[key.name] = repr(key.default_factory())
        elif key.default is not dataclasses.MISSING:
            keys[key.name] = repr(key.default)
        elif key.name != "name":
            keys[key.name] = "required"
    arena = {key.name: repr(key.default).replace("(", "[").replace(")", "]") for key in dataclasses.fields(ArenaConfig)}
    assert table(section("Models and memory")) == keys | arena


def test_the_size_of_the_default_arena_is_told() -> None:
    assert f"{ArenaConfig().total_bytes / 2**20:g} MiB by default" in section("Models and memory")


def test_every_setting_of_the_web_tier_has_its_default_in_the_table() -> None:
    settings = {PREFIX + f.name.upper(): str(f.default) for f in dataclasses.fields(Settings)}
    listed = table(section("Web tier"))
    assert {name: value for name, value in listed.items() if name not in ELSEWHERE} == settings
    assert set(listed) - set(settings) == ELSEWHERE


def test_every_error_code_has_its_status_in_the_table() -> None:
    assert table(section("Errors")) == {code: str(status) for code, status in STATUS.items()}
    assert f"| any other name | {REFUSED} |" in section("Errors")


def test_every_route_is_listed() -> None:
    listed = {name for name in table(section("Use it")) if "/" in name}
    routes = set()
    for rule in create_app().url_map.iter_rules():
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}:
            routes.add(f"{method} {rule.rule}")
    assert routes <= listed, f"not in the README: {sorted(routes - listed)}"
