"""Who may use the kubelet API (D3): certificates of the configured authorities, tokens the API server vouches for, and
of both only what it allows. H13, and what it costs: answers are kept for a while, questions are shared and few at once.

Caches in virtual time, to the instant; the rest over TLS.
"""

import json

import gevent
import pytest
from kubelet_rig import DAY, NODE, SERVER, Authority, KubeletRig

from simulator.clock import VirtualClock
from simulator.fake_kube import FakeKube
from vkcocoon_access import Access, Denied, User, subresources, user_of_certificate
from vkcocoon_kube import ApiError

TOKENS = "/apis/authentication.k8s.io/v1/tokenreviews"
RIGHTS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
SCRAPER = {"username": "scraper", "uid": "7", "groups": ["system:authenticated"], "extra": {"scope": ["a", "b"]}}


@pytest.fixture
def clock():
    clock = VirtualClock()
    yield clock
    clock.close()


@pytest.fixture
def kube(clock):
    kube = FakeKube(clock)
    kube.tokens["good"] = SCRAPER
    return kube


@pytest.fixture
def access(kube, clock):
    return Access(kube, clock, NODE)


def asked(kube, path):
    return [request.body["spec"] for request in kube.requests if request.path == path]


def check(access, path="/metrics/resource", token="good", method="GET", certificate=None):
    return access.check(method, path, certificate=certificate, authorization=f"Bearer {token}" if token else "")


def refused(access, **how):
    with pytest.raises(Denied) as caught:
        check(access, **how)
    return int(caught.value.status)


class TestWho:
    @pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic Z29vZA==", "good", "Bearer a b", "Bearer a\tb"])
    def test_without_a_token_nobody_is_asked_about(self, access, kube, header):
        with pytest.raises(Denied) as caught:
            access.check("GET", "/healthz", certificate=None, authorization=header)
        assert (caught.value.status, str(caught.value)) == (401, "Unauthorized")
        assert kube.requests == []

    @pytest.mark.parametrize("header", ["Bearer good", "bearer good", "BEARER   good  "])
    def test_a_token_is_found_in_every_spelling(self, access, header):
        assert access.check("GET", "/healthz", certificate=None, authorization=header).name == "scraper"

    def test_an_overlong_token_is_none(self, access, kube):
        assert refused(access, token="x" * 20_000) == 401
        assert kube.requests == []

    def test_the_user_is_whom_the_api_server_says(self, access):
        assert check(access) == User("scraper", "7", ("system:authenticated",), (("scope", ("a", "b")),))

    def test_a_token_the_api_server_does_not_know_is_nobody(self, access, kube):
        assert refused(access, token="bad") == 401
        assert asked(kube, TOKENS) == [{"token": "bad"}]
        assert asked(kube, RIGHTS) == []

    @pytest.mark.parametrize("user", [{}, {"username": ""}])
    def test_a_token_of_nobody_in_particular_is_nobody(self, access, kube, user):
        kube.tokens["odd"] = user
        assert refused(access, token="odd") == 401

    def test_a_certificate_names_its_user_and_groups(self):
        subject = ((("organizationName", "a"),), (("organizationName", "b"),), (("commonName", "n"),))
        assert user_of_certificate({"subject": subject}) == User("n", groups=("a", "b"))
        assert user_of_certificate({"subject": ((("organizationName", "a"),),)}) is None
        assert user_of_certificate(None) is None
        assert user_of_certificate({}) is None

    def test_a_certificate_comes_before_a_token_and_needs_no_token_review(self, access, kube):
        certificate = {"subject": ((("commonName", "kube-apiserver-kubelet-client"),),)}
        assert check(access, certificate=certificate, token="bad").name == "kube-apiserver-kubelet-client"
        assert asked(kube, TOKENS) == []
        assert [spec["user"] for spec in asked(kube, RIGHTS)] == ["kube-apiserver-kubelet-client"]


class TestWhat:
    @pytest.mark.parametrize(
        ("path", "parts"),
        [
            ("/metrics/resource", ("metrics",)),
            ("/metrics", ("metrics",)),
            ("/stats/summary", ("stats",)),
            ("/logs/", ("log",)),
            ("/pods", ("pods", "proxy")),
            ("/runningpods/", ("pods", "proxy")),
            ("/healthz/ping", ("healthz", "proxy")),
            ("/configz", ("configz", "proxy")),
            ("/flagz", ("configz",)),
            ("/checkpoint/default/web-0/agent", ("checkpoint",)),
            ("/containerLogs/default/web-0/agent", ("proxy",)),
            ("/exec/default/web-0/agent", ("proxy",)),
            ("/", ("proxy",)),
            ("//metrics", ("metrics",)),
            ("/metricsx", ("proxy",)),
        ],
    )
    def test_a_path_is_a_part_of_the_node(self, path, parts):
        assert subresources(path) == parts

    @pytest.mark.parametrize(
        ("method", "verb"),
        [("GET", "get"), ("POST", "create"), ("PUT", "update"), ("PATCH", "patch"), ("DELETE", "delete")],
    )
    def test_the_question_is_complete(self, access, kube, method, verb):
        check(access, method=method)
        assert asked(kube, RIGHTS) == [
            {
                "user": "scraper",
                "uid": "7",
                "groups": ["system:authenticated"],
                "extra": {"scope": ["a", "b"]},
                "resourceAttributes": {
                    "verb": verb,
                    "version": "v1",
                    "resource": "nodes",
                    "subresource": "metrics",
                    "name": NODE,
                },
            }
        ]

    def test_somebody_who_may_not_is_told_what(self, access, kube):
        kube.allows = lambda spec: False
        with pytest.raises(Denied) as caught:
            check(access, path="/pods")
        assert caught.value.status == 403
        assert str(caught.value) == "Forbidden (user=scraper, verb=get, resource=nodes, subresource=pods or proxy)"

    @pytest.mark.parametrize("right", ["pods", "proxy"])
    def test_either_right_is_enough_where_there_are_two(self, access, kube, right):
        kube.allows = lambda spec: spec["resourceAttributes"]["subresource"] == right
        check(access, path="/pods")

    def test_a_right_for_one_part_is_none_for_another(self, access, kube):
        kube.allows = lambda spec: spec["resourceAttributes"]["subresource"] == "metrics"
        check(access, path="/metrics/resource")
        assert refused(access, path="/containerLogs/default/web-0/agent") == 403
        assert refused(access, path="/stats/summary") == 403


class TestHowLong:
    def test_a_token_is_asked_about_every_two_minutes(self, access, kube, clock):
        check(access)
        clock.run(119.999999)
        check(access)
        assert len(asked(kube, TOKENS)) == 1
        clock.run(0.000001)
        check(access)
        assert len(asked(kube, TOKENS)) == 2

    def test_a_right_is_asked_for_every_five_minutes(self, access, kube, clock):
        check(access)
        clock.run(299.999999)
        check(access)
        assert len(asked(kube, RIGHTS)) == 1
        clock.run(0.000001)
        check(access)
        assert len(asked(kube, RIGHTS)) == 2

    def test_a_missing_right_is_asked_for_every_half_minute(self, access, kube, clock):
        kube.allows = lambda spec: False
        assert refused(access) == 403
        kube.allows = lambda spec: True
        clock.run(29.999999)
        assert refused(access) == 403
        clock.run(0.000001)
        check(access)

    def test_a_token_that_became_valid_is_let_in_after_ten_seconds(self, access, kube, clock):
        assert refused(access, token="new") == 401
        kube.tokens["new"] = SCRAPER
        clock.run(9.999999)
        assert refused(access, token="new") == 401
        clock.run(0.000001)
        check(access, token="new")

    def test_a_token_that_expired_is_out_within_two_minutes(self, access, kube, clock):
        check(access)
        del kube.tokens["good"]
        clock.run(120)
        assert refused(access) == 401

    def test_a_step_of_the_wall_clock_changes_nothing(self, access, kube, clock):
        check(access)
        clock.step_wall(86_400 * 365)
        check(access)
        assert len(kube.requests) == 2

    def test_an_api_server_that_is_away_does_not_shut_out_who_was_let_in(self, access, kube, clock):
        check(access)
        kube.down = True
        clock.run(119)
        check(access)
        assert refused(access, token="other") == 503

    def test_what_could_not_be_asked_is_not_kept(self, access, kube):
        kube.fail(f"POST {TOKENS}", ApiError(500, "InternalError", "boom"))
        assert refused(access) == 503
        check(access)
        kube.fail(f"POST {RIGHTS}", ApiError(0, "Timeout", "no answer"))
        assert refused(access, path="/stats/summary") == 503
        check(access, path="/stats/summary")

    def test_an_api_server_that_hangs_is_waited_for_ten_seconds(self, access, kube, clock):
        kube.client_timeout = 1000.0
        kube.hang(f"POST {TOKENS}")
        began = clock.elapsed()
        assert refused(access) == 503
        assert clock.elapsed() - began == 10.0

    def test_answers_about_strangers_do_not_grow_for_ever(self, access):
        for number in range(1500):
            refused(access, token=f"stranger-{number}")
        assert len(access._users._kept) == 1024


class TestHowMany:
    def greenlets(self, clock, access, tokens):
        ended = []

        def ask(token):
            try:
                ended.append(check(access, token=token).name)
            except Denied as denied:
                ended.append(int(denied.status))

        for token in tokens:
            clock.spawn(f"client {token}", ask, token)
        return ended

    def test_those_who_ask_at_once_share_one_question(self, access, kube, clock):
        kube.latency = 0.5
        ended = self.greenlets(clock, access, ["good"] * 50)
        clock.run(2)
        assert ended == ["scraper"] * 50
        assert (len(asked(kube, TOKENS)), len(asked(kube, RIGHTS))) == (1, 1)

    def test_a_question_that_fails_fails_for_all_who_share_it(self, access, kube, clock):
        kube.latency = 0.5
        kube.fail(f"POST {TOKENS}", ApiError(500, "InternalError", "boom"))
        ended = self.greenlets(clock, access, ["good"] * 5)
        clock.run(2)
        assert ended == [503] * 5

    def test_who_asks_first_may_leave_and_the_next_asks(self, access, kube, clock):
        kube.latency = 0.5
        first = clock.spawn("first", check, access)
        clock.run(0.1)
        ended = self.greenlets(clock, access, ["good"])
        clock.run(0.1)
        gevent.kill(first)
        clock.run(2)
        assert ended == ["scraper"]
        assert len(asked(kube, TOKENS)) == 2

    def test_many_strangers_are_only_a_few_questions_at_once(self, access, kube, clock):
        kube.latency = 1.0
        ended = self.greenlets(clock, access, [f"stranger-{number}" for number in range(40)])
        clock.run(0.5)
        assert len(asked(kube, TOKENS)) == 8
        clock.run(5)
        assert ended == [401] * 40


class TestOverTLS:
    @pytest.fixture
    def rig(self, tmp_path):
        rig = KubeletRig(tmp_path)
        rig.vm_pod()
        yield rig
        rig.close()

    def test_h13_nobody_is_answered_nothing(self, rig):
        rig.start()
        with rig.asking("/pods", token="") as answer:
            assert (answer.status, answer.headers["www-authenticate"]) == (401, 'Bearer realm="kubelet"')
            assert answer.text() == "Unauthorized\n"
        assert rig.ask("/containerLogs/default/web-0/agent", token="") == (401, "Unauthorized\n")
        assert rig.ask("/no/such/page", token="") == (401, "Unauthorized\n")

    def test_h13_a_certificate_of_the_configured_authority_is_enough(self, rig):
        rig.start()
        context = rig.context(rig.authority.issue("kube-apiserver-kubelet-client", groups=["system:masters"]))
        assert rig.ask("/healthz", token="", context=context) == (200, "ok")
        assert [spec["groups"] for spec in asked(rig.kube, RIGHTS)] == [["system:masters"]]

    @pytest.mark.parametrize("wrong", ["authority", "expired", "early", "usage"])
    def test_h13_another_certificate_is_refused_in_the_handshake(self, rig, wrong, tmp_path):
        rig.start()
        if wrong == "authority":
            pair = Authority(tmp_path, "stranger").issue("kube-apiserver-kubelet-client")
        elif wrong == "usage":
            pair = rig.authority.issue("server", usage=SERVER)
        else:
            span = {"expired": (-2 * DAY, -DAY), "early": (DAY, 2 * DAY)}[wrong]
            pair = rig.authority.issue("late", start=span[0], end=span[1])
        with pytest.raises(OSError):
            rig.ask("/healthz", token="", context=rig.context(pair))
        assert rig.kube.requests == []
        assert rig.ask("/healthz") == (200, "ok")

    def test_h13_a_certificate_without_a_name_is_nobody(self, rig):
        rig.start()
        context = rig.context(rig.authority.issue("", groups=["system:masters"]))
        assert rig.ask("/healthz", token="", context=context)[0] == 401

    def test_h13_without_an_authority_no_certificate_is_believed(self, rig):
        rig.start(kubelet_client_ca="")
        context = rig.context(rig.authority.issue("kube-apiserver-kubelet-client"))
        assert rig.ask("/healthz", token="", context=context)[0] == 401
        assert rig.ask("/healthz") == (200, "ok")

    def test_h13_an_expired_token_is_nobody(self, rig):
        rig.start()
        assert rig.ask("/metrics/resource", token="expired")[0] == 401

    def test_h13_a_token_without_rights_is_forbidden(self, rig):
        rig.kube.allows = lambda spec: False
        rig.start()
        status, text = rig.ask("/metrics/resource")
        assert status == 403
        assert text == (
            "Forbidden (user=system:serviceaccount:kube-system:metrics-server, verb=get, resource=nodes, "
            "subresource=metrics)\n"
        )

    def test_h13_an_api_server_that_is_away_is_no_permission(self, rig):
        rig.start()
        rig.kube.down = True
        assert rig.ask("/pods")[0] == 503

    def test_everybody_is_served_only_when_that_was_asked_for(self, rig):
        rig.start(kubelet_auth="off")
        assert rig.ask("/healthz", token="") == (200, "ok")
        assert rig.kube.requests == []

    def test_no_token_stays_in_memory_or_in_a_log(self, rig, capfd):
        rig.kube.fail(f"POST {TOKENS}", ApiError(500, "InternalError", "boom"))
        rig.start()
        assert rig.ask("/pods", token="s3cr3t-token")[0] == 503
        assert rig.ask("/pods", token="s3cr3t-token")[0] == 401
        kept = rig.kubelet._access._users._kept
        assert len(kept) == 1
        assert "s3cr3t" not in str(kept) + json.dumps(capfd.readouterr())
