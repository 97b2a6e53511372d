"""One table of settings, checked strictly: what cannot be right stops the start in one clear line (D1, D2, D5)."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkcocoon_settings import (
    SETTINGS,
    Address,
    Setting,
    SettingError,
    Settings,
    WrongSettings,
    configuration_page,
    environment_example,
)

ROOT = Path(__file__).parent.parent
BY_NAME = {row.name: row for row in SETTINGS}


def load(name: str, text: str):
    """The value a setting gets when its variable holds `text`."""
    return getattr(Settings.load({BY_NAME[name].env: text}), name)


class TestTable:
    def test_no_environment_and_no_flags_give_the_defaults(self):
        assert Settings.load({}) == Settings()

    @pytest.mark.parametrize(
        ("name", "default"),
        [
            ("kubeconfig", ""),
            ("node_name", "cocoon-pool"),
            ("node_pool", "default"),
            ("node_ip", ""),
            ("provider_id", ""),
            ("log_level", "info"),
            ("log_format", "auto"),
            ("leases_path", "/var/lib/cocoon/net/leases.json"),
            ("cocoon_net_control_socket", "/run/cocoon-net/control.sock"),
            ("cocoon_bin", "/usr/local/bin/cocoon"),
            ("cocoon_macos_bin", "/usr/local/bin/cocoon-macos"),
            ("cocoon_processes", 8),
            ("macos_vnc_password", ""),
            ("orphan_policy", "alert"),
            ("restore_mode", "mmap"),
            ("kubelet_port", 10250),
            ("metrics_addr", Address("", 9091)),
            ("reserve_percent", 20),
            ("node_cpu", ""),
            ("node_mem", ""),
            ("node_storage", ""),
            ("node_hugepages", ""),
            ("node_pods", 256),
            ("cocoon_root_dir", "/var/lib/cocoon"),
            ("cocoon_cgroup_parent", "cocoon.slice"),
            ("snapshot_cpu_class", ""),
            ("oci_registry", ""),
        ],
    )
    def test_the_defaults_are_what_was_promised(self, name, default):
        assert getattr(Settings(), name) == default

    @pytest.mark.parametrize(
        ("name", "env"),
        [
            ("kubeconfig", "KUBECONFIG"),
            ("node_name", "VK_NODE_NAME"),
            ("node_ip", "VK_NODE_IP"),
            ("leases_path", "VK_LEASES_PATH"),
            ("cocoon_net_control_socket", "VK_COCOON_NET_CONTROL_SOCKET"),
            ("cocoon_bin", "VK_COCOON_BIN"),
            ("cocoon_macos_bin", "VK_COCOON_MACOS_BIN"),
            ("macos_vnc_password", "COCOON_MACOS_VNC_PASSWORD"),
            ("cocoon_root_dir", "COCOON_ROOT_DIR"),
            ("cocoon_cgroup_parent", "COCOON_CGROUP_PARENT"),
            ("oci_registry", "OCI_REGISTRY"),
            ("metrics_addr", "VK_METRICS_ADDR"),
        ],
    )
    def test_the_environment_names_are_the_ones_hosts_already_use(self, name, env):
        assert BY_NAME[name].env == env

    def test_each_field_is_one_row_and_each_row_one_field(self):
        assert [row.name for row in SETTINGS] == [field.name for field in dataclasses.fields(Settings)]

    def test_no_variable_and_no_flag_is_used_twice(self):
        assert len({row.env for row in SETTINGS}) == len(SETTINGS)
        flags = [row.flag for row in SETTINGS if row.flag]
        assert len(set(flags)) == len(flags) == len(SETTINGS) - 1

    @pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.name)
    def test_each_row_says_what_it_is_and_what_holds_without_it(self, row: Setting):
        assert row.help.endswith(".")
        assert row.kind.allowed
        assert bool(row.default) != bool(row.absent)

    def test_a_secret_has_no_flag_and_stays_out_of_repr(self):
        secrets = [row for row in SETTINGS if row.secret]
        assert [row.name for row in secrets] == ["macos_vnc_password"]
        assert secrets[0].flag == ""
        assert "s3cret" not in repr(Settings(macos_vnc_password="s3cret"))


class TestPrecedence:
    def test_a_flag_wins_over_the_environment(self):
        settings = Settings.load({"VK_NODE_NAME": "from-env"}, {"node_name": "from-flag"})
        assert settings.node_name == "from-flag"

    def test_the_environment_wins_over_the_default(self):
        assert Settings.load({"VK_NODE_NAME": "from-env"}).node_name == "from-env"

    def test_empty_is_unset_everywhere(self):
        assert Settings.load({row.env: "" for row in SETTINGS}, {row.name: "" for row in SETTINGS}) == Settings()

    def test_an_empty_flag_does_not_hide_the_environment(self):
        assert Settings.load({"VK_NODE_NAME": "from-env"}, {"node_name": ""}).node_name == "from-env"

    def test_a_wrong_value_that_is_overridden_is_never_looked_at(self):
        assert Settings.load({"VK_KUBELET_PORT": "no"}, {"kubelet_port": "10251"}).kubelet_port == 10251

    @pytest.mark.parametrize(
        ("environ", "flags", "origin"),
        [
            ({}, {}, "default"),
            ({"VK_NODE_NAME": "a"}, {}, "VK_NODE_NAME"),
            ({"VK_NODE_NAME": "a"}, {"node_name": "b"}, "--node-name"),
            ({"VK_NODE_NAME": ""}, {"node_name": ""}, "default"),
        ],
    )
    def test_the_origin_of_a_value_is_named_as_the_user_wrote_it(self, environ, flags, origin):
        assert Settings.origin("node_name", environ, flags) == origin

    def test_a_secret_comes_from_the_environment_only(self):
        assert Settings.load({}, {"macos_vnc_password": "x"}).macos_vnc_password == ""


RIGHT = [
    ("kubeconfig", "/etc/kubernetes/admin.conf", "/etc/kubernetes/admin.conf"),
    ("kubeconfig", "a.conf:/b.conf", "a.conf:/b.conf"),
    ("node_name", "rack1-host7.example", "rack1-host7.example"),
    ("node_name", "a" * 63, "a" * 63),
    ("node_pool", "Pool_1.x", "Pool_1.x"),
    ("node_ip", "10.0.0.5", "10.0.0.5"),
    ("node_ip", "127.0.0.1", "127.0.0.1"),
    ("provider_id", "cocoon://rack1/host7", "cocoon://rack1/host7"),
    ("log_level", "WARN", "warning"),
    ("log_level", "Debug", "debug"),
    ("log_format", "json", "json"),
    ("cocoon_bin", "/opt/cocoon/bin/cocoon", "/opt/cocoon/bin/cocoon"),
    ("cocoon_bin", "cocoon", "cocoon"),
    ("cocoon_processes", "1", 1),
    ("cocoon_processes", "64", 64),
    ("macos_vnc_password", "12345678", "12345678"),
    ("orphan_policy", "Destroy", "destroy"),
    ("orphan_policy", "keep", "keep"),
    ("restore_mode", "OnDemand", "ondemand"),
    ("kubelet_port", "1", 1),
    ("kubelet_port", "65535", 65535),
    ("metrics_addr", "127.0.0.1:9091", Address("127.0.0.1", 9091)),
    ("metrics_addr", "[::1]:0", Address("::1", 0)),
    ("metrics_addr", "localhost:80", Address("localhost", 80)),
    ("metrics_addr", ":65535", Address("", 65535)),
    ("reserve_percent", "0", 0),
    ("reserve_percent", "100", 100),
    ("node_cpu", "16", "16"),
    ("node_cpu", "15500m", "15500m"),
    ("node_cpu", "1e1", "1e1"),
    ("node_mem", "64Gi", "64Gi"),
    ("node_mem", "1.5Gi", "1.5Gi"),
    ("node_mem", "1Mi", "1Mi"),
    ("node_mem", "68719476736", "68719476736"),
    ("node_storage", "2T", "2T"),
    ("node_hugepages", "0", "0"),
    ("node_hugepages", "8Gi", "8Gi"),
    ("node_pods", "1", 1),
    ("cocoon_cgroup_parent", "machine.slice/cocoon.slice", "machine.slice/cocoon.slice"),
    ("snapshot_cpu_class", "icelake", "icelake"),
]

WRONG = [
    ("kubeconfig", ":"),
    ("kubeconfig", "/etc/kube\nconfig"),
    ("node_name", "Host7"),
    ("node_name", "host_7"),
    ("node_name", "-host"),
    ("node_name", "host."),
    ("node_name", "a" * 64),
    ("node_name", "höst"),
    ("node_name", "host "),
    ("node_name", "host\n"),
    ("node_pool", "-x"),
    ("node_pool", "a b"),
    ("node_pool", "a" * 64),
    ("node_ip", "10.0.0"),
    ("node_ip", "10.0.0.05"),
    ("node_ip", "10.0.0.256"),
    ("node_ip", "0.0.0.0"),
    ("node_ip", "224.0.0.1"),
    ("node_ip", "255.255.255.255"),
    ("node_ip", "::1"),
    ("node_ip", "host7"),
    ("node_ip", "10.0.0.5/24"),
    ("provider_id", "two words"),
    ("log_level", "loud"),
    ("log_format", "xml"),
    ("leases_path", "leases.json"),
    ("leases_path", "~/leases.json"),
    ("cocoon_net_control_socket", "control.sock"),
    ("cocoon_net_control_socket", "/" + "s" * 107),
    ("cocoon_bin", "./cocoon"),
    ("cocoon_bin", "bin/cocoon"),
    ("cocoon_bin", " cocoon"),
    ("cocoon_processes", "0"),
    ("cocoon_processes", "65"),
    ("macos_vnc_password", "123456789"),
    ("macos_vnc_password", "ééééé"),
    ("macos_vnc_password", "a b"),
    ("macos_vnc_password", 'a"b'),
    ("macos_vnc_password", "a\x07b"),
    ("orphan_policy", "delete"),
    ("restore_mode", "fast"),
    ("kubelet_port", "0"),
    ("kubelet_port", "65536"),
    ("kubelet_port", "-1"),
    ("kubelet_port", "+10250"),
    ("kubelet_port", "10_250"),
    ("kubelet_port", " 10250"),
    ("kubelet_port", "10250.0"),
    ("kubelet_port", "١٠٢٥٠"),
    ("kubelet_port", "9" * 5000),
    ("metrics_addr", "9091"),
    ("metrics_addr", "localhost"),
    ("metrics_addr", "::1:9091"),
    ("metrics_addr", "[::1]"),
    ("metrics_addr", "[10.0.0.1]:9091"),
    ("metrics_addr", "10.0.0.300:9091"),
    ("metrics_addr", "http://localhost:9091"),
    ("metrics_addr", ":65536"),
    ("metrics_addr", ":"),
    ("reserve_percent", "101"),
    ("reserve_percent", "20%"),
    ("node_cpu", "0"),
    ("node_cpu", "500m"),
    ("node_cpu", "-4"),
    ("node_cpu", "four"),
    ("node_cpu", "1e"),
    ("node_mem", "64"),
    ("node_mem", "512m"),
    ("node_mem", "64GB"),
    ("node_mem", "64 Gi"),
    ("node_mem", "64gi"),
    ("node_mem", "1048576.5"),
    ("node_storage", "0"),
    ("node_hugepages", "1Mi"),
    ("node_pods", "0"),
    ("node_pods", "1k"),
    ("cocoon_root_dir", "cocoon"),
    ("cocoon_cgroup_parent", "/cocoon.slice"),
    ("cocoon_cgroup_parent", "../cocoon.slice"),
    ("snapshot_cpu_class", "ice lake"),
    ("oci_registry", "registry.example/snapshots"),
]


class TestValues:
    @pytest.mark.parametrize(("name", "text", "value"), RIGHT)
    def test_what_is_allowed_is_read(self, name, text, value):
        assert load(name, text) == value

    @pytest.mark.parametrize(("name", "text"), WRONG)
    def test_what_cannot_be_right_is_refused_wherever_it_stands(self, name, text):
        row = BY_NAME[name]
        with pytest.raises(WrongSettings) as from_environment:
            Settings.load({row.env: text})
        assert str(from_environment.value).startswith(f"{row.env}: ")
        if row.flag:
            with pytest.raises(WrongSettings) as from_flag:
                Settings.load({}, {name: text})
            assert str(from_flag.value).startswith(f"{row.flag}: ")

    def test_the_error_is_one_line_with_the_setting_the_value_and_what_is_allowed(self):
        with pytest.raises(WrongSettings) as caught:
            Settings.load({"VK_KUBELET_PORT": "10250\n10251"})
        assert str(caught.value) == (
            "VK_KUBELET_PORT: '10250\\n10251' is not possible; allowed: a port from 1 to 65535"
        )
        (wrong,) = caught.value.wrong
        assert (wrong.setting, wrong.allowed) == ("VK_KUBELET_PORT", "a port from 1 to 65535")

    def test_all_that_is_wrong_is_named_at_once_each_as_it_was_written(self, tmp_path):
        environ = {
            "VK_KUBELET_PORT": "0",
            "VK_LOG_LEVEL": "loud",
            "VK_TLS_CERT": str(tmp_path / "none"),
            "KUBECONFIG": "/",
        }
        with pytest.raises(WrongSettings) as caught:
            Settings.load(environ, {"node_name": "A"}, files=True)
        lines = str(caught.value).splitlines()
        assert [line.partition(":")[0] for line in lines] == [
            "KUBECONFIG",
            "--node-name",
            "VK_KUBELET_PORT",
            "VK_TLS_CERT",
            "VK_LOG_LEVEL",
        ]

    @pytest.mark.parametrize(
        ("environ", "setting"),
        [
            ({"VK_METRICS_ADDR": ":10250"}, "VK_METRICS_ADDR"),
            ({"VK_KUBELET_PORT": "9091"}, "VK_METRICS_ADDR"),
            ({"VK_STATUS_ADDR": "127.0.0.1:9091"}, "VK_STATUS_ADDR"),
            ({"VK_METRICS_ADDR": "127.0.0.1:9092"}, "VK_STATUS_ADDR"),
        ],
    )
    def test_one_port_for_two_things_cannot_be_right(self, environ, setting):
        with pytest.raises(WrongSettings, match=f"^{setting}: .* allowed: a port other than VK_"):
            Settings.load(environ)

    @pytest.mark.parametrize(
        "environ",
        [
            {"VK_METRICS_ADDR": "10.0.0.1:9092"},
            {"VK_METRICS_ADDR": ":0", "VK_STATUS_ADDR": ":0"},
            {"VK_METRICS_ADDR": "127.0.0.1:9092", "VK_STATUS_ADDR": "off"},
        ],
    )
    def test_ports_of_different_addresses_and_free_ones_are_not_the_same(self, environ):
        Settings.load(environ)

    def test_a_very_long_value_is_cut_in_the_error(self):
        with pytest.raises(WrongSettings) as caught:
            load("node_name", "x" * 10_000)
        assert len(str(caught.value)) < 300

    def test_a_wrong_secret_is_not_repeated(self):
        with pytest.raises(WrongSettings) as caught:
            load("macos_vnc_password", "hunter2 hunter2")
        assert "hunter2" not in str(caught.value)
        assert "hunter2" not in repr([vars(wrong) for wrong in caught.value.wrong])

    @given(text=st.text(min_size=1))
    def test_any_text_is_either_read_or_refused(self, text):
        for row in SETTINGS:
            try:
                row.read(text, row.env)
            except SettingError as error:
                assert "\n" not in str(error)

    @given(port=st.integers(min_value=0, max_value=65535), host=st.sampled_from(["", "127.0.0.1", "::1", "a.example"]))
    def test_an_address_is_read_back_from_how_it_is_written(self, host, port):
        assert load("metrics_addr", str(Address(host, port))) == Address(host, port)

    def test_the_default_of_each_setting_is_itself_allowed(self):
        environ = {row.env: row.default for row in SETTINGS}
        assert Settings.load(environ) == Settings()


class TestStrangers:
    def test_a_mistyped_variable_is_reported_with_the_one_that_was_meant(self):
        assert Settings.strangers({"VK_NODE_NMAE": "x"}) == {"VK_NODE_NMAE": "VK_NODE_NAME"}

    def test_one_letter_less_is_enough(self):
        assert Settings.strangers({"VK_LEASE_PATH": "/x"}) == {"VK_LEASE_PATH": "VK_LEASES_PATH"}

    def test_of_cocoons_own_variables_only_those_nearly_ours_are_strangers(self):
        found = Settings.strangers({"COCOON_ROOTDIR": "/x", "COCOON_LOG": "debug", "COCOON_ROOT_DIR": "/y"})
        assert found == {"COCOON_ROOTDIR": "COCOON_ROOT_DIR"}

    def test_a_variable_nothing_resembles_is_reported_alone(self):
        assert Settings.strangers({"VK_SHOE_SIZE": "44"}) == {"VK_SHOE_SIZE": ""}

    def test_known_variables_and_those_of_others_are_not_strangers(self):
        assert Settings.strangers({row.env: "" for row in SETTINGS} | {"PATH": "", "KUBE_EDITOR": ""}) == {}


class TestFiles:
    def test_without_a_kubeconfig_nothing_is_looked_for(self):
        Settings.load({}, files=True)

    def test_a_kubeconfig_that_is_there_is_fine(self, tmp_path):
        (tmp_path / "config").write_text("{}")
        Settings.load({"KUBECONFIG": str(tmp_path / "config")}, files=True)

    def test_of_several_kubeconfigs_one_must_be_there(self, tmp_path):
        (tmp_path / "config").write_text("{}")
        Settings.load({"KUBECONFIG": f"{tmp_path / 'missing'}:{tmp_path / 'config'}"}, files=True)

    @pytest.mark.parametrize("name", ["kubeconfig", "kubelet_client_ca", "tls_cert", "tls_key"])
    @pytest.mark.parametrize("file", ["missing", ""])
    def test_one_that_is_missing_or_a_directory_cannot_be_right_wherever_it_is_named(self, tmp_path, name, file):
        row, path = BY_NAME[name], str(tmp_path / file)
        for environ, flags, written in (({row.env: path}, {}, row.env), ({}, {name: path}, row.flag)):
            with pytest.raises(WrongSettings, match=f"^{written}: .* allowed: a file that exists and can be read$"):
                Settings.load(environ, flags, files=True)

    def test_files_are_not_looked_at_by_somebody_who_only_asks_the_daemon(self):
        Settings.load({"KUBECONFIG": "/none"})


class TestPages:
    """Pages made from the table; `make docs` renews them."""

    @pytest.mark.parametrize(
        ("path", "page"),
        [("docs/configuration.md", configuration_page), ("packaging/vk-cocoon.env.example", environment_example)],
    )
    def test_the_page_in_the_repository_is_what_the_table_says_now(self, path, page):
        assert (ROOT / path).read_text() == page(), "stale: run `make docs`"

    def test_every_variable_is_in_both_pages(self):
        for row in SETTINGS:
            assert f"**`{row.env}`**" in configuration_page()
            assert f"#{row.env}={row.default}\n" in environment_example()

    def test_the_example_as_it_is_changes_nothing_and_uncommented_it_sets_the_defaults(self):
        lines = environment_example().splitlines()
        assert all(line.startswith("#") for line in lines if line)
        pairs = [line[1:].split("=", 1) for line in lines if line.startswith("#") and line[1:2].isupper()]
        assert len(pairs) == len(SETTINGS)
        assert Settings.load(dict(pairs)) == Settings()

    @pytest.mark.process
    @pytest.mark.parametrize(
        ("arguments", "status"), [(["configuration"], 0), (["environment"], 0), ([], 2), (["x"], 2)]
    )
    def test_the_module_prints_them(self, arguments, status):
        ended = subprocess.run(
            [sys.executable, "-m", "vkcocoon_settings", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == status
        assert bool(ended.stdout) == (status == 0)
