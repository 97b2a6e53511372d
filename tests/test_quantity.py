"""Kubernetes quantities, read in one place for settings, pods, nodes and the simulated scheduler."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkcocoon_quantity import parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", "1"),
        ("500m", "0.5"),
        ("4Gi", "4294967296"),
        ("2G", "2000000000"),
        ("1e3", "1000"),
        ("1E3", "1000"),
        ("1E", "1e18"),
        ("2e-3", "0.002"),
        (".5", "0.5"),
        ("1.", "1"),
        ("1.5", "1.5"),
        ("1k", "1000"),
        ("-3", "-3"),
        ("+7u", "0.000007"),
        ("16777216Ki", "17179869184"),
    ],
)
def test_they_are_read_as_kubernetes_writes_them(text, value):
    assert parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize(
    "text", ["", "Gi", ".", "1GiB", "1 Gi", " 1", "0x10", "nan", "inf", "1_000", "1e", "1e999999", "9" * 5000, "\u0663"]
)
def test_what_is_none_is_refused(text):
    with pytest.raises(ValueError, match="no quantity"):
        parse_quantity(text)


@given(text=st.text(alphabet="0123456789.eE+-numkMGTPi", max_size=12))
def test_any_text_is_a_number_or_refused(text):
    try:
        assert parse_quantity(text).is_finite()
    except ValueError:
        pass
