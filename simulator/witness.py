"""A witness inside the daemon: what its probes do, compared with what the contract says they do.

Much of what can go wrong in a probe loop shows nowhere outside, or only when two things meet: a result that is stored
after `forget`, an old incarnation that stops its successor, a failure counted that should have been forgotten. So the
witness wraps the closures of every probe and the daemon's `notify`, keeps a second, independent count of successes
and failures, and reports to the rulebook whatever differs. It changes nothing, waits for nothing and draws no number.

One per life of the daemon, attached before its start. It knows one thing about the inside of the provider: where its
`ProbeManager` is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from simulator.clock import VirtualClock
from simulator.invariants import Rulebook, transition_problems
from vkcocoon_daemon import Daemon
from vkcocoon_probes import Deadline, Probe, ProbeAgent, ProbeResult
from vkcocoon_status import PROBE_READY, Reason, condition_of, pod_key

__all__ = ["Witness"]

# The contract in numbers, written down here again so that a change of the daemon's own table is noticed.
RAMP_US = (100_000, 150_000, 225_000, 337_500, 506_250, 759_375, 1_000_000)
STEADY_US = 5_000_000
STRIKES = 3
BOUND_US = 3_000_000

Say = Callable[[str, str, str, Mapping[str, Any]], None]
# Reasons that a publication may give although the pod's own probe says otherwise.
OVERRULED = (Reason.ADDRESS_CONFLICT, Reason.TERMINATING)


class _Token:
    """One `start`: its agent, whether it was stopped, and the count that the witness keeps of it."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.agent: ProbeAgent | None = None  # known when `start` has returned
        self.retired = False
        self.in_flight = 0
        self.ready = False
        self.failures = 0
        self.rung = -1

    def count(self, success: bool) -> int:
        """One more result; the pause in microseconds that has to follow."""
        if success:
            self.ready, self.failures = True, 0
        elif self.ready:
            self.failures += 1
            if self.failures == STRIKES:
                self.ready, self.rung = False, 0
        else:
            self.rung += 1
        return STEADY_US if self.ready else RAMP_US[min(max(self.rung, 0), len(RAMP_US) - 1)]


class Witness:
    """Attach it to a daemon that was not started yet. `say` gets what is handed over: actor, kind, pod, fields."""

    def __init__(self, daemon: Daemon, clock: VirtualClock, rulebook: Rulebook, say: Say) -> None:
        self._clock = clock
        self._broken = rulebook.broken
        self._say = say
        self._live: dict[str, _Token] = {}
        self._by_agent: dict[ProbeAgent, _Token] = {}
        self._handed: dict[str, Mapping[str, Any]] = {}  # UID -> the status handed over last
        manager = daemon.provider._probes
        self._original = (manager.start, manager.forget)
        manager.start, manager.forget = self._start, self._forget  # type: ignore[method-assign]
        notify = daemon.pods.notify
        daemon.provider.notify_pods(lambda pod: self._notify(pod, notify), acknowledged=True)

    # Around the probe manager

    def _start(self, key: str, probe: Probe, on_update: Callable[[], None]) -> ProbeAgent:
        start, _ = self._original
        if former := self._live.get(key):
            self._retire(former)
        token = self._live[key] = _Token(key)

        def told() -> None:
            if token.retired:
                self._broken("nothing after forget", key, "a forgotten probe calls back")
            on_update()

        agent = start(key, partial(self._probe, token, probe), told)
        token.agent = agent
        if not token.retired:
            self._by_agent[agent] = token
        if token.retired and agent.result.at is not None:
            self._broken("nothing after forget", key, "the first result is stored although the probe was forgotten")
        return agent

    def _forget(self, key: str, owner: ProbeAgent | None = None) -> bool:
        _, forget = self._original
        token = self._live.get(key)
        stopped = forget(key, owner)
        if not stopped or token is None:
            return stopped
        if owner is not None and token.agent is not owner:
            self._broken("stopped by its owner", key, "an earlier incarnation stops the probe of a later one")
        self._retire(token)
        return stopped

    def _retire(self, token: _Token) -> None:
        token.retired = True
        if self._live.get(token.key) is token:
            del self._live[token.key]
        if not token.in_flight and token.agent is not None:
            self._by_agent.pop(token.agent, None)

    def _probe(self, token: _Token, probe: Probe, deadline: Deadline) -> ProbeResult:
        if token.retired:
            self._broken("nothing after forget", token.key, "a forgotten probe begins")
        token.in_flight += 1
        if token.in_flight > 1:
            self._broken("one probe at a time", token.key, f"{token.in_flight} probes are in flight")
        try:
            return probe(deadline)
        finally:
            token.in_flight -= 1
            if token.retired:
                self._clock.at(self._clock.elapsed(), self._look_back, token, token.agent and token.agent.result)

    def _look_back(self, token: _Token, result: ProbeResult | None) -> None:
        """A probe came back after it was forgotten: nothing of it may have been kept."""
        # Of the first one, which has no agent yet, `_start` knows whether it was kept.
        if token.agent is not None and result is not None and token.agent.result is not result:
            self._broken("nothing after forget", token.key, "a result is stored after the probe was forgotten")
        if token.agent is not None:
            self._by_agent.pop(token.agent, None)

    def probed(self, agent: ProbeAgent, result: ProbeResult, lateness_s: float, took_s: float) -> None:
        """The daemon's observer: a result was counted."""
        token = self._by_agent.get(agent) or self._live.get(agent.key)  # the second while `start` still runs
        if token is None or token.agent not in (None, agent):
            return  # the first result of one that was forgotten meanwhile: `start` looks after it
        if token.retired:
            self._broken("nothing after forget", agent.key, "a result is counted after the probe was forgotten")
        pause_us = token.count(result.ready)
        if agent.ready != token.ready:
            said, seen = _word(token.ready), _word(agent.ready)
            self._broken("three strikes", agent.key, f"{said} after these results, and readers see {seen}")
            token.ready = agent.ready
        wanted_us = self._clock.now_us + pause_us
        if round(agent.due * 1_000_000) != wanted_us:
            text = f"the next probe is due in {agent.due - self._clock.elapsed():.6f} s, not {pause_us / 1e6:.6f} s"
            self._broken("the pace of the contract", agent.key, text)
        if round(lateness_s * 1_000_000) > 0:
            self._broken("the pace of the contract", agent.key, f"a probe began {lateness_s:.6f} s late")
        if round(took_s * 1_000_000) > BOUND_US:
            self._broken("bounded probes", agent.key, f"a probe took {took_s:.6f} s")

    # Around what is handed over

    def _notify(self, pod: dict[str, Any], notify: Callable[[dict[str, Any]], None]) -> None:
        key, uid, status = pod_key(pod), str(pod["metadata"]["uid"]), pod["status"]
        self._check_order(key, self._handed.get(uid), status)
        self._handed[uid] = status
        ready, probe = condition_of(status, "Ready"), condition_of(status, PROBE_READY)
        if probe and str(probe.get("reason")) not in OVERRULED and str(ready.get("reason")) not in OVERRULED:
            token = self._live.get(key)
            seen = token is not None and token.ready
            if seen != (probe.get("status") == "True"):
                self._broken("said as probed", key, f"ProbeReady={probe.get('status')}, and the probe is {_word(seen)}")
        fields = {"ready": ready.get("status", ""), "reason": str(ready.get("reason", "")), "phase": status["phase"]}
        self._say("daemon", "hands over", key, fields)
        notify(pod)

    def _check_order(self, key: str, before: Mapping[str, Any] | None, status: Mapping[str, Any]) -> None:
        if before is None or before == status:
            return
        for rule, text in transition_problems(before, status):
            self._broken(rule, key, text)
        last, phase = before.get("phase"), status.get("phase")
        if last in ("Succeeded", "Failed"):
            self._broken("last words are last", key, f"{phase} is handed over after {last}")
        terminating = condition_of(before, "Ready").get("reason") == Reason.TERMINATING
        if terminating and phase not in ("Succeeded", "Failed"):
            reason = condition_of(status, "Ready").get("reason")
            self._broken("last words are last", key, f"{reason} is handed over after Terminating")


def _word(ready: bool) -> str:
    return "ready" if ready else "not ready"
