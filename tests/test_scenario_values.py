"""Values of the scenario language: times are exact, and what is written wrongly is refused."""

import random

import pytest

from simulator.values import FLAG, SHARE, TIME, drawn, pod_name, seconds_of, time_text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0s", 0), ("500ms", 0.5), ("3.078125s", 3.078125), ("1m30s", 90), ("1h", 3600), ("10us", 1e-5)],
)
def test_times_are_exact(text, seconds):
    assert seconds_of(text) == seconds
    assert seconds_of(time_text(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1 s", "1s1", "٣s", None])
def test_a_time_without_a_unit_or_with_anything_else_is_none(text):
    with pytest.raises(ValueError, match="is no time"):
        seconds_of(text)


def test_a_pod_without_a_namespace_is_in_default():
    assert pod_name("web-0") == pod_name("default/web-0") == "default/web-0"
    for wrong in ("", None, "a/b/c", "A", "/a", "a/"):
        with pytest.raises(ValueError, match="is no pod name"):
            pod_name(wrong)


def test_a_range_is_drawn_between_its_ends_and_to_the_microsecond():
    value = drawn(TIME).read("1s..3s")
    draws = [value.draw(random.Random(n)) for n in range(100)]
    assert all(1 <= each <= 3 and round(each, 6) == each for each in draws)
    assert max(draws) - min(draws) > 1.5
    assert value.draw(None) == 1
    assert not value.fixed


def test_weights_decide_how_often():
    value = drawn(FLAG).read({"one_of": [{"value": True, "weight": 9}, False]})
    draws = [value.draw(random.Random(n)) for n in range(400)]
    assert 320 < draws.count(True) < 395
    assert value.draw(None) is True
    assert drawn(SHARE).read("30%").fixed


@pytest.mark.parametrize("wrong", ["3s..1s", "1s..", {"one_of": "1s"}, {"one_of": [{"value": "1s", "weight": 0}]}])
def test_a_draw_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError):
        drawn(TIME).read(wrong)
