from __future__ import annotations

from pathlib import Path

import pytest

from workers.config import ArenaConfig, ConfigError, ModelConfig, PoolConfig, load
from workers.models.dense import Dense


@pytest.fixture
def reads(tmp_path: Path):  # type: ignore[no-untyped-def]
    def read(text: str) -> PoolConfig:
        (tmp_path / "headrace.toml").write_text(text)
        return load(str(tmp_path / "headrace.toml"))

    return read


def test_the_default_serves_score_and_tokens_from_one_replica_each() -> None:
    tokens = ModelConfig("tokens", "workers.models.tokens:Tokens", max_queue=5000)
    score = ModelConfig("score", "workers.models.dense:Dense")
    assert load(None) == PoolConfig((score, tokens), ArenaConfig())


def test_every_key_is_read(reads) -> None:  # type: ignore[no-untyped-def]
    config = reads("""
        [models."a.b-1"]
        model = "my.models:Deep"
        replicas = 2
        max_batch = 64
        max_delay_ms = 5
        max_queue = 1000
        timeout_s = 0.5
        load_timeout_s = 60
        threads = 4
        max_streams = 100
        stream_timeout_s = 90
        options = { path = "weights.npz", layers = [1, 2] }

        [models.score]
        model = "workers.models.dense:Dense"

        [arena]
        slots = [[4096, 10], [8192, 2]]
        spill_limit = 65536
    """)
    assert config == PoolConfig(
        (
            ModelConfig(
                "a.b-1",
                "my.models:Deep",
                2,
                64,
                5,
                1000,
                0.5,
                60,
                4,
                100,
                90,
                {"path": "weights.npz", "layers": [1, 2]},
            ),
            ModelConfig("score", "workers.models.dense:Dense"),
        ),
        ArenaConfig(((4096, 10), (8192, 2)), 65536),
    )
    assert config.arena.total_bytes == 4096 * 10 + 8192 * 2


def test_a_file_may_set_the_arena_alone(reads) -> None:  # type: ignore[no-untyped-def]
    assert reads("[arena]\nspill_limit = 8192") == PoolConfig((), ArenaConfig(spill_limit=8192))


M = '[models.m]\nmodel = "p.m:C"\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("modles = 1", "modles is not a setting; known are arena, models"),
        ("models = 1", "models must be a table, not 1"),
        ("[models]\nm = 1", "models.m must be a table, not 1"),
        ("[[models]]\n", "models must be a table, not [{}]"),
        ("[models.m]", "models.m.model is required: package.module:Class"),
        (M + "replica = 2", "models.m.replica is not a setting; known are load_timeout_s, max_batch"),
        (M + "name = 'x'", "models.m.name is not a setting"),
        (M + "replicas = 0", "models.m.replicas must be a whole number from 1 to 256, not 0"),
        (M + "replicas = 257", "models.m.replicas must be a whole number from 1 to 256, not 257"),
        (M + "replicas = true", "models.m.replicas must be a whole number from 1 to 256, not True"),
        (M + "replicas = 2.0", "models.m.replicas must be a whole number from 1 to 256, not 2.0"),
        (M + "replicas = '2'", "models.m.replicas must be a whole number from 1 to 256, not '2'"),
        (M + "max_batch = 4097", "models.m.max_batch must be a whole number from 1 to 4096, not 4097"),
        (M + "max_delay_ms = -1", "models.m.max_delay_ms must be a number from 0 to 10000, not -1"),
        (M + "max_delay_ms = nan", "models.m.max_delay_ms must be a number from 0 to 10000, not nan"),
        (M + "max_delay_ms = false", "models.m.max_delay_ms must be a number from 0 to 10000, not False"),
        (M + "max_queue = 16001", "models.m.max_queue must be a whole number from 1 to 16000, not 16001"),
        (M + "timeout_s = 0", "models.m.timeout_s must be a number from 0.001 to 1000000, not 0"),
        (M + "timeout_s = inf", "models.m.timeout_s must be a number from 0.001 to 1000000, not inf"),
        (M + "load_timeout_s = 0", "models.m.load_timeout_s must be a number from 0.001 to 1000000, not 0"),
        (M + "threads = 1025", "models.m.threads must be a whole number from 1 to 1024, not 1025"),
        (M + "max_streams = 16001", "models.m.max_streams must be a whole number from 1 to 16000, not 16001"),
        (M + "stream_timeout_s = 0", "models.m.stream_timeout_s must be a number from 0.001 to 1000000, not 0"),
        (M + "options = 3", "models.m.options must be a table, not 3"),
        (M + "options = {'a b' = 1}", "models.m.options.a b: an option is a keyword argument"),
        ("[models.m]\nmodel = 3", "models.m.model must be of the form package.module:Class, not 3"),
        ("[models.m]\nmodel = 'p.m.C'", "models.m.model must be of the form package.module:Class, not 'p.m.C'"),
        ("[models.m]\nmodel = 'p..m:C'", "models.m.model must be of the form package.module:Class, not 'p..m:C'"),
        ("[models.m]\nmodel = 'p:C:D'", "models.m.model must be of the form package.module:Class, not 'p:C:D'"),
        ("[models.'a/b']\nmodel = 'p:C'", "models.a/b: a name is 1 to 128 letters, digits"),
        ("[models.'']\nmodel = 'p:C'", "models.: a name is 1 to 128 letters, digits"),
        ("[models.-a]\nmodel = 'p:C'", "models.-a: a name is 1 to 128 letters, digits"),
        (f"[models.{'a' * 129}]\nmodel = 'p:C'", "a name is 1 to 128 letters, digits"),
        ("arena = 3", "arena must be a table, not 3"),
        ("[arena]\nslot = 1", "arena.slot is not a setting; known are slots, spill_limit"),
        ("[arena]\nslots = 1", "arena.slots must be 1 to 16 pairs of bytes and count, not 1"),
        ("[arena]\nslots = []", "arena.slots must be 1 to 16 pairs of bytes and count, not ()"),
        ("[arena]\nslots = [4096, 1]", "arena.slots[0] must be a pair of bytes and count, not 4096"),
        ("[arena]\nslots = [[4096]]", "arena.slots[0] must be a pair of bytes and count, not (4096,)"),
        ("[arena]\nslots = [[4096, 0]]", "arena.slots[0] count must be a whole number from 1 to 1048576, not 0"),
        (
            "[arena]\nslots = [[4096, 1], [4096, 1]]",
            "arena.slots[1] bytes must be a multiple of 4096 and ascend, not 4096",
        ),
        ("[arena]\nslots = [[5000, 1]]", "arena.slots[0] bytes must be a multiple of 4096 and ascend, not 5000"),
        (
            "[arena]\nslots = [[true, 1]]",
            "arena.slots[0] bytes must be a whole number from 4096 to 1099511627776, not True",
        ),
        ("[arena]\nspill_limit = 1.5", "arena.spill_limit must be a whole number from 4096 to 1099511627776, not 1.5"),
        ("[models.m\n", "(at line 1"),
        ("[models.m]\n[models.m]\n", "line 2"),
    ],
)
def test_a_fault_stops_with_the_file_the_full_key_and_what_would_be_right(reads, text: str, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as caught:
        reads(text)
    assert "headrace.toml: " in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file or directory$"):
        load(str(tmp_path / "absent.toml"))
    with pytest.raises(ConfigError, match=r"Is a directory$"):
        load(str(tmp_path))
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")
    with pytest.raises(ConfigError, match=r"latin\.toml: not UTF-8$"):
        load(str(tmp_path / "latin.toml"))


def test_declarations_in_python_are_checked_alike() -> None:
    assert ModelConfig("m", Dense).options == {}
    with pytest.raises(ConfigError, match=r"models\.m\.replicas"):
        ModelConfig("m", Dense, replicas=0)
    with pytest.raises(ConfigError, match=r"models\.m is declared twice"):
        PoolConfig((ModelConfig("m", Dense), ModelConfig("m", Dense)))
