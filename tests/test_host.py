"""What a node reports of its host: read from files, with a clear word about what cannot be read."""

import re

import pytest

from vkcocoon_host import HostError, node_address, read_host


@pytest.fixture
def files(tmp_path):
    """A /proc, /sys and /etc of a made-up host."""
    for path, text in {
        "proc/meminfo": "MemTotal:       32768000 kB\nMemFree:        1 kB\n",
        "proc/net/route": "Iface\tDestination\tGateway\n",
        "proc/sys/kernel/random/boot_id": "b-1\n",
        "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "512\n",
        "sys/class/dmi/id/product_uuid": "s-1\n",
        "etc/os-release": 'NAME="X"\nPRETTY_NAME="Some Linux 7"\n',
        "etc/machine-id": "m-1\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return {name: str(tmp_path / name) for name in ("proc", "sys", "etc")}


def test_the_facts_are_read_from_where_they_are(files, tmp_path):
    host = read_host(str(tmp_path), **files)
    assert (host.memory, host.hugepages) == (32768000 * 1024, {"hugepages-2Mi": 2**30})
    assert (host.boot_id, host.machine_id, host.system_uuid) == ("b-1", "m-1", "s-1")
    assert host.os_image == "Some Linux 7" and host.cpus >= 1 and host.kernel
    assert host.storage > host.storage_available > 0


def test_a_root_directory_that_does_not_exist_yet_is_measured_where_it_would_be(files, tmp_path):
    there, not_yet = read_host(str(tmp_path), **files), read_host(str(tmp_path / "not" / "yet"), **files)
    assert there.storage == not_yet.storage


def test_without_a_memory_figure_the_setting_that_stands_in_is_named(files, tmp_path):
    (tmp_path / "proc/meminfo").write_text("nothing\n")
    with pytest.raises(HostError, match="VK_NODE_MEM"):
        read_host(str(tmp_path), **files)


def test_files_that_are_not_there_leave_facts_empty(files, tmp_path):
    for path in ("etc/machine-id", "sys/class/dmi/id/product_uuid", "etc/os-release"):
        (tmp_path / path).unlink()
    host = read_host(str(tmp_path), **files)
    assert (host.machine_id, host.system_uuid, host.os_image) == ("", "", "Linux")


def test_the_address_is_no_loopback_address():
    try:
        address = node_address()
    except HostError as error:  # a sandbox without a network
        assert "VK_NODE_IP" in str(error)
    else:
        assert re.fullmatch(r"\d+\.\d+\.\d+\.\d+", address) and not address.startswith("127.")


def test_an_interface_of_the_default_route_goes_first(files, tmp_path):
    (tmp_path / "proc/net/route").write_text("Iface\tDestination\tGateway\nlo\t00000000\t0100000A\n")
    try:
        assert read_host(str(tmp_path), **files).address == node_address()  # lo has only loopback: passed over
    except HostError:
        assert read_host(str(tmp_path), **files).address == ""
