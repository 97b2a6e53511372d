"""D6: vkcocoon makes blocking calls cooperative when it is imported; too late is one clear line, in time is silence."""

import subprocess
import sys

import pytest


def python(code):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, timeout=60
    )


def test_importing_it_first_is_silent_and_patches():
    done = python("import vkcocoon, socket, gevent.socket; assert socket.socket is gevent.socket.socket")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("early", ["ssl", "urllib3", "kubernetes", "paramiko"])
def test_importing_it_too_late_fails_with_one_line_that_says_so(early):
    done = python(f"import {early}\nimport vkcocoon")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: import vkcocoon before ")
    assert early in last


def test_a_caller_that_has_patched_itself_may_import_it_whenever_it_likes():
    done = python("from gevent import monkey; monkey.patch_all()\nimport ssl, vkcocoon")
    assert (done.returncode, done.stderr) == (0, "")
