from __future__ import annotations

import pytest

from service.config import ConfigError, Settings


def test_without_an_environment_the_defaults_hold() -> None:
    assert Settings.from_env({"PATH": "/bin"}) == Settings()


def test_settings_are_read_as_their_own_kind() -> None:
    settings = Settings.from_env(
        {"HEADRACE_BIND": "[::1]:0", "HEADRACE_BODY_LIMIT": "1", "HEADRACE_BODY_TIMEOUT": "0.5"}
    )
    assert (settings.bind, settings.body_limit, settings.body_timeout) == ("[::1]:0", 1, 0.5)


def test_names_that_are_read_elsewhere_are_known() -> None:
    Settings.from_env({"HEADRACE_CONFIG": "", "HEADRACE_POOL_SOCKET": "", "HEADRACE_RUNTIME_DIR": ""})


def test_an_unknown_name_is_told_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting HEADRACE_BIDN .*HEADRACE_BIND"):
        Settings.from_env({"HEADRACE_BIDN": "x"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HEADRACE_BIND", ""),
        ("HEADRACE_WEB_WORKERS", "two"),
        ("HEADRACE_WEB_WORKERS", "0"),
        ("HEADRACE_WEB_WORKERS", "-1"),
        ("HEADRACE_WEB_WORKERS", "1.5"),
        ("HEADRACE_BODY_TIMEOUT", "nan"),
        ("HEADRACE_BODY_TIMEOUT", "inf"),
        ("HEADRACE_BODY_TIMEOUT", ""),
    ],
)
def test_an_ill_typed_value_is_told_with_its_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Settings.from_env({name: text})
