"""Facts about reading the environment, sizes and redaction."""

from pathlib import Path

import pytest

from shared.backoff import Backoff
from shared.config import Config, enough_text, parse_size, size_text
from shared.errors import ConfigError
from shared.logs import redact


def test_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="CELLPIPE_REDIS_ULR"):
        Config.from_environ({"CELLPIPE_REDIS_ULR": "redis://x"})


def test_bad_choice_names_key_and_value() -> None:
    with pytest.raises(ConfigError, match=r"CELLPIPE_LOG_LEVEL.*'loud'"):
        Config.from_environ({"CELLPIPE_LOG_LEVEL": "loud"})


def test_settings_are_read_and_empty_ones_count_as_absent() -> None:
    config = Config.from_environ(
        {"CELLPIPE_AMQP_URL": "amqp://h", "CELLPIPE_REDIS_URL": "", "HOME": "/root"}
    )

    assert config.amqp_url == "amqp://h"
    assert config.redis_url is None


def test_keys_of_tests_and_makefile_are_not_settings() -> None:
    environ = {"CELLPIPE_TEST_AMQP_URL": "x", "CELLPIPE_ALLOW_INSTALL": "1"}

    assert Config.from_environ(environ).cache_dir == Path("~/.cache/cellpipe/models").expanduser()


@pytest.mark.parametrize(
    ("text", "size"),
    [("256MiB", 256 << 20), ("1.5 GB", 1_500_000_000), ("4096", 4096), ("2g", 2_000_000_000)],
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_size(text, field="--memory") == size


@pytest.mark.parametrize("text", ["", "much", "-1MiB", "0", "1.2.3MB"])
def test_bad_sizes_name_the_field(text: str) -> None:
    with pytest.raises(ConfigError, match="--memory"):
        parse_size(text, field="--memory")


@pytest.mark.parametrize("text", ["128MiB", "2GiB", "1500MB", "512 bytes"])
def test_sizes_are_told_as_they_were_given(text: str) -> None:
    assert size_text(parse_size(text.removesuffix(" bytes"), field="--memory")) == text


def test_a_size_that_no_unit_divides_is_rounded_and_what_is_enough_is_not_less() -> None:
    assert size_text(44_217_729) == "44.2MB"
    assert parse_size(enough_text(44_217_729), field="--memory") >= 44_217_729


def test_passwords_in_urls_are_redacted() -> None:
    text = redact("cannot reach amqp://user:s3cret@host:5672/ or rediss://:pw@h/0")

    assert "s3cret" not in text
    assert ":pw@" not in text
    assert "user" in text


def test_backoff_grows_to_its_bound_and_resets() -> None:
    backoff = Backoff(first_s=1.0, max_s=8.0)

    waits = [backoff.next_s() for _ in range(10)]

    assert 0.5 <= waits[0] <= 1.0
    assert all(4.0 <= wait <= 8.0 for wait in waits[4:])
    backoff.reset()
    assert backoff.next_s() <= 1.0


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("30m", 1_800.0), ("2d", 172_800.0), ("", 3_600.0)]
)
def test_how_long_answers_are_kept_is_a_setting(text: str, seconds: float) -> None:
    assert Config.from_environ({"CELLPIPE_KEEP_ANSWERS": text}).keep_answers_s == seconds


@pytest.mark.parametrize("text", ["0s", "31d", "an hour", "-1h", "1e3s"])
def test_a_time_to_keep_answers_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="CELLPIPE_KEEP_ANSWERS") as refused:
        Config.from_environ({"CELLPIPE_KEEP_ANSWERS": text})
    assert text in str(refused.value)
