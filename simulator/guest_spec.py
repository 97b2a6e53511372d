"""How a guest behaves, whether it is simulated or a process. On its own, because each live guest imports it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GuestSpec"]


@dataclass(frozen=True, slots=True)
class GuestSpec:
    """What happens inside a guest. Seconds count from power-on up to the lease, and from the lease afterwards."""

    os: str = "linux"
    boot_s: float = 1.0  # asks for its lease then
    lease_s: float = 0.5  # from asking to the ACK
    echo: bool = True
    echo_after_s: float = 0.0
    ports: tuple[int, ...] = ()  # accept from the lease on
    ssh_after_s: float | None = None  # port 22 accepts from the lease on, and speaks that much later; None = no sshd
    ssh_banner: str = "SSH-2.0-OpenSSH_9.9"
    latency_s: float = 0.0
    loss: float = 0.0  # of questions, from 0 to 1; answers are drawn from the host's rng
    flood: bool = False  # each echo also brings replies that are wrong in one respect each (simulator.wire)
    resume_s: float | None = None  # of a clone, in place of boot_s; None = the same

    @classmethod
    def for_os(cls, os_name: str) -> GuestSpec:
        """How a guest of that system behaves when nobody says otherwise; macOS in a hurry, but in the right order."""
        match os_name:
            case "windows":
                return cls(os="windows", boot_s=5.0, lease_s=1.0, echo_after_s=0.5, ports=(3389,))
            case "macos":
                return cls(os="macos", boot_s=10.0, lease_s=1.0, ssh_after_s=8.0)
            case _:
                return cls(os=os_name)
