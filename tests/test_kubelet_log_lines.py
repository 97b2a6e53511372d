"""What somebody wants of a log, read from a URL, and what is left of the log then: since when, with times, how much.

All options of `kubectl logs`; sentences and statuses as kubelets have them.
"""

from datetime import UTC, datetime

import pytest

from vkcocoon_vmlog import BadLogQuery, LogQuery, selected

NOW = datetime(2026, 1, 1, 12, 0, 0, 250_000, tzinfo=UTC)
STARTED = datetime(2026, 1, 1, 11, 59, 0, tzinfo=UTC)
NANO = 1_000_000_000


def at(text):
    return round(datetime.fromisoformat(text).timestamp() * 1_000_000) * 1000


def parsed(query):
    return LogQuery.parse(query, NOW)


def kept(pieces, query="", *, started=STARTED):
    return b"".join(selected(pieces, parsed(query), started=started, now=lambda: NOW))


class TestOptions:
    def test_without_any_everything_there_is_and_no_more(self):
        assert parsed("") == LogQuery(follow=False, previous=False, timestamps=False, tail=None, since=None, limit=None)

    @pytest.mark.parametrize("text", ["true", "1", "True", "", "yes"])
    def test_a_switch_that_is_named_is_on(self, text):
        query = parsed(f"follow={text}&previous={text}&timestamps={text}")
        assert (query.follow, query.previous, query.timestamps) == (True, True, True)

    @pytest.mark.parametrize("text", ["false", "0", "False"])
    def test_a_switch_that_says_no_is_off(self, text):
        assert not parsed(f"follow={text}").follow

    @pytest.mark.parametrize(("text", "tail"), [("0", 0), ("1", 1), ("%2B5", 5), ("", None)])
    def test_no_lines_of_the_past_are_not_the_same_as_no_number(self, text, tail):
        assert parsed(f"tailLines={text}").tail == tail

    @pytest.mark.parametrize(
        ("text", "since"),
        [
            ("2026-01-01T11:00:00Z", at("2026-01-01T11:00:00+00:00")),
            ("2026-01-01T12:00:00%2B01:00", at("2026-01-01T11:00:00+00:00")),
            ("2026-01-01T12:00:00+01:00", at("2026-01-01T11:00:00+00:00")),  # a plus nobody escaped
            ("2026-01-01T11:00:00.123456789Z", at("2026-01-01T11:00:00+00:00") + 123456789),
            ("2026-01-01t11:00:00.5z", at("2026-01-01T11:00:00+00:00") + 500_000_000),
        ],
    )
    def test_a_time_is_read_in_every_form_of_the_standard(self, text, since):
        assert parsed(f"sinceTime={text}").since == since

    def test_seconds_count_back_from_now(self):
        assert parsed("sinceSeconds=90").since == at("2026-01-01T11:58:30.25+00:00")
        assert parsed("sinceSeconds=999999999999").since == 0

    def test_options_nobody_knows_are_ignored(self):
        assert parsed("stream=All&insecureSkipTLSVerifyBackend=true&container=x") == parsed("")

    @pytest.mark.parametrize(
        "query",
        [
            "tailLines=ten",
            "tailLines=1.5",
            "tailLines=1_0",
            "tailLines=٣",
            "tailLines=" + "9" * 30,
            "limitBytes=1k",
            "sinceSeconds=1m",
            "sinceTime=yesterday",
            "sinceTime=2026-01-01",
            "sinceTime=2026-01-01T11:00:00",
            "sinceTime=2026-13-01T11:00:00Z",
        ],
    )
    def test_what_cannot_be_read_is_a_bad_request(self, query):
        with pytest.raises(BadLogQuery) as caught:
            parsed(query)
        assert caught.value.status == 400
        assert query.partition("=")[0] in str(caught.value)

    @pytest.mark.parametrize(
        "query",
        [
            "tailLines=-1",
            "limitBytes=0",
            "limitBytes=-5",
            "sinceSeconds=0",
            "sinceSeconds=-1",
            "sinceSeconds=5&sinceTime=2026-01-01T11:00:00Z",
        ],
    )
    def test_what_makes_no_sense_cannot_be_processed(self, query):
        with pytest.raises(BadLogQuery) as caught:
            parsed(query)
        assert caught.value.status == 422


class TestBytes:
    def test_without_options_the_bytes_pass_unchanged_and_as_they_come(self):
        pieces = [b"\xff\x00a", b"", b"\r\nb"]
        assert list(selected(pieces, parsed(""), started=None, now=lambda: NOW)) == pieces

    @pytest.mark.parametrize(
        ("limit", "left"),
        [(1, b"a"), (3, b"a\n\xc3"), (4, b"a\n\xc3\xa4"), (5, b"a\n\xc3\xa4\n"), (99, b"a\n\xc3\xa4\n")],
    )
    def test_a_limit_cuts_in_bytes_and_in_the_middle_of_a_letter(self, limit, left):
        assert kept([b"a\n", b"\xc3\xa4\n"], f"limitBytes={limit}") == left

    def test_a_limit_that_is_reached_ends_the_source_without_another_word_from_it(self):
        def source():
            yield b"abc"
            yield b"def"
            raise AssertionError("asked again")

        assert kept(source(), "limitBytes=6") == b"abcdef"

    def test_a_limit_counts_the_times_too(self):
        line = b"cloud-hypervisor: 1.000000s: <vmm> a\n"
        assert kept([line], "limitBytes=36&timestamps=1") == b"2026-01-01T11:59:01.000000000Z cloud"


class TestTimes:
    @pytest.mark.parametrize(
        ("line", "time"),
        [
            ("cloud-hypervisor: 12.345678s: <vmm> INFO:vmm/src/lib.rs:1 -- a", "2026-01-01T11:59:12.345678000Z"),
            ("cloud-hypervisor: 12.345678ms: <main> INFO:src/main.rs:1 -- a", "2026-01-01T11:59:00.012345678Z"),
            ("cloud-hypervisor: 345.678000µs: <main> a", "2026-01-01T11:59:00.000345678Z"),
            ("cloud-hypervisor: 3725.000001s: <vcpu0> a", "2026-01-01T13:01:05.000001000Z"),
            ("2026-01-01T11:59:30.123456789Z [anonymous-instance:main] a", "2026-01-01T11:59:30.123456789Z"),
            ("2026-01-01T13:59:30.5+02:00 a", "2026-01-01T11:59:30.500000000Z"),
            ("2026-01-01 11:59:30,250Z a", "2026-01-01T11:59:30.250000000Z"),
            ("no time at all", "2026-01-01T11:59:00.000000000Z"),  # the start of the hypervisor
            ("2026-99-01T11:59:30Z a", "2026-01-01T11:59:00.000000000Z"),
            ("cloud-hypervisor: 5fortnights: a", "2026-01-01T11:59:00.000000000Z"),
            ("", "2026-01-01T11:59:00.000000000Z"),
        ],
    )
    def test_a_line_is_prefixed_with_the_time_it_says_itself(self, line, time):
        assert kept([f"{line}\n".encode()], "timestamps=true") == f"{time} {line}\n".encode()

    def test_firecracker_writes_local_time(self, monkeypatch):
        import time

        monkeypatch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        try:
            printed = kept([b"2026-01-01T20:59:30.000000001 [vm:main] a\n"], "timestamps=true")
        finally:
            monkeypatch.undo()
            time.tzset()
        assert printed.startswith(b"2026-01-01T11:59:30.000000001Z ")

    def test_a_line_without_a_time_has_that_of_the_one_before(self):
        lines = b"cloud-hypervisor: 2.000000s: <vmm> panic\n  at frame 1\n  at frame 2\n"
        printed = kept([lines], "timestamps=1").splitlines()
        assert [line.split()[0] for line in printed] == [b"2026-01-01T11:59:02.000000000Z"] * 3

    def test_without_any_time_it_is_now(self):
        assert kept([b"a\n"], "timestamps=1", started=None) == b"2026-01-01T12:00:00.250000000Z a\n"
        counted = b"cloud-hypervisor: 2.000000s: a\n"  # since a start that nobody knows
        assert kept([counted], "timestamps=1", started=None) == b"2026-01-01T12:00:00.250000000Z " + counted

    def test_the_carriage_return_of_the_hypervisor_stays(self):
        assert kept([b"a\r\nb\r\n"], "timestamps=1").count(b"\r\n") == 2

    def test_a_line_in_pieces_has_one_time(self):
        pieces = [b"cloud-hyper", b"visor: 1.000000s: <vmm> a", b"b\ncloud"]
        assert kept(pieces, "timestamps=1") == (
            b"2026-01-01T11:59:01.000000000Z cloud-hypervisor: 1.000000s: <vmm> ab\n"
            b"2026-01-01T11:59:01.000000000Z cloud"
        )

    def test_an_endless_line_is_passed_on_in_parts_with_one_time(self):
        pieces = [b"x" * 700_000] * 3 + [b"\ny\n"]
        printed = kept(pieces, "timestamps=1")
        assert printed.count(b"Z ") == 2
        assert printed.count(b"x") == 2_100_000


class TestSince:
    LINES = b"".join(b"cloud-hypervisor: %d.000000s: <vmm> %d\n" % (second, second) for second in (10, 20, 30, 40))

    @pytest.mark.parametrize(
        ("since", "first"),
        [("11:59:00", b"10"), ("11:59:20", b"20"), ("11:59:20.5", b"30"), ("11:59:40", b"40"), ("12:30:00", None)],
    )
    def test_it_begins_with_the_first_line_that_is_not_older(self, since, first):
        left = kept([self.LINES], f"sinceTime=2026-01-01T{since}Z")
        assert left == (self.LINES[self.LINES.index(b"cloud-hypervisor: " + first) :] if first else b"")

    def test_whatever_follows_a_line_that_counts_does_too(self):
        lines = b"cloud-hypervisor: 30.000000s: a\n  at frame 1\ncloud-hypervisor: 20.000000s: the clock went back\n"
        assert kept([lines], "sinceTime=2026-01-01T11:59:30Z") == lines

    def test_what_follows_a_line_that_is_too_old_is_as_old(self):
        lines = b"cloud-hypervisor: 10.000000s: a\n  at frame 1\ncloud-hypervisor: 40.000000s: b\n"
        assert kept([lines], "sinceTime=2026-01-01T11:59:30Z") == b"cloud-hypervisor: 40.000000s: b\n"

    def test_with_a_limit_only_what_is_left_is_counted(self):
        assert kept([self.LINES], "sinceTime=2026-01-01T11:59:35Z&limitBytes=18") == b"cloud-hypervisor: "
