"""What keeps the code readable for the next person, held by the machine: who imports whom, sizes, words, names.

Calls that must not be made (waiting, reading a clock, spawning, drawing numbers past their one place) are banned in
pyproject.toml and found by `make lint`; here is checked that nobody but the places made for it lifts those bans.
"""

import ast
import re
from pathlib import Path

import pytest

from vkcocoon_status import Reason

ROOT = Path(__file__).parent.parent

# Who may import whom: a module imports only from lines above its own. Modules of one line do not know each other.
LAYERS = [
    ["vkcocoon_quantity"],
    ["vkcocoon_probes", "vkcocoon_net", "vkcocoon_status", "vkcocoon_settings", "vkcocoon_logs", "vkcocoon_vmlog"],
    ["vkcocoon_terminal", "vkcocoon_envfile", "vkcocoon_debts"],
    ["vkcocoon_page", "vkcocoon_signals", "vkcocoon_commands", "vkcocoon_server", "vkcocoon_kube", "vkcocoon_systemd"],
    [
        "vkcocoon_http",
        "vkcocoon_window",
        "vkcocoon_access",
        "vkcocoon_certificates",
        "vkcocoon_vms",
        "vkcocoon_events",
        "vkcocoon_publish",
        "vkcocoon_host",
    ],
    ["vkcocoon_spec", "vkcocoon_macos", "vkcocoon_pods", "vkcocoon_node", "vkcocoon_stats"],
    ["vkcocoon_guests", "vkcocoon_exposition", "vkcocoon_record"],
    ["vkcocoon_kubelet", "vkcocoon_stages"],
    ["vkcocoon_tracking"],
    ["vkcocoon_overview"],
    ["vkcocoon_ports"],
    ["vkcocoon_readiness", "vkcocoon_snapshots", "vkcocoon_recorder"],
    ["vkcocoon_removal", "vkcocoon_setup"],
    ["vkcocoon_creation", "vkcocoon_watch"],
    ["vkcocoon_hibernation", "vkcocoon_startup"],
    ["vkcocoon"],
    ["vkcocoon_daemon"],
    ["vkcocoon_service"],
    ["vkcocoon_doctor"],
    ["vkcocoon_inspection"],
    ["vkcocoon_cli"],
    ["vkcocoon_entry"],
]
# Libraries that are heavy, or whose types must not spread, and the only places that know them.
LIBRARIES = {
    "kubernetes": ["vkcocoon_kube"],
    "prometheus_client": ["vkcocoon_http"],
    "click": ["vkcocoon_cli", "vkcocoon_inspection", "simulator.simulate"],
    "ping3": ["vkcocoon_net"],
    "paramiko": ["simulator.fake_sshd"],
    "cryptography": ["vkcocoon_certificates"],
}
# Imported inside a function: the fixed name vkcocoon.main leads to the daemon, which is made of what vkcocoon defines.
DOORS = {"vkcocoon": {"vkcocoon_service"}}
# The copied single module must stay usable: nothing but the standard library, gevent and what is named here.
SELF_CONTAINED = {"vkcocoon_probes": [], "vkcocoon_net": ["ping3"]}
LIFTED_BANS = (
    "vkcocoon_net.py",
    "vkcocoon_probes.py",
    "vkcocoon_cli.py",
    "vkcocoon_inspection.py",
    "simulator/",
    "tests/",
)

LONGEST_MODULE = 900
LONGEST_FUNCTION = 70
# Written in one English: words whose other spelling slips in.
BRITISH = (
    r"\b(behaviour|colour|favour|neighbour|honour|flavour|licence|centre|catalogue|grey\b|defence|labelled"
    r"|signalled|modelled|(author|custom|final|general|initial|maxim|minim|normal|optim|organ|priorit|random|real"
    r"|recogn|serial|special|summar|synchron|util)is(e[ds]?|er|ing|ation)\b)"
)
UNFINISHED = r"\b(TODO|FIXME|XXX|HACK)\b"

MODULES = sorted(ROOT.glob("vkcocoon*.py"))
SIMULATOR = sorted((ROOT / "simulator").glob("**/*.py"))
TESTS = sorted((ROOT / "tests").glob("**/*.py"))
CODE = [*MODULES, *SIMULATOR]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "packaging/*", "Makefile", ".ci/run", "setup.py", "pyproject.toml")
    for path in ROOT.glob(pattern)
    if path.is_file()
)
SCENARIOS = sorted((ROOT / "simulator").glob("scenarios/*"))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def name_of(path: Path) -> str:
    return shown(path.with_suffix("")).replace("/", ".").removesuffix(".__init__")


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(path: Path, *, lazy: bool) -> set[str]:
    """Top names imported by a file; `lazy` includes those imported inside functions."""
    found: set[str] = set()
    pending: list[ast.AST] = [parsed(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
        if lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)
    return found


class TestImports:
    def test_each_module_has_its_place_in_the_layers(self):
        placed = [name for layer in LAYERS for name in layer]
        assert sorted(placed) == sorted(name_of(path) for path in MODULES)

    @pytest.mark.parametrize("path", MODULES, ids=shown)
    def test_a_module_imports_only_from_the_layers_below_it(self, path):
        below: set[str] = set()
        for layer in LAYERS:
            if name_of(path) in layer:
                break
            below |= set(layer)
        ours = {name for name in imports(path, lazy=True) if name.startswith("vkcocoon")}
        assert ours - DOORS.get(name_of(path), set()) <= below
        assert not imports(path, lazy=False) & DOORS.get(name_of(path), set())

    @pytest.mark.parametrize("path", MODULES, ids=shown)
    def test_the_simulator_is_imported_by_nobody_but_the_commands_that_start_it(self, path):
        assert "simulator" not in imports(path, lazy=name_of(path) != "vkcocoon_cli")

    @pytest.mark.parametrize("library", LIBRARIES)
    def test_a_library_is_known_in_one_place(self, library):
        knowing = [name_of(path) for path in CODE if library in imports(path, lazy=True)]
        assert set(knowing) <= set(LIBRARIES[library])

    @pytest.mark.parametrize("name", SELF_CONTAINED)
    def test_the_rooms_without_friends_stay_without(self, name):
        import sys

        allowed = {*sys.stdlib_module_names, "gevent", *SELF_CONTAINED[name]}
        assert imports(ROOT / f"{name}.py", lazy=True) <= allowed


class TestModules:
    @pytest.mark.parametrize("path", [*CODE, *TESTS], ids=shown)
    def test_each_says_at_its_top_what_it_is_for(self, path):
        assert ast.get_docstring(parsed(path))

    @pytest.mark.parametrize("path", CODE, ids=shown)
    def test_each_names_what_others_may_use(self, path):
        tree = parsed(path)
        public = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        ]
        if path.name == "__init__.py" and len(tree.body) == 1:
            return  # nothing but a docstring
        assert len(public) == 1
        assert all(not name.startswith("_") or name == "__version__" for name in public[0])

    @pytest.mark.parametrize("path", [*CODE, *TESTS], ids=shown)
    def test_none_has_outgrown_one_room(self, path):
        assert len(path.read_text().splitlines()) <= LONGEST_MODULE

    @pytest.mark.parametrize("path", CODE, ids=shown)
    def test_no_function_is_longer_than_a_screen_or_takes_a_crowd(self, path):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= LONGEST_FUNCTION, f"{node.name}: {length} lines"
                positional = [*node.args.posonlyargs, *node.args.args]
                assert len(positional) <= 6, f"{node.name}: make them keywords"

    @pytest.mark.parametrize("path", [*CODE, *TESTS], ids=shown)
    def test_none_is_a_drawer_for_everything(self, path):
        assert not re.search(r"(^|_)(utils?|helpers?|common|base|misc)$", path.stem)


LOGS = {"debug", "info", "warning", "error", "exception", "critical"}


class TestLogLines:
    @pytest.mark.parametrize("path", CODE, ids=shown)
    def test_a_message_begins_small_and_ends_without_a_stop(self, path):
        """One style, so that lines of different modules read as one log; names such as VM and VK_NODE_IP stay."""
        for node in ast.walk(parsed(path)):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func
            if not called or called.attr not in LOGS or ast.unparse(called.value) != "log":
                continue
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                where = f"{shown(path)}:{node.lineno}: {first.value!r}"
                assert not re.match(r"[A-Z][a-z]", first.value), where
                assert not first.value.endswith("."), where


class TestBans:
    def test_a_lifted_ban_stands_where_it_may_and_says_why(self):
        for path in [*CODE, *TESTS]:
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                if lifted := re.search(r"# noqa:.*?\bTID251\b(.*)", line):
                    where = f"{shown(path)}:{number}"
                    assert shown(path).startswith(LIFTED_BANS), where
                    assert re.search(r"\w{2,}", lifted[1]), f"{where}: no reason"

    def test_no_file_is_exempt_from_checks_as_a_whole(self):
        for path in [*CODE, *TESTS]:
            assert not re.search(r"^# (ruff: noqa|mypy: ignore)", path.read_text(), re.MULTILINE), shown(path)

    def test_an_exception_is_never_swallowed_without_a_word(self):
        for path in CODE:
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.ExceptHandler):
                    caught = ast.unparse(node.type) if node.type else ""
                    silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
                    assert caught, f"{shown(path)}:{node.lineno}: a bare except"
                    assert not (silent and caught in ("Exception", "BaseException")), f"{shown(path)}:{node.lineno}"


class TestText:
    def lines(self):
        for path in [*CODE, *TESTS, *PAGES, *SCENARIOS]:
            if path.name != Path(__file__).name:
                for number, line in enumerate(path.read_text().splitlines(), start=1):
                    yield f"{shown(path)}:{number}", line

    def test_no_path_of_the_machine_it_was_written_on(self):
        paths = re.compile(r"(?<![\w.])/(work|root(?!/\.kube)|Users|home/(?!somebody)\w+|tmp/\w)/")
        assert [where for where, line in self.lines() if paths.search(line)] == []

    def test_one_english(self):
        found = []
        for where, line in self.lines():
            found += [f"{where}: {word[0]}" for word in re.finditer(BRITISH, line, re.IGNORECASE)]
        assert found == []

    def test_nothing_is_left_for_later_in_a_comment(self):
        assert [where for where, line in self.lines() if re.search(UNFINISHED, line)] == []

    def test_links_in_the_docs_lead_somewhere(self):
        broken = []
        for page in PAGES:
            if page.suffix == ".md":
                for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text()):
                    if not (page.parent / target).exists():
                        broken.append(f"{shown(page)}: {target}")
        assert broken == []


class TestDocs:
    def test_each_reason_has_its_section_on_the_page_about_pods_that_are_not_ready(self):
        sections = re.findall(r"^### (\w+)$", (ROOT / "docs" / "not-ready.md").read_text(), re.MULTILINE)
        assert sorted(sections) == sorted(Reason)

    def test_each_module_is_on_the_page_about_the_architecture(self):
        rooms = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
        assert {name_of(path) for path in MODULES} == set(re.findall(r"\bvkcocoon\w*", rooms))

    def test_a_decision_or_clause_that_is_cited_exists(self):
        decisions = set(
            re.findall(r"^- \*\*([A-Z]\d+)\*\*", (ROOT / "docs" / "decisions.md").read_text(), re.MULTILINE)
        )
        rows = re.findall(r"^\| ([NP]\d+[NP\d, ]*) \|", (ROOT / "docs" / "kubernetes.md").read_text(), re.MULTILINE)
        scenarios = {number for row in rows for number in row.split(", ")}
        clauses = set(re.findall(r"\bS\d(?:\.\d)?\b", (ROOT / "docs" / "specification.md").read_text()))
        unknown = []
        for path in [*CODE, *TESTS, *ROOT.glob("docs/*.md")]:
            for cited in re.findall(r"(?<![\w/$.-])([TPLOIKMDS][1-9]\d?(?:\.\d)?)(?![\w-])", path.read_text()):
                if cited not in decisions | clauses | scenarios:
                    unknown.append(f"{shown(path)}: {cited}")
        assert unknown == []
