"""The reader of environment variables sees every change."""

import pytest

from partita.runtime.environment import reader


def test_each_call_sees_the_present_value(monkeypatch: pytest.MonkeyPatch) -> None:
    value = reader("PARTITA_TEST_VARIABLE")
    assert value() == ""
    monkeypatch.setenv("PARTITA_TEST_VARIABLE", "é1")
    assert value() == "é1"
    monkeypatch.setenv("PARTITA_TEST_VARIABLE", "")
    assert value() == ""
    monkeypatch.delenv("PARTITA_TEST_VARIABLE")
    assert value() == ""


def test_a_dictionary_without_a_fast_way_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"PARTITA_TEST_VARIABLE": "1"})
    assert reader("PARTITA_TEST_VARIABLE")() == "1"
